# SPDX-License-Identifier: Apache-2.0
"""The transfer engine under measurement: every available path between this process and the target.

A subject is a path with its options (``tcp+crc``: with checksums). Which are available is found by trying: a
transport that is unavailable here is left out, with the reason. What was moved is compared at both ends.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mooncake.cli.bench.ceilings import WRITE, Sample, cpu_s
from mooncake.cli.bench.target import DEVICE, FILE, engines_of, fill, register_window, window_matches
from mooncake.cli.certs import CertsSettings, make
from mooncake.errors import InvalidArgument, MooncakeError, ProtocolError, Unavailable
from mooncake.transfer import Op, Status
from mooncake.transfer.descriptor import Column, decode_descriptor
from mooncake.transfer.transports.cuda import why_unavailable

TIMEOUT_S = 60.0
"""Timeout of one call: far more than 128 MiB take on the slowest path."""


STREAMS = "raw streams"
LOCAL_FILE = "local.dat"


@dataclass(frozen=True)
class Subject:
    """One way of moving bytes."""

    name: str
    engine: str
    "Name of the engine that carries it, one of ``candidate_engines``."
    ceiling: str
    "What it is measured against; empty when this machine has no reference."
    checksum: bool = False
    local: str = "memory"
    "Kind of memory at this end: `memory`, `pinned` memory or `cuda`."
    remote: str = "memory"
    "Kind of memory at the other end: `memory`, `cuda` or a `file`."


SUBJECTS = (
    Subject("shm", "shm", "one thread"),
    Subject("shm+crc", "shm", "one thread", checksum=True),
    Subject("tcp", "tcp", STREAMS),
    Subject("tcp+crc", "tcp", STREAMS, checksum=True),
    Subject("tcp+tls", "tls", STREAMS),
    Subject("rdma", "rdma", ""),
    Subject("file", FILE, "fio", remote=FILE),
    Subject("tcp+file", "tcp", "", remote=FILE),
    Subject("cuda", "cuda", "driver pageable", remote="cuda"),
    Subject("cuda+pin", "cuda", "driver pinned", local="pinned", remote="cuda"),
    Subject("cuda+dev", "cuda", "driver device", local="cuda", remote="cuda"),
)

CandidateEngines = Mapping[str, Mapping[str, Any]]
"""Fields of ``TransferSettings`` by the name of an engine."""


def candidate_engines(folder: Path) -> CandidateEngines:
    """All engines that may be available: one per transport, and one with TLS, whose certificates are made in
    ``folder``."""
    engines: dict[str, dict[str, Any]] = {
        name: {"transports": [name]} for name in dict.fromkeys(subject.engine for subject in SUBJECTS)
    }
    make(CertsSettings(folder=folder, days=1))
    files = {"tls_cert": "node.pem", "tls_key": "node.key", "tls_ca": "ca.pem"}
    paths = {field: str(folder / file) for field, file in files.items()}
    engines["tls"] = {"transports": ["tcp"], "tls": "all", **paths}
    return engines


def available(wanted_names: Sequence[str], engines: CandidateEngines) -> tuple[list[Subject], dict[str, str]]:
    """Subjects that are available here, and why the others are not. Empty ``wanted`` is all.

    Raises:
        InvalidArgument: there is no path of that name.
    """
    names = [subject.name for subject in SUBJECTS]
    for name in wanted_names:
        if name not in names:
            raise InvalidArgument("path", name, "some of " + ", ".join([*names, "gloo"]))
    missing: dict[str, str] = {}
    for name, fields in engines.items():
        try:
            for made in engines_of({name: fields}).values():
                made.close()
        except MooncakeError as error:
            missing[name] = str(error)
    if DEVICE not in missing and (why := why_unavailable()):
        missing[DEVICE] = why
    wanted = [subject for subject in SUBJECTS if not wanted_names or subject.name in wanted_names]
    skipped = {subject.name: missing[subject.engine] for subject in wanted if subject.engine in missing}
    return [subject for subject in wanted if subject.name not in skipped], skipped


class TargetProcess:
    """The process at the other end."""

    def __init__(self, window_bytes: int, engines: CandidateEngines, file: Path | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from mooncake.cli.bench.target import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is this process's, which then closes the other's input
        )
        self.pid = self._process.pid
        order = {"window_bytes": window_bytes, "engines": engines, "file": str(file or "")}
        try:
            described = self._ask(json.dumps(order))
        except BaseException:  # an interrupt, too: the process must not outlive the folder of its files
            self._process.kill()
            self._process.communicate()
            raise
        self.descriptors = {
            name: decode_descriptor(text.encode()) for name, text in json.loads(described).items()
        }

    def fill(self, kind: str, seed: int, num_bytes: int) -> None:
        self._ask(f"fill {kind} {seed} {num_bytes}")

    def holds(self, kind: str, seed: int, num_bytes: int) -> bool:
        return self._ask(f"holds {kind} {seed} {num_bytes}") == "yes"

    def close(self) -> None:
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # then no answer comes either
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise Unavailable("the target process of the bench has ended; its error is above")
        return answer


class Paths:
    """Engines of this process, the window of memory they move from and to, and the target.

    Files, one of this process and one of the target, are made in ``folder``.
    """

    def __init__(
        self, subjects: Sequence[Subject], window_bytes: int, engines: CandidateEngines, folder: Path
    ) -> None:
        names = dict.fromkeys(["shm", *(subject.engine for subject in subjects)])
        wanted = {name: engines[name] for name in names}
        self.window_bytes = window_bytes
        self.engines = engines_of(wanted)
        has_remote_file = any(subject.remote == FILE and subject.engine != FILE for subject in subjects)
        self.target = TargetProcess(window_bytes, wanted, folder / "remote.dat" if has_remote_file else None)
        self.here, self.spare = (register_window(self.engines, window_bytes) for _ in range(2))
        self.windows = {"memory": self.here}
        if DEVICE in self.engines:
            with_device = self.engines[DEVICE]
            self.windows["pinned"] = with_device.allocate(window_bytes)
            with_device.pin(self.windows["pinned"])
            for name in (DEVICE, "spare"):
                self.windows[name] = with_device.allocate(window_bytes, device=f"{DEVICE}:0")
        self._segments = {
            name: engine.open(self.target.descriptors[name]) for name, engine in self.engines.items()
        }
        if FILE in self.engines:  # the one path that ends in this process
            with_file = self.engines[FILE]
            self.windows[FILE] = with_file.open_file(folder / LOCAL_FILE, window_bytes)
            self._segments[FILE] = with_file.open(with_file.describe())

    def move(self, subject: Subject, op: str, size_bytes: int, count: int, num: int) -> Sample:
        """Move ``num`` batches of ``count`` slices, one after the other, cycling through the window."""
        step = size_bytes * count
        lengths = np.full(count, size_bytes, dtype=np.uint64)
        num_places = min(num, self.window_bytes // step)
        places = [self._columns(subject, i * step, size_bytes, count) for i in range(num_places)]
        engine, segment = self.engines[subject.engine], self._segments[subject.engine]
        verb = Op.WRITE if op == WRITE else Op.READ
        calls: list[float] = []
        before = time.process_time() + cpu_s(self.target.pid)
        for i in range(num):
            local, remote = places[i % len(places)]
            begin = time.perf_counter()
            done = engine.run(
                verb, segment, local, remote, lengths, timeout_s=TIMEOUT_S, checksum=subject.checksum
            )
            calls.append(time.perf_counter() - begin)
            if done.status != Status.OK:
                raise Unavailable(f"{subject.name} {op} of {step:,} bytes ended with {done.status.name}")
        used = time.process_time() + cpu_s(self.target.pid) - before
        return Sample(sum(calls), used, step * num, calls)

    def verify(self, subject: Subject, op: str, size_bytes: int, count: int, seed: int) -> None:
        """Move a fresh pattern and compare every byte at its destination.

        Raises:
            ProtocolError: other bytes arrived.
        """
        num_bytes = size_bytes * count
        mine = self.windows[subject.local]
        fill(mine, seed if op == WRITE else seed + 1, num_bytes)
        there = seed + 1 if op == WRITE else seed
        if subject.engine == FILE:
            fill(self.windows[FILE], there, num_bytes)
        else:
            self.target.fill(subject.remote, there, num_bytes)
        self.move(subject, op, size_bytes, count, 1)
        arrived = (
            window_matches(self.windows[FILE], seed, num_bytes)
            if subject.engine == FILE
            else self.target.holds(subject.remote, seed, num_bytes)
        )
        if not (arrived and window_matches(mine, seed, num_bytes)):
            raise ProtocolError(f"{subject.name} {op}: {count} x {size_bytes:,} bytes did not arrive as sent")

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self.target.close()

    def _columns(self, subject: Subject, offset: int, size: int, count: int) -> tuple[Column, Column]:
        rows = np.arange(count, dtype=np.uint64) * np.uint64(size) + np.uint64(offset)
        regions = self._segments[subject.engine].descriptor.regions
        there = next(region.address for region in regions if region.kind.startswith(subject.remote))
        return rows + np.uint64(self.windows[subject.local].address), rows + np.uint64(there)
