# SPDX-License-Identifier: Apache-2.0
"""A process on one host that does what lines of JSON on its standard input ask for, and answers in lines.

It is a store client (``put``, ``check``, ``watch``) and either end of a transfer between hosts (``serve``,
``move``). Contents follow from keys, so that every reader knows what is right.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mooncake.errors import MooncakeError
from mooncake.log import setup_logging
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from mooncake.transfer import Op, Status, TransferEngine, TransferSettings
from mooncake.transfer.descriptor import decode_descriptor
from tests.kill.journal import content

TIMEOUT_S = 5.0
PAUSE_S = 0.01


class Agent:
    def __init__(self, master: str) -> None:
        self._master = master
        self._store: Store | None = None
        self._engine: TransferEngine | None = None

    @property
    def store(self) -> Store:
        if self._store is None:
            self._store = Store(self._master, settings=StoreSettings(timeout_s=TIMEOUT_S))
        return self._store

    def put(self, keys: list[str], num_replicas: int) -> dict[str, Any]:
        """Put objects; the answer has those that were acknowledged and the segments that hold them."""
        values = [content(key, 1) for key in keys]
        refused = self.store.put_batch(keys, values, m.PutPolicy(num_replicas=num_replicas))
        done = [key for key, refusal in zip(keys, refused, strict=True) if refusal is None]
        found = self.store.inspect(done) if done else []
        places = {
            key: [one.segment for one in status.replicas if one.is_complete]
            for key, status in zip(done, found, strict=True)
            if status is not None
        }
        num_bytes = sum(len(content(key, 1)) * len(places.get(key, [])) for key in done)
        return {"done": done, "places": places, "num_bytes": num_bytes}

    def check(self, keys: dict[str, list[int]]) -> dict[str, Any]:
        """Get objects once, by key with the versions that are right: which are missing, which are wrong."""
        values = self.store.get_batch(list(keys))
        missing, wrong = list[str](), list[str]()
        for (key, versions), value in zip(keys.items(), values, strict=True):
            if value is None:
                missing.append(key)
            elif value not in [content(key, version) for version in versions]:
                wrong.append(key)
        return {"missing": missing, "wrong": wrong}

    def watch(self, keys: list[str], until: float) -> dict[str, Any]:
        """Look up keys of a host that is gone until the instant ``until``.

        A false hit is one that the master reports, since it can be read nowhere. The answer has their number
        and the instant of the last lookup that gave one (0: none).
        """
        num_lookups = num_false = 0
        last = 0.0
        while time.monotonic() < until:
            try:
                asked_at = time.monotonic()
                hits = [key for key, is_there in zip(keys, self.store.exists(keys), strict=True) if is_there]
                num_lookups += 1
            except MooncakeError:
                continue
            if hits:
                num_false, last = num_false + len(hits), asked_at
            time.sleep(PAUSE_S)
        return {"num_lookups": num_lookups, "num_false": num_false, "last": last}

    def serve(self, hosts: str, size: int) -> dict[str, Any]:
        """Register memory for a peer."""
        self._engine = TransferEngine(TransferSettings(transports=("shm", "tcp"), listen_host=hosts))
        self._engine.allocate(size, huge_pages=False)
        return {"descriptor": self._engine.describe().encode().decode()}

    def move(
        self, descriptor: str, hosts: str, size: int, rounds: int, patience_s: float, verify: bool
    ) -> dict[str, Any]:
        """Write ``size`` bytes to the peer in one batch, ``rounds`` times; read them back to compare."""
        settings = TransferSettings(
            transports=("shm", "tcp"), listen_host=hosts, rail_patience_s=patience_s, num_streams=2
        )
        with TransferEngine(settings) as engine:
            there = decode_descriptor(descriptor.encode())
            here, segment = engine.allocate(size, huge_pages=False), engine.open(there)
            view = np.frombuffer(here.view(), dtype=np.uint8)
            view[:] = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
            wanted = view.copy()
            columns = ([here.address], [there.regions[0].address], [size])
            begun, took = list[float](), list[float]()
            for _ in range(rounds):
                begun.append(time.monotonic())
                done = engine.run(Op.WRITE, segment, *columns, timeout_s=30.0)
                took.append(time.monotonic() - begun[-1])
                if done.status != Status.OK:
                    return {"error": f"{done.status.name}: {done.reason}"}
            is_right = True
            if verify:
                view[:] = 0
                done = engine.run(Op.READ, segment, *columns, timeout_s=30.0)
                is_right = done.status == Status.OK and bool((view == wanted).all())
            story = segment.rails.story() if segment.rails is not None else []
            paths = list(segment.paths)
            del view
        return {"begun": begun, "took": took, "is_right": is_right, "story": story, "paths": paths}


def main(master: str) -> None:
    setup_logging("info", role="agent")
    agent = Agent(master)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        call: Callable[..., dict[str, Any]] = getattr(agent, asked.pop("do"))
        try:
            answer = call(**asked)
        except MooncakeError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
