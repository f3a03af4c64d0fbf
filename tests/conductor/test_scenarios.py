# SPDX-License-Identifier: Apache-2.0
"""Scenarios of the conductor as text: events, then its decisions. For operators as much as for tests.

``tests/scenarios/conductor_*.txt`` hold blocks like ::

    2 place r1 64 A
      prefill p1 (least to compute: 0 of 64 tokens cached, 0 queued); decode d1 (fewest running: 0)

An instant and a command; below it, indented, the decision and the changes. Probes are answered at once by an
instance's condition (``is p1 dead``: ready, alive or dead). With ``--rewrite``, pytest replaces the decisions
by the conductor's present ones.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from mooncake.conductor.conductor import Conductor
from mooncake.conductor.health import ProbeOutcome
from mooncake.conductor.messages import (
    AddInstance,
    BlocksRemoved,
    BlocksStored,
    Decision,
    Drain,
    Event,
    Failed,
    Finished,
    Moved,
    Place,
    Prefilled,
    Probe,
    Probed,
    Refuse,
    RemoveInstance,
    StateChanged,
    Unwatch,
    Watch,
)
from mooncake.conductor.settings import SchedulingSettings
from mooncake.machine import Wake
from mooncake.prefix import BlockKey, block_hashes, root_hash, short_key
from mooncake.types import WorkerRole
from tests.scenarios.play import FOLDER, play

BLOCK_TOKENS = 16
ANSWERS = {"ready": ProbeOutcome.READY, "alive": ProbeOutcome.ALIVE, "dead": ProbeOutcome.FAILED}


def blocks(prompt: str, num_blocks: int) -> list[BlockKey]:
    """The first blocks of the endless prompt that a letter denotes."""
    tokens = [ord(prompt)] * (num_blocks * BLOCK_TOKENS)
    return [short_key(one) for one in block_hashes(tokens, BLOCK_TOKENS, root_hash())]


class Stage:
    """One scenario's conductor, with default settings but for blocks of 16 tokens and 4 requests each."""

    def __init__(self) -> None:
        settings = SchedulingSettings(block_tokens=BLOCK_TOKENS, max_requests_per_instance=4)
        self.conductor = Conductor(settings, Random(0))
        self.now = 0.0
        self._answers: dict[str, str] = {}

    def perform(self, line: str) -> list[str]:
        when, command, *arguments = line.split()
        lines = self._let_time_pass(float(when))
        if command == "is":
            self._answers[arguments[0]] = arguments[1]
        elif command == "status":
            lines += [
                f"{row.instance} {row.role} {row.health}: {row.num_requests} requests, "
                f"{row.queued_tokens} tokens queued, {row.num_blocks} blocks"
                for row in self.conductor.status()
            ]
        elif command == "story":
            lines += self.conductor.story(arguments[0])
        elif command != "wait":
            lines += self._handle(self._event(command, arguments))
        self.conductor.check()
        return lines

    def _let_time_pass(self, until: float) -> list[str]:
        assert until >= self.now, "time goes forward"
        lines: list[str] = []
        while (deadline := self.conductor.deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            lines += [f"at {self.now:g}: {line}" for line in self._handle(Wake())]
        self.now = until
        return lines

    def _event(self, command: str, arguments: list[str]) -> Event:
        options = dict(word.split("=") for word in arguments if "=" in word)
        names = [word for word in arguments if "=" not in word]
        first = names[0]
        if command == "add":
            return AddInstance(first, WorkerRole(names[1]))
        if command == "place":
            num_tokens = int(names[1])
            keys = blocks(names[2], num_tokens // BLOCK_TOKENS) if len(names) > 2 else []
            exclude = options["exclude"].split(",") if "exclude" in options else []
            return Place(first, num_tokens, keys, options.get("affinity", ""), exclude)
        if command == "resume":
            return Place(first, int(names[1]), exclude=options["exclude"].split(","), needs_prefill=False)
        if command == "stored":
            return BlocksStored(first, blocks(names[1], int(names[2])))
        if command == "removed":
            return BlocksRemoved(first, blocks(names[1], int(names[2])))
        if command == "failed":
            return Failed(first, " ".join(names[2:]), names[1])
        if command == "moved":
            return Moved(first, names[1], " ".join(names[2:]))
        plain: dict[str, type[Prefilled | Finished | RemoveInstance | Drain]] = {
            "prefilled": Prefilled,
            "finished": Finished,
            "remove": RemoveInstance,
            "drain": Drain,
        }
        return plain[command](first)

    def _handle(self, event: Event | Wake) -> list[str]:
        lines: list[str] = []
        for effect in self.conductor.handle(event, self.now):
            match effect:
                case Decision():
                    lines.append(effect.reason)
                case Refuse():
                    lines.append(f"refused, {effect.refusal}; again in {effect.retry_after_s:g} s")
                case StateChanged():
                    lines.append(f"{effect.instance}: {effect.before} -> {effect.after} ({effect.reason})")
                case Watch() | Unwatch():
                    lines.append(f"{type(effect).__name__.lower()} {effect.instance}")
                case Probe():
                    answer = self._answers.get(effect.instance, "ready")
                    lines += self._handle(Probed(effect.instance, ANSWERS[answer], f"it is {answer}"))
        return lines


@pytest.mark.parametrize("path", sorted(FOLDER.glob("conductor_*.txt")), ids=lambda path: path.stem)
def test_conductor(path: Path, request: pytest.FixtureRequest) -> None:
    play(Stage(), path, request)


def test_there_are_scenarios() -> None:
    assert len(list(FOLDER.glob("conductor_*.txt"))) >= 4
