# SPDX-License-Identifier: Apache-2.0
"""Cost files: all that are shipped can be read, and match the paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.errors import InvalidArgument
from mooncake.sim.serving.node_costs import builtin_costs, load_costs


def test_every_shipped_file_is_whole() -> None:
    assert {"llama2-70b-8xA800", "llama3-70b-8xA800", "llama3-70b-8xH100", "llama3-70b-8xH200"} <= set(
        builtin_costs()
    )
    for name in builtin_costs():
        costs = load_costs(name)
        assert costs.source and costs.models.prefill is costs.prefill


@pytest.mark.parametrize(
    ("num_tokens", "seconds"), [(8192, 1.00), (16384, 2.05), (32768, 4.48), (65536, 10.58), (131072, 27.52)]
)
def test_prefill_is_that_of_the_paper(num_tokens: int, seconds: float) -> None:
    assert load_costs("llama3-70b-8xA800").prefill_s(0, num_tokens) == pytest.approx(seconds, rel=0.026)


@pytest.mark.parametrize(("num_tokens", "seconds"), [(8192, 0.13), (32768, 0.41), (131072, 2.33)])
def test_so_is_prefill_behind_a_cached_prefix(num_tokens: int, seconds: float) -> None:
    num_cached = int(num_tokens * 0.95)
    assert load_costs("llama3-70b-8xA800").prefill_s(num_cached, num_tokens) == pytest.approx(
        seconds, abs=0.3
    )


def test_a_file_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("title = 'mine'")
    with pytest.raises(InvalidArgument, match=r"costs is .*mine\.toml.*missing required field"):
        load_costs(str(path))
    with pytest.raises(InvalidArgument, match="llama3-70b-8xA800"):
        load_costs("llama4")
