# SPDX-License-Identifier: Apache-2.0
"""Sessions of agents, and the order in which a closed load sends their turns."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.errors import InvalidArgument
from mooncake.sim.traces.generators import Agentic
from mooncake.sim.traces.sessions import (
    AgentSession,
    ClosedLoop,
    NextTurn,
    SessionKeys,
    Turn,
    num_working_tokens,
    recipe_sessions,
    trace_sessions,
)
from mooncake.sim.traces.trace import TraceRow

RECIPE = Agentic(common_tokens=64, first_tokens=20, turn_tokens=10, output_tokens=5, turns=4)


def test_a_recipe_s_prompts_grow_by_answers_and_tools() -> None:
    one, other = recipe_sessions(RECIPE, 2)
    assert [turn.num_input for turn in one.turns] == [84, 99, 114, 129]
    assert [turn.num_kept for turn in one.turns] == [64, 89, 104, 119]
    assert one.longest == 134
    assert one.turns[0].pause_s == 0 and all(turn.pause_s > 0 for turn in one.turns[1:])
    assert one.name != other.name and one.turns[1].pause_s != other.turns[1].pause_s
    assert recipe_sessions(RECIPE, 2) == [one, other]


def test_common_beginnings_are_no_session_s_own_blocks() -> None:
    first = SessionKeys(AgentSession("a", 0, (Turn(0, 2048, 2),)), 0, 512).send(Turn(0, 2048, 2))
    other = SessionKeys(AgentSession("b", 4096, (Turn(2048, 100, 2),)), 4096, 512).send(Turn(2048, 100, 2))
    again = SessionKeys(AgentSession("c", 4096, (Turn(2048, 100, 2),)), 7, 512).send(Turn(2048, 100, 2))
    assert len(first) == len(other) == 4 and not set(first) & set(other)
    assert again == other


def test_a_session_may_begin_later() -> None:
    [session] = recipe_sessions(RECIPE, 1)
    later = session.from_turn(2)
    assert [turn.num_input for turn in later.turns] == [114, 129]
    assert later.turns[0] == Turn(64, 50, 5, session.turns[2].pause_s)
    assert num_working_tokens([later, session]) == 64 + (50 + 5) + (20 + 5)


def test_a_trace_s_turn_keeps_what_its_blocks_have_in_common() -> None:
    rows = [
        TraceRow(0.0, 640, 64, tuple(range(10)), "s"),
        TraceRow(9.0, 896, 32, tuple(range(14)), "s", pause_s=3.0),
        TraceRow(20.0, 1280, 32, (*range(12), *range(90, 98)), "s", pause_s=1.0),
        TraceRow(30.0, 6400, 32, tuple(range(100)), "s", pause_s=1.0),
    ]
    alone = [TraceRow(0.0, 640, 64, tuple(range(10)), "alone")]
    [session] = trace_sessions(
        [rows, alone], block_tokens=64, divide_lengths=2, longest=1000, common_tokens=64
    )
    assert session.name == "s"
    assert [turn.num_input for turn in session.turns] == [320, 448, 640], "the last one is too long"
    assert [turn.num_kept for turn in session.turns] == [64, 320 + 32, 12 * 64 // 2]
    assert [turn.pause_s for turn in session.turns] == [0.0, 3.0, 1.0]
    assert [turn.num_output for turn in session.turns] == [32, 16, 16]


def test_a_conversation_s_blocks_stay_where_its_tokens_stay() -> None:
    session = AgentSession("s", 3, (Turn(32, 20, 13), Turn(65, 10, 5), Turn(40, 30, 1)))
    mine, twin = SessionKeys(session, 0, 16), SessionKeys(session, 1, 16)
    first, other = mine.send(session.turns[0]), twin.send(session.turns[0])
    assert len(first) == 4, "65 tokens, of which the last is not computed"
    assert first[:2] == other[:2] and not set(first[2:]) & set(other[2:])
    second = mine.send(session.turns[1])
    assert second[:4] == first and len(second) == 79 // 16
    third = mine.send(session.turns[2])
    assert third[:2] == first[:2] and third[2] not in second and len(third) == 70 // 16


def run(loop: ClosedLoop) -> list[NextTurn]:
    """All turns that end before the load is over, in that order, if every answer takes no time."""
    waiting, ended = loop.start(), []
    while waiting and not loop.is_over:
        ended.append(waiting.pop(0))
        waiting += loop.ended(ended[-1].place)
    return ended


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(0, 60), st.integers(1, 5))
def test_a_closed_load_is_over_when_so_many_have_ended(
    num_at_once: int, num_requests: int, turns: int
) -> None:
    recipe = Agentic(common_tokens=64, first_tokens=20, turn_tokens=10, output_tokens=5, turns=turns)
    loop = ClosedLoop(recipe_sessions(recipe, 3), num_at_once, num_requests)
    ended = run(loop)
    assert loop.is_over and loop.ended(0) == []
    assert len(ended) == num_at_once + num_requests
    assert all(one.is_first_phase for one in ended[:num_at_once])
    assert not any(one.is_first_phase for one in ended[num_at_once:])
    for place in range(num_at_once):
        mine = [one for one in ended if one.place == place]
        for before, after in pairwise(mine):
            if after.number == before.number:
                assert after.index == before.index + 1 and after.session is before.session
            else:
                assert before.index == len(before.session.turns) - 1 and after.index == 0
    by_number = {one.number: one.session.name for one in ended}
    assert len(set(by_number.values())) == len(by_number), "no session runs twice under one name"


def test_the_load_waits_for_all_of_the_first_phase() -> None:
    loop = ClosedLoop(recipe_sessions(RECIPE, 3), 3, 10)
    loop.start()
    assert loop.ended(2) == [] and loop.ended(0) == []
    following = loop.ended(1)
    assert [one.place for one in following] == [0, 1, 2]
    assert all(one.pause_s <= one.turn.pause_s for one in following if one.index), "in the middle of a pause"


def test_a_load_needs_sessions() -> None:
    with pytest.raises(InvalidArgument, match="sessions"):
        ClosedLoop([], 1, 1)
    with pytest.raises(InvalidArgument, match="num_at_once"):
        ClosedLoop(recipe_sessions(RECIPE, 1), 0, 1)
