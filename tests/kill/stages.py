# SPDX-License-Identifier: Apache-2.0
"""``scripts/kill-stages``: a stage of a prefill group is killed or frozen at random points of a computation.

Requests go to a group of workers while, after a random part of the time that their answers take, one of its
stages gets SIGKILL, or SIGSTOP (not the first one, whose silence a gateway notices). Whatever the group
answers must be the undisturbed answer or a proper error, within ``ENDS_WITHIN_S``, and a single worker, to
which a gateway would turn, answers right. The first stage must end, and a new group must answer right. Exits
1 unless all of that is so.
"""

from __future__ import annotations

import argparse
import collections
import shlex
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from mooncake.cli.bench.report import describe_machine
from mooncake.cli.ports import free_ports
from tests.cluster import wait_for
from tests.group_processes import GroupProcesses, WorkerProcess, WorkerRefused, prompt_of, stopped_at_end

ENDS_WITHIN_S = 60.0
"""Time in which every request of a lost group has ended: the probe's timeout, on a busy machine."""
NUM_PROMPTS = 3
PROMPT_TOKENS = 300
NUM_TOKENS = 4


@dataclass
class Trials:
    """What the requests of all points came to."""

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    def violated(self, what: str) -> None:
        self.wrong.append(what)
        print(f"  VIOLATED {what}", flush=True)


def run_point(
    number: int, group: GroupProcesses, right: list[list[int]], random: Random, whole_s: float, trials: Trials
) -> None:
    """Disturb the group at one point while it answers several prompts at once."""
    victim = random.randrange(len(group.stages))
    is_frozen = victim > 0 and random.random() < 0.2
    at = random.random() * whole_s

    def client(index: int) -> None:
        began = time.monotonic()
        try:
            salt = f"{number} {index}"
            tokens, _ = group.first.ask(prompts()[index], NUM_TOKENS, salt, timeout_s=2 * ENDS_WITHIN_S)
            outcome = "right" if tokens == right[index] else "wrong"
            if outcome == "wrong":
                trials.violated(f"point {number}, prompt {index}: {tokens} is not {right[index]}")
        except WorkerRefused as error:
            outcome = "error"
            if "may be sent again" not in str(error):
                trials.violated(f"point {number}, prompt {index}: unclear error {error}")
        except OSError as error:
            outcome = "connection ended"
            if isinstance(error, TimeoutError):
                trials.violated(f"point {number}, prompt {index}: no answer")
        took_s = time.monotonic() - began
        trials.outcomes[outcome] += 1
        trials.longest_s = max(trials.longest_s, took_s)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(NUM_PROMPTS)]
    for thread in threads:
        thread.start()
    time.sleep(at)
    group.stages[victim].child.send_signal(signal.SIGSTOP if is_frozen else signal.SIGKILL)
    killed_at = time.monotonic()
    for thread in threads:
        thread.join()
    ended_s = time.monotonic() - killed_at
    if ended_s > ENDS_WITHIN_S:
        trials.violated(f"point {number}: requests ended {ended_s:.0f} s after the stage")
    first = group.first.child
    try:
        wait_for(lambda: first.poll() is not None, "the first stage to end", ENDS_WITHIN_S)
    except TimeoutError as error:
        trials.violated(f"point {number}: {error}")
        first.kill()
    group.stages[victim].stop()
    first.wait(30.0)
    what = "frozen" if is_frozen else "killed"
    print(f"point {number}: stage {victim} {what} after {at:.2f} s, ended {ended_s:.1f} s later", flush=True)


def prompts() -> list[list[int]]:
    return [prompt_of(PROMPT_TOKENS + 50 * seed, seed) for seed in range(NUM_PROMPTS)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kill-stages", description=__doc__)
    parser.add_argument("--points", type=int, default=50, help="how many (default 50)")
    parser.add_argument("--stages", type=int, default=2, help="of the group (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="of the points (default 0)")
    args = parser.parse_args()
    print(f"machine: {describe_machine()}")
    print(f"command: {shlex.join(['scripts/kill-stages', *sys.argv[1:]])}", flush=True)
    random, trials = Random(args.seed), Trials()
    with tempfile.TemporaryDirectory(prefix="mooncake-stages-") as name:
        folder, flags = Path(name), ("--kv-cache-size", "256MiB")
        worker = WorkerProcess("single", folder, free_ports("127.0.0.1", 1, random)[0], *flags)
        group = GroupProcesses(folder, args.stages, *flags)
        with stopped_at_end(worker, group):
            worker.wait_until_ready()
            group.restart_ended()
            right = [worker.ask(prompt, NUM_TOKENS)[0] for prompt in prompts()]
            began = time.monotonic()
            with ThreadPoolExecutor(NUM_PROMPTS) as together:
                found = list(together.map(lambda prompt: group.first.ask(prompt, NUM_TOKENS)[0], prompts()))
            whole_s = time.monotonic() - began
            assert found == right, "undisturbed, the two differ"
            for number in range(args.points):
                run_point(number, group, right, random, whole_s, trials)
                group.restart_ended()
                index = random.randrange(NUM_PROMPTS)
                elsewhere = worker.ask(prompts()[index], NUM_TOKENS, salt=f"{number}")[0]
                anew = group.first.ask(prompts()[index], NUM_TOKENS, salt=f"anew {number}")[0]
                if not elsewhere == anew == right[index]:
                    trials.violated(f"point {number}: {elsewhere} elsewhere, {anew} by the next group")
    counts = ", ".join(f"{num} {name}" for name, num in sorted(trials.outcomes.items()))
    print(f"{args.points} points, {sum(trials.outcomes.values())} requests meanwhile: {counts}")
    print(f"longest request {trials.longest_s:.1f} s")
    for line in trials.wrong:
        print(f"  VIOLATED {line}")
    print(f"{len(trials.wrong)} violations")
    return 1 if trials.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
