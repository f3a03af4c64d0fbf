# SPDX-License-Identifier: Apache-2.0
"""The process that is paused: an engine that saves and loads on command, and reuses its memory at once.

It reads one command a line (JSON) and answers with one line. The point of its pause is a number of calls and
returns, in the loop's thread and in the engine's, after the operation began. There it stops itself, and the
process that started it continues it; or it blocks its loop, while the engine's thread continues.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from tests.pauses.engines import ENGINES, NUM_BLOCKS, SHORT, USUAL, DirectEngine, Engine


class Trap:
    """Counts calls and returns in some threads, and pauses at one of them.

    ``at``: number of calls and returns after the beginning; 0: never.
    """

    def __init__(self, kind: str, at: int, pause_s: float) -> None:
        self._kind, self._at, self._pause_s = kind, at, pause_s
        self.num_seen = 0
        self.has_struck = False

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        self.num_seen += 1
        if self.num_seen == self._at and not self.has_struck:
            self.has_struck = True
            if self._kind == "hold":
                time.sleep(self._pause_s)
            else:
                os.kill(os.getpid(), signal.SIGSTOP)

    def set(self, engine: Engine) -> None:
        self._on_loop(engine, self)
        if self._kind != "hold":
            sys.setprofile(self)

    def remove(self, engine: Engine) -> None:
        sys.setprofile(None)
        engine.loop.call_soon_threadsafe(sys.setprofile, None)

    def _on_loop(self, engine: Engine, trap: Any) -> None:
        is_set = threading.Event()

        def begin() -> None:
            is_set.set()
            sys.setprofile(trap)

        engine.loop.call_soon_threadsafe(begin)
        is_set.wait()


def turn(engine: Engine, command: dict[str, Any]) -> dict[str, Any]:
    """Run one operation and check the memory afterwards."""
    is_save, prefix = command["op"] == "save", command["name"]
    mine = [f"{prefix}-{number}" for number in range(NUM_BLOCKS)]
    before = [f"{name}-before" for name in mine]
    others = [f"{name}-next" for name in mine]
    if isinstance(engine, DirectEngine):
        engine.use(command["op"])
        engine.peer = command["peer"]
    engine.fill_all(mine if is_save else before)
    trap = Trap(command["kind"], command["at"], command["pause_s"])
    print("begun", flush=True)
    trap.set(engine)
    flags = [False] * NUM_BLOCKS
    try:
        if is_save:
            engine.save(mine)
        else:
            flags = engine.load(mine)
    finally:
        trap.remove(engine)
    # The memory is back, and another prefix's at once.
    wrong = [] if is_save else [number for number in engine.wrong(mine) if flags[number]]
    engine.fill_all(others)
    engine.settle()
    return {
        "loaded": sum(flags),
        "wrong": wrong,
        "overwritten": engine.wrong(others),
        "num_seen": trap.num_seen,
        "has_struck": trap.has_struck,
    }


def main(config: dict[str, Any]) -> None:
    engine: Engine | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if "connector" in command:
            if engine is not None:
                engine.close()
            engine = ENGINES[command["connector"]](config["address"], USUAL if config["is_usual"] else SHORT)
            print(json.dumps({"address": getattr(engine, "address", "")}), flush=True)
        else:
            assert engine is not None, "a command must set the connector first"
            print(json.dumps(turn(engine, command)), flush=True)
    os._exit(0)  # operations in progress must not delay the exit


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
