# SPDX-License-Identifier: Apache-2.0
"""The journaling client: puts, gets and removes under load, and records requests and replies in order.

A separate process, configured by its argument (JSON). Every intention is in the journal before the request
is sent, every acknowledgement before the next request. It obeys lines on its standard input: ``pause`` is
answered when no request is in progress, ``go`` resumes.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from mooncake.errors import MooncakeError
from mooncake.store import PutGrant, Refusal, Store, StoreSettings
from mooncake.store import messages as m
from mooncake.types import Tier
from tests.kill.journal import Journal, Line, content

NUM_THREADS = 2
MOST_KEYS = 80
LEAST_KEYS = 40
"""Limit of the keys of one thread; further ones are removed, so that the pools never fill up."""
POLICIES = {"durable": m.PutPolicy(is_durable=True), "replicated": m.PutPolicy(num_replicas=2)}
REFUSED = ("no_space", "too_large")
"""Refusals after which nothing was written."""


class Gate:
    """Open while the client may begin requests."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = True
        self._num_busy = 0

    def __enter__(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_open)
            self._num_busy += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._num_busy -= 1
            self._changed.notify_all()

    def pause(self) -> None:
        with self._changed:
            self._is_open = False
            self._changed.wait_for(lambda: not self._num_busy)

    def go(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()


class Worker:
    """One thread, with its own keys."""

    def __init__(self, store: Store, journal: Journal, gate: Gate, name: str, config: dict[str, Any]) -> None:
        self._store, self._journal, self._gate, self._name = store, journal, gate, name
        self._random = Random(name)
        self._kinds: list[str] = config["kinds"]
        self._region = store.engine.allocate(1 << 20, huge_pages=False)
        self._memory = self._region.view()
        self._mine: dict[str, int] = {}
        """Key -> acknowledged version."""
        self._free: dict[str, int] = {}
        """Removed keys, and the last version they had."""
        self._doubtful: list[str] = []
        """Keys put without a definite reply; removed eventually, so that the pools never fill up."""
        self._num_keys = 0

    def run(self) -> None:
        while True:
            with self._gate:
                self._act()
            time.sleep(self._random.choice((0.0, 0.0, 0.002, 0.01)))

    def _act(self) -> None:
        if self._doubtful and self._random.random() < 0.2:
            self._clear()
            return
        if len(self._mine) > MOST_KEYS:
            self._remove()
            return
        choice = self._random.random()
        if choice < 0.45:
            self._put(self._random.choice(self._kinds))
        elif choice < 0.85 and self._mine:
            self._get()
        elif len(self._mine) > LEAST_KEYS:
            self._remove()

    def _fresh_keys(self, num_keys: int) -> dict[str, int]:
        """Absent keys, some of which existed before, with their new versions."""
        keys: dict[str, int] = {}
        while len(keys) < num_keys:
            if self._free and self._random.random() < 0.3:
                key = self._random.choice(list(self._free))
                keys[key] = self._free.pop(key) + 1
            else:
                self._num_keys += 1
                keys[f"{self._name}-{self._num_keys}"] = 1
        return keys

    def _put(self, kind: str) -> None:
        if kind.startswith("replace"):
            some = self._random.sample(list(self._mine), min(2, len(self._mine)))
            keys = {key: self._mine.pop(key) + 1 for key in some}
        else:
            keys = self._fresh_keys(1 if kind == "parts" else self._random.randint(1, 6))
        if not keys:
            return
        is_durable = kind.endswith("durable")
        self._journal.write(*(Line("put", key, version, is_durable) for key, version in keys.items()))
        try:
            outcomes = self._put_parts(keys) if kind == "parts" else self._put_whole(keys, kind)
        except MooncakeError as error:
            self._journal.write(*(Line("unknown", key, more=str(error)) for key in keys))
            self._doubtful += keys
            return
        done = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome is None]
        places = self._places(done)
        lines: list[Line] = []
        for key, outcome in zip(keys, outcomes, strict=True):
            version = keys[key]
            if outcome is None:
                lines.append(Line("put_done", key, version, is_durable, places.get(key, [])))
                self._mine[key] = version
            elif outcome.code in REFUSED and not kind.startswith("replace"):
                lines.append(Line("put_refused", key, version, more=str(outcome)))
            else:
                lines.append(Line("unknown", key, more=str(outcome)))
                self._doubtful.append(key)
        self._journal.write(*lines)

    def _put_whole(self, keys: dict[str, int], kind: str) -> list[Refusal | None]:
        values = [content(key, version) for key, version in keys.items()]
        policy = POLICIES.get(kind.removeprefix("replace-"), m.PutPolicy())
        return self._store.put_batch(list(keys), values, policy, replace=kind.startswith("replace"))

    def _put_parts(self, keys: dict[str, int]) -> list[Refusal | None]:
        """Put in slow steps, so that a kill happens in the middle."""
        ((key, version),) = keys.items()
        value = content(key, version)
        self._memory[: len(value)] = value
        grant = self._store.start_puts([key], [len(value)], 8192)[0]
        if not isinstance(grant, PutGrant):
            return [grant or Refusal("busy", "another client puts it")]
        step = -(-len(value) // 4)
        for at in range(0, len(value), step):
            self._store.write_ranges([grant], [at], [self._region.address + at], [min(step, len(value) - at)])
            time.sleep(0.005)
        return self._store.end_puts([grant])

    def _places(self, keys: list[str]) -> dict[str, list[str]]:
        """Memory segments that have a complete replica according to the master."""
        try:
            found = self._store.inspect(keys) if keys else []
        except MooncakeError:
            return {}
        return {
            key: [one.segment for one in status.replicas if one.is_complete and one.tier is Tier.MEMORY]
            for key, status in zip(keys, found, strict=True)
            if status is not None
        }

    def _get(self) -> None:
        """Get a key. A miss is no error here (its node may have been killed): the checker decides that."""
        keys = self._random.sample(list(self._mine), min(4, len(self._mine)))
        try:
            values = self._store.get_batch(keys)
        except MooncakeError:
            return
        for key, value in zip(keys, values, strict=True):
            version = self._mine[key]
            if value is not None and value != content(key, version):
                self._journal.write(Line("wrong", key, version, more=f"a get gave {value[:20]!r}..."))

    def _clear(self) -> None:
        keys, self._doubtful = self._doubtful[:8], self._doubtful[8:]
        self._journal.write(*(Line("remove", key) for key in keys))
        try:
            self._store.remove(keys, force=True)
        except MooncakeError:
            self._doubtful += keys

    def _remove(self) -> None:
        keys = self._random.sample(list(self._mine), self._random.randint(1, 3))
        self._journal.write(*(Line("remove", key) for key in keys))
        versions = {key: self._mine.pop(key) for key in keys}
        try:
            outcomes = self._store.remove(keys, force=self._random.random() < 0.7)
        except MooncakeError as error:
            self._journal.write(*(Line("unknown", key, more=str(error)) for key in keys))
            self._doubtful += keys
            return
        lines: list[Line] = []
        for key, outcome in zip(keys, outcomes, strict=True):
            if isinstance(outcome, Refusal):
                lines.append(Line("not_removed", key, more=str(outcome)))
                self._mine[key] = versions[key]
            else:
                lines.append(Line("removed", key))
                self._free[key] = versions[key]
        self._journal.write(*lines)


def main(config: dict[str, Any]) -> None:
    gate, journal = Gate(), Journal(Path(config["journal"]))
    store = Store(config["master"], settings=StoreSettings(timeout_s=config["timeout_s"]))
    for number in range(NUM_THREADS):
        worker = Worker(store, journal, gate, f"{config['name']}-{number}", config)
        threading.Thread(target=worker.run, daemon=True).start()
    print("ready", flush=True)
    for line in sys.stdin:
        gate.pause() if line.strip() == "pause" else gate.go()
        print("done", flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
