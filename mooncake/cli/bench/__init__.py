# SPDX-License-Identifier: Apache-2.0
"""``mooncake bench transfer``: how close every available path comes to the limits of this machine.

Two processes on loopback. The machine's ceilings are measured first (``ceilings.py``), then every path beside
its ceiling in turns (``paths.py``, ``measurements.py``), then writes beside gloo's sends (``gloo.py``);
``report.py`` renders and draws it.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from mooncake.cli.bench.ceilings import READ, Ceiling, DriverCopy, Fio, Memcpy, RawStreams
from mooncake.cli.bench.gloo import COMPARED_PATHS, GLOO, Gloo, GlooRow, compare_with_gloo
from mooncake.cli.bench.measurements import (
    KIB,
    MIB,
    SHAPES,
    Shape,
    measure_ceilings,
    measure_paths,
    measure_ping,
)
from mooncake.cli.bench.paths import LOCAL_FILE, STREAMS, Paths, available, candidate_engines
from mooncake.cli.bench.report import BenchReport, check_plot, describe_machine, draw, render
from mooncake.cli.bench.target import DEVICE, FILE
from mooncake.cli.output import check_writable, read_size, write_whole
from mooncake.config import format_size
from mooncake.errors import InvalidArgument, Unavailable, cause_of

WINDOW_BYTES = 256 * MIB
"""Both sides cycle through so much memory, so that it does not fit into the cache."""
ROUNDS = 11
QUICK_ROUNDS = 3


def bench_transfer(
    wanted_names: Sequence[str],
    rounds: int,
    largest: str,
    folder: Path | None,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Measure, print, and write the requested files. Files to be measured are made in ``folder``.

    Raises:
        InvalidArgument: a path that does not exist, nothing to measure, or a file that can't be written.
        ProtocolError: wrong bytes arrived.
    """
    check_plot(plot_file)  # before minutes of measuring
    check_writable(json_file, "--json")
    largest_bytes, least_bytes = read_size(largest, "--largest"), min(shape.num_bytes for shape in SHAPES)
    if largest_bytes < least_bytes:
        raise InvalidArgument(
            "--largest", largest, f"at least {format_size(least_bytes)}, the smallest transfer"
        )
    shapes = [shape for shape in SHAPES if shape.num_bytes <= largest_bytes]
    with ExitStack() as stack:
        try:
            made = stack.enter_context(tempfile.TemporaryDirectory(dir=folder))
        except OSError as error:
            allowed = f"a folder that can be written to ({cause_of(error)})"
            raise InvalidArgument("--folder", str(folder or ""), allowed) from error
        report = _measured(wanted_names, rounds, shapes, Path(made), stack)
    print(render(report), flush=True)
    if json_file is not None:
        write_whole(json_file, json.dumps(report.as_json(), indent=1) + "\n", "--json")
    if plot_file is not None:
        draw(report, plot_file)


def _measured(
    wanted_names: Sequence[str], rounds: int, shapes: Sequence[Shape], folder: Path, stack: ExitStack
) -> BenchReport:
    engines = candidate_engines(folder)
    wanted_paths = [name for name in wanted_names if name != GLOO]
    only_gloo = bool(wanted_names) and not wanted_paths
    subjects, skipped = available(COMPARED_PATHS if only_gloo else wanted_paths, engines)
    if not subjects:
        why = "; ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise InvalidArgument("path", list(wanted_names), f"something that is available here ({why})")
    window_bytes = min(WINDOW_BYTES, 2 * max(shape.num_bytes for shape in shapes))
    paths = Paths(subjects, window_bytes, engines, folder)
    stack.callback(paths.close)
    ceilings: dict[str, Ceiling] = {
        "one thread": Memcpy(paths.here.address, paths.spare.address, window_bytes)
    }
    if DEVICE in paths.windows:
        ceilings |= device_ceilings(paths, window_bytes)
    if FILE in paths.windows:
        try:
            # The file that ours moves to and from: a host may have one in its cache and not another.
            fio = Fio(folder / LOCAL_FILE, window_bytes, paths.engines[FILE].settings.file_depth)
            fio.move(READ, 4 * KIB, 1, 1)  # it may be installed and not allowed to use io_uring
            ceilings["fio"] = fio
        except Unavailable as error:
            skipped["fio"] = str(error)
    ping_us = None
    try:
        streams = RawStreams(window_bytes, paths.engines["shm"].num_streams)
        stack.callback(streams.close)
        ceilings[STREAMS] = streams
        ping_us = measure_ping(streams, 4 * KIB, rounds)
    except Unavailable as error:
        skipped[STREAMS] = str(error)
    _show_progress("ceilings ...")
    alone = [] if only_gloo else measure_ceilings(ceilings, shapes, rounds)
    rows = [] if only_gloo else measure_paths(paths, subjects, ceilings, shapes, rounds, _show_progress)
    beside_gloo: list[GlooRow] = []
    compared = [subject for subject in subjects if subject.name in COMPARED_PATHS]
    if compared and (not wanted_names or GLOO in wanted_names):
        largest_bytes = max(shape.size_bytes for shape in shapes)
        try:
            gloo = Gloo(window_bytes, folder)
            stack.callback(gloo.close)
            beside_gloo = compare_with_gloo(paths, compared, gloo, largest_bytes, rounds, _show_progress)
        except Unavailable as error:
            skipped[GLOO] = str(error)
    command = shlex.join(["mooncake", *sys.argv[1:]])
    return BenchReport(describe_machine(), command, rounds, alone, ping_us, rows, skipped, beside_gloo)


def device_ceilings(paths: Paths, window_bytes: int) -> dict[str, Ceiling]:
    """The driver's own copies, between the places that the cuda paths move between."""
    library, spare = paths.engines[DEVICE].cuda_library, paths.windows["spare"].address
    places = {"pageable": paths.here, "pinned": paths.windows["pinned"], "device": paths.windows[DEVICE]}
    return {
        (name := f"driver {place}"): DriverCopy(name, library, region.address, spare, window_bytes)
        for place, region in places.items()
    }


def _show_progress(text: str) -> None:
    """Print progress on standard error."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="" if text.endswith("...") else "\n", file=sys.stderr, flush=True)
