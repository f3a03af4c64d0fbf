# SPDX-License-Identifier: Apache-2.0
"""Ours beside gloo: times and bandwidth of writes of ours and of torch.distributed's ``send`` and ``recv``.

Frameworks move tensors between processes with gloo where there is no GPU. Both ends are processes on
loopback, with windows of the same size; all take turns, and the order rotates. ``gloo_process.py`` is the
other program. A time of gloo is half of a message there and an equal one back, the usual measure of calls
that have two sides; a time of ours includes the word that the bytes have arrived. Several in flight are one
batch of ours, and as many sends of gloo with one byte back when all have arrived.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from mooncake.cli.bench.ceilings import WRITE, Sample, cpu_s
from mooncake.cli.bench.measurements import KIB, MIB, Shape
from mooncake.cli.bench.paths import Paths, Subject
from mooncake.errors import Unavailable

GLOO = "gloo"
COMPARED_PATHS = ("shm", "tcp")
SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
MOST_IN_FLIGHT = 16
LEAST_CALLS = 4
"""In a round, so that one busy second of the machine does not decide the median of the largest size."""
PROGRAM = (
    "import sys; from mooncake.cli.bench.gloo_process import main; "
    "main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))"
)


@dataclass(frozen=True)
class GlooRow:
    """One size. The keys are paths of ours and ``gloo``."""

    size: str
    p50_us: dict[str, float]
    "Median time of one transfer with nothing else in flight."
    num_in_flight: int
    gb_s: dict[str, float]
    "Bandwidth at the median time of so many transfers at once."


class Gloo:
    """Two processes with one gloo connection.

    Raises:
        Unavailable: torch is not installed, or has no gloo.
    """

    def __init__(self, window_bytes: int, folder: Path) -> None:
        if find_spec("torch") is None:
            raise Unavailable("torch is not installed (pip install 'mooncake-serving[inference]')")
        where = [str(folder / GLOO), str(window_bytes)]
        driver, other = ([sys.executable, "-c", PROGRAM, rank, *where] for rank in "01")
        # Groups of their own: Ctrl-C is this process's, which then closes the driver's input.
        self._driver = subprocess.Popen(
            driver, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )
        self._other = subprocess.Popen(other, stdin=subprocess.DEVNULL, process_group=0)
        try:
            self._answer()
        except Unavailable:
            self.close()
            raise
        except BaseException:
            for process in (self._driver, self._other):
                process.kill()
                process.communicate()
            raise

    def one_by_one(self, size_bytes: int, num: int) -> Sample:
        """Send ``num`` messages, each when an equal one has come back; half of that counts."""
        sample = self._obeyed(size_bytes, 1, size_bytes, num)
        calls = [call / 2 for call in sample.calls_s]
        return Sample(sum(calls), sample.cpu_s / 2, size_bytes * num, calls)

    def in_flight(self, size_bytes: int, count: int, num: int) -> Sample:
        """Send ``num`` times ``count`` messages at once."""
        return self._obeyed(size_bytes, count, 1, num)

    def close(self) -> None:
        for process in (self._driver, self._other):
            try:
                process.communicate(timeout=10)  # without orders the driver ends, and then the other
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def _obeyed(self, size_bytes: int, count: int, num_back: int, num: int) -> Sample:
        assert self._driver.stdin is not None
        pids = (self._driver.pid, self._other.pid)
        before = sum(map(cpu_s, pids))
        self._driver.stdin.write(f"{size_bytes} {count} {num_back} {num}\n")
        self._driver.stdin.flush()
        calls = json.loads(self._answer())
        return Sample(sum(calls), sum(map(cpu_s, pids)) - before, size_bytes * count * num, calls)

    def _answer(self) -> str:
        assert self._driver.stdout is not None
        answer = self._driver.stdout.readline()
        if not answer:
            raise Unavailable("a process of gloo has ended; its error is above")
        return answer


def compare_with_gloo(
    paths: Paths,
    subjects: Sequence[Subject],
    gloo: Gloo,
    largest_bytes: int,
    rounds: int,
    show_progress: Callable[[str], None],
) -> list[GlooRow]:
    """Measure every size, alone and with several in flight. Ours are verified before they are timed."""
    rows = []
    for size_bytes in (size for size in SIZES if size <= largest_bytes):
        depth = max(1, min(MOST_IN_FLIGHT, paths.window_bytes // 2 // size_bytes))
        alone, together = Shape(size_bytes), Shape(size_bytes, depth)
        num_alone, num_together = (max(LEAST_CALLS, shape.num_calls) for shape in (alone, together))
        show_progress(f"gloo {alone} ...")
        one = partial(gloo.one_by_one, size_bytes, num_alone)
        several = partial(gloo.in_flight, size_bytes, depth, num_together)
        times = _samples(paths, subjects, one, alone, num_alone, rounds)
        speeds = _samples(paths, subjects, several, together, num_together, rounds)
        p50_us = {name: median_call_s(samples) * 1e6 for name, samples in times.items()}
        gb_s = {name: together.num_bytes / median_call_s(samples) / 1e9 for name, samples in speeds.items()}
        rows.append(GlooRow(str(alone), p50_us, depth, gb_s))
    return rows


def median_call_s(samples: Sequence[Sample]) -> float:
    """Median of all calls: interruptions by other processes are longest where threads wait for each other."""
    return statistics.median(call for sample in samples for call in sample.calls_s)


def _samples(
    paths: Paths,
    subjects: Sequence[Subject],
    theirs: Callable[[], Sample],
    shape: Shape,
    num: int,
    rounds: int,
) -> dict[str, list[Sample]]:
    """Samples of all rounds, in which gloo and the paths take turns."""
    arguments = (WRITE, shape.size_bytes, shape.count)
    turns: dict[str, Callable[[], Sample]] = {}
    for seed, subject in enumerate(subjects, 1):
        paths.verify(subject, *arguments, seed)
        turns[subject.name] = partial(paths.move, subject, *arguments, num)
    turns[GLOO] = theirs
    names = list(turns)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    for number in range(-1, rounds):  # in the first, connections, page tables and caches warm up
        first = number % len(names)
        for name in names[first:] + names[:first]:
            sample = turns[name]()
            if number >= 0:
                samples[name].append(sample)
    return samples
