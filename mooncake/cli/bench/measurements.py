# SPDX-License-Identifier: Apache-2.0
"""Rounds of measuring: ours and its ceiling take turns, so that only adjacent measurements are compared.

On a shared machine, speed changes within seconds. A ratio is therefore the median of the ratios of single
rounds, not the ratio of two medians; the order within a round alternates.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from mooncake.cli.bench.ceilings import READ, WRITE, Ceiling, RawStreams, Sample
from mooncake.cli.bench.paths import Paths, Subject
from mooncake.config import format_size

KIB, MIB = 1 << 10, 1 << 20
ROUND_BYTES = 32 * MIB
"""One round moves about so much, and at most ``MOST_CALLS`` calls."""
MOST_CALLS = 1000
LEAST_FOR_P99 = 100
"""Samples of which a 99th percentile is more than the largest one."""
ROUNDS_ALONE = 5
"""For ceilings measured alone, which are shown for information."""


@dataclass(frozen=True)
class Shape:
    """``count`` slices of ``size_bytes`` in one batch."""

    size_bytes: int
    count: int = 1

    def __str__(self) -> str:
        size = format_size(self.size_bytes).replace("iB", " iB").replace("K ", " K").replace("M ", " M")
        return size if self.count == 1 else f"{self.count} x {size}"

    @property
    def num_bytes(self) -> int:
        return self.size_bytes * self.count

    @property
    def num_calls(self) -> int:
        return min(MOST_CALLS, max(1, ROUND_BYTES // self.num_bytes))


SHAPES = (
    Shape(4 * KIB),
    Shape(64 * KIB),
    Shape(256 * KIB),
    Shape(MIB),
    Shape(16 * MIB),
    Shape(128 * MIB),
    Shape(128 * KIB, 512),
)


@dataclass(frozen=True)
class Row:
    """One line of the table; ``ceiling`` and ``ratio`` are empty where nothing is compared."""

    path: str
    op: str
    shape: str
    size_bytes: int
    count: int
    gb_s: float
    p50_us: float
    p99_us: float | None
    "None: too few calls to have one."
    cpu_s_per_gb: float
    ceiling: str = ""
    ceiling_gb_s: float | None = None
    ceiling_cpu_s_per_gb: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class CeilingRow:
    """A ceiling measured alone."""

    name: str
    op: str
    shape: str
    gb_s: float
    cpu_s_per_gb: float


@dataclass
class _Samples:
    """Samples of one subject, direction and shape."""

    ours: list[Sample] = field(default_factory=list)
    ceiling: list[Sample] = field(default_factory=list)


def p99(samples: Sequence[float]) -> float | None:
    """The 99th percentile; None with too few samples."""
    if len(samples) < LEAST_FOR_P99:
        return None
    return sorted(samples)[int(len(samples) * 0.99)]


def measure_ceilings(
    ceilings: Mapping[str, Ceiling], shapes: Sequence[Shape], rounds: int
) -> list[CeilingRow]:
    """Measure every ceiling alone."""
    rows = []
    for ceiling in ceilings.values():
        for shape in (shape for shape in shapes if shape.size_bytes >= MIB):
            for op in (WRITE, READ):
                times = range(min(rounds, ROUNDS_ALONE))
                samples = [ceiling.move(op, shape.size_bytes, 1, shape.num_calls) for _ in times]
                cpu = statistics.median(sample.cpu_s_per_gb for sample in samples)
                speed = statistics.median(sample.gb_s for sample in samples)
                rows.append(CeilingRow(ceiling.name, op, str(shape), speed, cpu))
    return rows


def measure_ping(stream: RawStreams, size_bytes: int, rounds: int) -> float:
    """Microseconds of a C program's round trip."""
    return statistics.median(stream.ping(size_bytes, 300) for _ in range(rounds)) * 1e6


def measure_paths(
    paths: Paths,
    subjects: Sequence[Subject],
    ceilings: Mapping[str, Ceiling],
    shapes: Sequence[Shape],
    rounds: int,
    show_progress: Callable[[str], None],
) -> list[Row]:
    """Measure all subjects, directions and shapes. Every one is verified before it is timed."""
    rows: list[Row] = []
    for shape in shapes:
        show_progress(f"{shape} ...")
        seen = {(subject, op): _Samples() for subject in subjects for op in (WRITE, READ)}
        for number, (subject, op) in enumerate(seen):
            paths.verify(subject, op, shape.size_bytes, shape.count, seed=len(rows) + number + 1)
        for round_number in range(-1, rounds):  # in the first, connections, page tables and caches warm up
            for (subject, op), into in seen.items():
                ceiling = ceilings.get(subject.ceiling)
                ours, theirs = _turn(paths, subject, ceiling, op, shape, round_number % 2 == 0)
                if round_number < 0:
                    continue
                into.ours.append(ours)
                if theirs is not None:
                    into.ceiling.append(theirs)
        rows += [
            _row(subject, op, shape, into, ceilings.get(subject.ceiling))
            for (subject, op), into in seen.items()
        ]
    return rows


def _turn(
    paths: Paths, subject: Subject, ceiling: Ceiling | None, op: str, shape: Shape, is_first: bool
) -> tuple[Sample, Sample | None]:
    arguments = (op, shape.size_bytes, shape.count, shape.num_calls)
    before = ceiling.move(*arguments) if ceiling is not None and not is_first else None
    ours = paths.move(subject, *arguments)
    after = ceiling.move(*arguments) if ceiling is not None and is_first else None
    return ours, before or after


def _row(subject: Subject, op: str, shape: Shape, seen: _Samples, ceiling: Ceiling | None) -> Row:
    calls = [call for sample in seen.ours for call in sample.calls_s]
    rare = p99(calls)
    row = Row(
        subject.name,
        op,
        str(shape),
        shape.size_bytes,
        shape.count,
        statistics.median(sample.gb_s for sample in seen.ours),
        sorted(calls)[len(calls) // 2] * 1e6,
        None if rare is None else rare * 1e6,
        statistics.median(sample.cpu_s_per_gb for sample in seen.ours),
    )
    if ceiling is None or not seen.ceiling:
        return row
    pairs = zip(seen.ours, seen.ceiling, strict=True)
    return Row(
        **{
            **vars(row),
            "ceiling": ceiling.name,
            "ceiling_gb_s": statistics.median(sample.gb_s for sample in seen.ceiling),
            "ceiling_cpu_s_per_gb": statistics.median(sample.cpu_s_per_gb for sample in seen.ceiling),
            "ratio": statistics.median(ours.gb_s / theirs.gb_s for ours, theirs in pairs),
        }
    )
