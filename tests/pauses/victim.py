"""The process that stands still: an engine that saves and loads as it is told, and uses its memory at once.

It reads one command a line (JSON) and answers with one line. Where it stands still is a number: so many calls
and returns, in the loop's thread and in the engine's, after the operation began. There it stops itself, and
whoever started it lets it go on; or it holds its loop, while the engine's thread goes on.
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
    """Counts what happens in some threads, and strikes at one point.

    ``at``: how many calls and returns after the beginning; 0 never strikes.
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


def turn(engine: Engine, told: dict[str, Any]) -> dict[str, Any]:
    """One operation, and what became of the memory."""
    is_save, prefix = told["op"] == "save", told["name"]
    mine = [f"{prefix}-{number}" for number in range(NUM_BLOCKS)]
    before = [f"{name}-before" for name in mine]
    others = [f"{name}-next" for name in mine]
    if isinstance(engine, DirectEngine):
        engine.use(told["op"])
        engine.peer = told["peer"]
    engine.fill_all(mine if is_save else before)
    trap = Trap(told["kind"], told["at"], told["pause_s"])
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


def main(told: dict[str, Any]) -> None:
    engine: Engine | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if "connector" in command:
            if engine is not None:
                engine.close()
            engine = ENGINES[command["connector"]](told["address"], USUAL if told["is_usual"] else SHORT)
            print(json.dumps({"address": getattr(engine, "address", "")}), flush=True)
        else:
            assert engine is not None, "first it must become an engine"
            print(json.dumps(turn(engine, command)), flush=True)
    os._exit(0)  # what it has begun may not keep it


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
