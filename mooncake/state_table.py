# SPDX-License-Identifier: Apache-2.0
"""Dispatch of a state machine: one table from (state, event) to what is done and to the next states.

A machine whose reaction depends on its state declares the table as a constant beside its class, and calls it
for every event::

    MOVES: StateTable[Door] = StateTable("door", Door, {(Door.CLOSED, Opened): move(Door.OPEN, by=on_opened)})

    def handle(self, event: Event, now: float) -> list[Effect]:
        return MOVES.handle(lambda: self.state, event, self, event, now)

An event is an instance of a class, or a name where the machine distinguishes cases itself. A pair without an
entry and a state that the entry does not list are faults of the program: they raise where ``raises`` is set,
as tests and the simulator do, and are counted elsewhere: a server that goes on is better than one that
ends. ``scripts/docs`` draws docs/reference/state-machines.md from these tables.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from prometheus_client import Counter

from mooncake.metrics import registry

StateT = TypeVar("StateT", bound=enum.Enum)
Method = Callable[..., list[Any]]

UNEXPECTED = Counter(
    "mooncake_unexpected_events_total",
    "Events and moves that a state machine's table lacks: faults of this program",
    ["machine", "state", "event"],
    registry=registry,
)

TABLES: dict[str, StateTable[Any]] = {}
"""Every table of the process, by the name of its machine."""


class Faults:
    """What happens at an unexpected event or move."""

    raises = False


class UnexpectedEvent(AssertionError):
    """A state machine received an event, or made a move, that its table does not have."""


class Move(NamedTuple, Generic[StateT]):
    """The entry of a pair: the states that may follow, and the method, if there is something to do."""

    to: tuple[StateT, ...]
    method: Method | None = None
    meaning: str = ""
    """Text for the diagram where the event's name does not say it."""


def move(*to: StateT, by: Method | None = None, meaning: str = "") -> Move[StateT]:
    return Move(to, by, meaning)


@dataclasses.dataclass(frozen=True, repr=False)
class StateTable(Generic[StateT]):
    """The moves of one kind of machine. Its first state is the first member of ``states``."""

    name: str
    states: type[StateT]
    moves: Mapping[tuple[StateT, type | str], Move[StateT]]

    def __post_init__(self) -> None:
        assert self.name not in TABLES, f"two state machines are named {self.name!r}"
        assert all(entry.to for entry in self.moves.values()), f"{self.name}: a move leads to no state"
        TABLES[self.name] = self

    @property
    def all_states(self) -> list[StateT]:
        return [*self.states]

    def handle(self, read_state: Callable[[], StateT], event: object, *arguments: object) -> list[Any]:
        """Call the method for ``event`` with ``arguments``; the table must have the move that it makes."""
        state = read_state()
        effects = self.dispatch(state, event)(*arguments)
        self.check_move(state, event, read_state())
        return effects

    def dispatch(self, state: StateT, event: object) -> Method:
        """The method for this event in this state; one that returns [] if there is none."""
        entry = self._entry(state, event)
        return _nothing if entry is None or entry.method is None else entry.method

    def next(self, state: StateT, event: str) -> StateT:
        """The state after an event that leads to one state; ``state`` itself if there is no entry."""
        entry = self._entry(state, event)
        if entry is None:
            return state
        (to,) = entry.to
        return to

    def check_move(self, state: StateT, event: object, new: StateT) -> None:
        """Require that ``event`` may lead from ``state`` to ``new``."""
        entry = self.moves.get((state, _key(event)))
        if entry is not None and new not in entry.to:
            self._fault(state, f"{name_of(event)} to {new.name}")

    def _entry(self, state: StateT, event: object) -> Move[StateT] | None:
        entry = self.moves.get((state, _key(event)))
        if entry is None:
            self._fault(state, name_of(event))
        return entry

    def _fault(self, state: StateT, event: str) -> None:
        if Faults.raises:
            raise UnexpectedEvent(f"{self.name}: {event} in state {state.name}")
        UNEXPECTED.labels(self.name, state.name, event).inc()

    def __repr__(self) -> str:
        return f"<StateTable of {self.name!r}, {len(self.moves)} moves>"


def name_of(event: object) -> str:
    """An event's name, in messages, labels and diagrams."""
    key = _key(event)
    return key if isinstance(key, str) else key.__name__


def _key(event: object) -> type | str:
    return event if isinstance(event, str | type) else type(event)


def _nothing(*_: object) -> list[Any]:
    return []
