# SPDX-License-Identifier: Apache-2.0
"""Equal keys make equal tokens, and nothing else does; the summary of a replay."""

from __future__ import annotations

import pytest

from mooncake.cli.replay.endpoint import HIGHEST_TOKEN, LOWEST_TOKEN
from mooncake.cli.replay.replay import TracePrompts, token_intervals
from mooncake.sim.traces.trace import TraceRow


def row(num_input: int, *keys: int) -> TraceRow:
    return TraceRow(0.0, num_input, 1, keys)


def test_prompts_share_what_keys_share() -> None:
    prompts = TracePrompts(16)
    one, other = prompts.tokens(row(40, 1, 2, 3), 0), prompts.tokens(row(48, 1, 2, 4), 1)
    assert len(one) == 40 and one[:32] == other[:32] and one[32:] != other[32:40]
    assert all(LOWEST_TOKEN <= token < HIGHEST_TOKEN for token in one)
    assert TracePrompts(16).tokens(row(40, 1, 2, 3), 7) == one, "the same in another run"
    assert TracePrompts(16, seed=1).tokens(row(40, 1, 2, 3), 0) != one


def test_what_no_key_covers_is_alone() -> None:
    prompts = TracePrompts(16)
    one, other = prompts.tokens(row(40, 1, 2), 0), prompts.tokens(row(40, 1, 2), 1)
    assert len(one) == len(other) == 40
    assert one[:32] == other[:32] and one[32:] != other[32:]


def test_the_longest_tenth_of_intervals_counts() -> None:
    assert token_intervals([]) == (0.0, 0.0)
    assert token_intervals([0.2]) == (0.2, 0.2)
    longest, mean = token_intervals([0.1] * 18 + [0.5, 0.3])
    assert longest == pytest.approx(0.4)
    assert mean == pytest.approx(0.13)
