# SPDX-License-Identifier: Apache-2.0
"""Facts that let two SGLang servers share pages, and facts that separate them."""

from __future__ import annotations

import types
from typing import Any

import pytest

from mooncake.connectors.sglang.cache_identity import ARGUMENTS, facts_of, shard_facts
from tests.connectors.sglang.pool_doubles import config


@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_argument_that_changes_numbers_is_a_fact(name: str) -> None:
    def facts(value: str) -> dict[str, object]:
        arguments = types.SimpleNamespace(**{name: value})
        return facts_of(config(), {"weights_digest": "w"}, arguments)

    assert facts("a") == facts("a") != facts("b")


def test_weights_that_are_made_up_are_one_processes() -> None:
    arguments = types.SimpleNamespace(load_format="dummy")
    weights = [facts_of(config(), {}, arguments)["weights"] for _ in range(2)]
    assert weights[0] != weights[1]


def test_a_part_of_the_heads_is_named_so_that_servers_of_other_sizes_find_it() -> None:
    def heads(rank: int, size: int, number: int, num_shards: int) -> object:
        ranks: Any = config(tp_rank=rank, tp_size=size)
        return shard_facts(ranks, False, number, num_shards)["heads"]

    assert heads(1, 2, 1, 2) == heads(3, 4, 0, 1) == "3 of 4"
    assert shard_facts(config(tp_rank=1, tp_size=2), True, 0, 1)["heads"] == "all"
