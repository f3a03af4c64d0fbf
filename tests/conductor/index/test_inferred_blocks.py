"""What is taken to be there is bounded, and a prefix outlives what follows it."""

from __future__ import annotations

from mooncake.conductor.index.inferred_blocks import InferredBlocks


def test_the_latest_prompts_are_remembered_from_their_beginning() -> None:
    assumed = InferredBlocks(4)
    assert assumed.note("a", [1, 2, 3]) == []
    assert assumed.note("a", [1, 9]) == []
    assert assumed.note("a", [1, 8]) == [3], "the end of the oldest prompt"
    assert assumed.note("b", [7, 7, 7]) == []
    assert assumed.note("a", [5]) == [2]


def test_of_a_prompt_that_is_too_long_the_beginning_is_taken() -> None:
    assumed = InferredBlocks(2)
    assert assumed.note("a", [1, 2, 3, 4]) == []
    assert assumed.note("a", [1, 2]) == []
    assumed.forget("a")
    assert assumed.note("a", [5, 6]) == []
    assert InferredBlocks(0).note("a", [1]) == []
