# SPDX-License-Identifier: Apache-2.0
"""``MC_*`` variables: honoured, or the subject of one warning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mooncake.compat.transfer import environment
from mooncake.compat.transfer.environment import (
    ALWAYS_SO,
    NOT_HONOURED,
    EngineSettings,
    read_environment,
    reason_against,
)
from mooncake.config import options
from mooncake.errors import InvalidArgument

DOCS = Path(__file__).parents[3] / "docs" / "engine.md"
HONOURED = [name for option in options(EngineSettings) for name in option.more_variables]


def test_honoured_variables_have_their_effect() -> None:
    settings = read_environment(
        {
            "MC_MIN_PRC_PORT": "16000",
            "MC_MAX_RPC_PORT": "16010",
            "MC_TRANSFER_TIMEOUT": "60",
            "MC_FORCE_TCP": "true",
            "MC_TE_FILTERS": "mlx5_0,mlx5_2",
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",
            "MOONCAKE_ENGINE_GID_INDEX": "3",
        }
    )
    assert (settings.min_rpc_port, settings.max_rpc_port) == (16000, 16010)
    assert settings.transfer_timeout_s == 60 and settings.force_tcp
    assert settings.devices == ("mlx5_0", "mlx5_2") and settings.gid_index == 3


def test_other_variables_cause_one_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_warned", set())
    variables = {"MC_SLICE_SIZE": "1", "MC_GID_INDX": "3", "MC_WHATEVER": "x", "MC_STORE_MEMCPY": "1"}
    for _ in range(2):
        read_environment(variables)
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 3
    assert "pieces are sized by the engine" in logged[1]
    assert "did you mean MC_GID_INDEX" in logged[0] and "unknown" in logged[2]
    assert all(record.levelno == logging.WARNING for record in caplog.records)


def test_an_empty_variable_counts_as_not_set() -> None:
    assert read_environment({"MC_MIN_RPC_PORT": "", "MC_FORCE_TCP": ""}) == read_environment({})


def test_a_bad_value_names_its_variable() -> None:
    with pytest.raises(InvalidArgument, match="MC_TRANSFER_TIMEOUT"):
        read_environment({"MC_TRANSFER_TIMEOUT": "soon"})


def test_every_variable_is_in_one_list_and_in_the_docs() -> None:
    text = DOCS.read_text()
    everything = [*HONOURED, *ALWAYS_SO, *NOT_HONOURED]
    assert len(everything) == len(set(everything))
    assert [name for name in everything if f"`{name}`" not in text] == []
    assert all(reason_against(name) == "" for name in [*HONOURED, *ALWAYS_SO])


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("mooncake")
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    environment.set_log_level("")
    assert logger.level == logging.NOTSET
    environment.set_log_level("ERROR")
    assert logger.level == logging.ERROR
    logger.setLevel(logging.NOTSET)
