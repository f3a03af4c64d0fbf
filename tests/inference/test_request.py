# SPDX-License-Identifier: Apache-2.0
"""The state of a request before it is computed."""

from __future__ import annotations

import pytest

from mooncake.errors import InvalidArgument
from mooncake.inference.request import Request, SamplingParams
from mooncake.prefix import block_hashes, root_hash

BLOCK = 4


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 11])
def test_hashes_are_those_of_the_prefix(num_tokens: int) -> None:
    """A block has the same hash whether its tokens come from the prompt or from the answer."""
    tokens = list(range(50, 50 + num_tokens))
    grown = Request("a", tokens[:1], salt="s")
    for token in tokens[1:]:
        grown.hash_blocks(BLOCK)
        grown.token_ids.append(token)
    root = root_hash("s")
    assert grown.hash_blocks(BLOCK) == block_hashes(tokens, BLOCK, root)
    whole = Request("b", tokens, salt="s")
    hashes = [*whole.hash_blocks(BLOCK)]
    tail = [] if num_tokens % BLOCK == 0 else [whole.tail_hash]
    assert hashes + tail == block_hashes(tokens, BLOCK, root, include_partial=True)
    assert [whole.parent_hash(index) for index in range(len(hashes))] == [root, *hashes][: len(hashes)]


def test_tokens_generated_elsewhere_count() -> None:
    request = Request("a", [1, 2, 3, 4], SamplingParams(max_tokens=5), num_prior_output_tokens=2)
    assert request.num_output_tokens == 2
    request.token_ids.append(9)
    assert request.num_output_tokens == 3 and request.num_uncomputed_tokens == 5


@pytest.mark.parametrize("num_prior", [-1, 4, 5, 9])
def test_impossible_prior_tokens_are_refused(num_prior: int) -> None:
    with pytest.raises(InvalidArgument, match="num_prior_output_tokens"):
        Request("a", [1, 2, 3, 4], SamplingParams(max_tokens=5), num_prior_output_tokens=num_prior)


def test_an_answer_that_is_complete_can_not_be_resumed() -> None:
    with pytest.raises(InvalidArgument, match="num_prior_output_tokens"):
        Request("a", list(range(9)), SamplingParams(max_tokens=5), num_prior_output_tokens=5)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="prompt"):
        Request("a", [])
