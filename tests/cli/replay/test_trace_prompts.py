"""Equal keys make equal tokens, and nothing else does."""

from __future__ import annotations

from mooncake.cli.replay.trace_prompts import HIGHEST_TOKEN, LOWEST_TOKEN, TracePrompts
from mooncake.sim.traces.trace_row import TraceRow


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
