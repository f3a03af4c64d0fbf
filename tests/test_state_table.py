# SPDX-License-Identifier: Apache-2.0
"""State tables: dispatch, what an unexpected event costs, and that every declared state can be reached."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mooncake import state_table
from mooncake.metrics import registry
from mooncake.state_table import Faults, Move, StateTable, UnexpectedEvent, move
from tests.reference_docs import diagram, state_tables


class Door(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    LOCKED = "locked"


@dataclass(frozen=True)
class Pushed:
    strength: int


class House:
    """A machine: a strong push opens the door, a weak one does not."""

    def __init__(self) -> None:
        self.door = Door.CLOSED

    def pushed(self, event: Pushed, now: float) -> list[str]:
        if event.strength < 3:
            return []
        self.door = Door.OPEN
        return [f"opened at {now}"]

    def handle(self, table: StateTable[Door], event: Pushed | str, now: float) -> list[str]:
        return table.handle(lambda: self.door, event, self, event, now)


@pytest.fixture
def table() -> Iterator[StateTable[Door]]:
    moves: dict[tuple[Door, type | str], Move[Door]] = {
        (Door.CLOSED, Pushed): move(Door.CLOSED, Door.OPEN, by=House.pushed, meaning="pushed"),
        (Door.CLOSED, "key turned"): move(Door.LOCKED),
        (Door.LOCKED, "key turned"): move(Door.CLOSED),
        (Door.LOCKED, Pushed): move(Door.LOCKED),
    }
    yield StateTable("door of a test", Door, moves)
    del state_table.TABLES["door of a test"]


def counted(state: str, event: str) -> float:
    labels = {"machine": "door of a test", "state": state, "event": event}
    return registry.get_sample_value("mooncake_unexpected_events_total", labels) or 0.0


def test_an_event_calls_the_method_of_its_state(table: StateTable[Door]) -> None:
    house = House()
    assert house.handle(table, Pushed(1), 1.0) == []
    assert house.handle(table, Pushed(5), 2.0) == ["opened at 2.0"]
    assert house.door is Door.OPEN


def test_a_move_without_a_method_leads_to_its_state(table: StateTable[Door]) -> None:
    assert table.next(Door.CLOSED, "key turned") is Door.LOCKED
    assert table.next(Door.LOCKED, "key turned") is Door.CLOSED
    assert table.dispatch(Door.LOCKED, Pushed(5))(House(), Pushed(5), 0.0) == []


def test_an_unexpected_event_raises_in_tests(table: StateTable[Door]) -> None:
    assert (Door.OPEN, Pushed) not in table.moves
    with pytest.raises(UnexpectedEvent, match="door of a test: Pushed in state OPEN"):
        table.dispatch(Door.OPEN, Pushed(1))
    with pytest.raises(UnexpectedEvent, match="key turned in state OPEN"):
        table.next(Door.OPEN, "key turned")


def test_a_move_that_the_table_lacks_raises_in_tests(table: StateTable[Door]) -> None:
    with pytest.raises(UnexpectedEvent, match="Pushed to LOCKED in state CLOSED"):
        table.check_move(Door.CLOSED, Pushed(5), Door.LOCKED)


def test_an_unexpected_event_is_counted_in_production(
    table: StateTable[Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Faults, "raises", False)
    before = counted("OPEN", "Pushed"), counted("OPEN", "key turned")
    house = House()
    house.door = Door.OPEN
    assert house.handle(table, Pushed(5), 1.0) == []
    assert table.next(Door.OPEN, "key turned") is Door.OPEN
    assert (counted("OPEN", "Pushed"), counted("OPEN", "key turned")) == (before[0] + 1, before[1] + 1)


def test_two_tables_have_two_names(table: StateTable[Door]) -> None:
    with pytest.raises(AssertionError, match="two state machines are named"):
        StateTable("door of a test", Door, {})


def test_a_diagram_has_every_move(table: StateTable[Door]) -> None:
    assert diagram(table).splitlines() == [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> CLOSED",
        "    CLOSED --> CLOSED: pushed",
        "    CLOSED --> OPEN: pushed",
        "    CLOSED --> LOCKED: key turned",
        "    LOCKED --> CLOSED: key turned",
        "```",
        "",
        "Without effect: LOCKED: Pushed.",
    ]


def test_every_state_can_be_reached() -> None:
    """A state that no move leads to is a fault of the table, or of the machine."""
    tables = state_tables()
    assert len(tables) >= 7
    for path, table in tables:
        edges = [(state, to) for (state, _), entry in table.moves.items() for to in entry.to]
        states = table.all_states
        reached: set[enum.Enum] = {states[0]}
        while more := {to for state, to in edges if state in reached} - reached:
            reached |= more
        missing = [state for state in states if state not in reached]
        assert not missing, f"{path}: no event leads to {missing}"
