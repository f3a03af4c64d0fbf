# SPDX-License-Identifier: Apache-2.0
"""The inferred blocks are bounded, and a prefix is kept longer than what follows it."""

from __future__ import annotations

from mooncake.conductor.index.inferred_blocks import InferredBlocks


def test_the_latest_prompts_are_remembered_from_their_beginning() -> None:
    inferred = InferredBlocks(4)
    assert inferred.note("a", [1, 2, 3]) == []
    assert inferred.note("a", [1, 9]) == []
    assert inferred.note("a", [1, 8]) == [3], "the end of the oldest prompt"
    assert inferred.note("b", [7, 7, 7]) == []
    assert inferred.note("a", [5]) == [2]


def test_only_the_beginning_of_a_too_long_prompt_is_kept() -> None:
    inferred = InferredBlocks(2)
    assert inferred.note("a", [1, 2, 3, 4]) == []
    assert inferred.note("a", [1, 2]) == []
    inferred.forget("a")
    assert inferred.note("a", [5, 6]) == []
    assert InferredBlocks(0).note("a", [1]) == []
