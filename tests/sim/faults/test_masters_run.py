# SPDX-License-Identifier: Apache-2.0
"""Several masters under faults: a short sweep, seeds that once failed, and proof that the checkers detect
bugs."""

from __future__ import annotations

import msgspec
import pytest

from mooncake.sim.faults import cluster_faults
from mooncake.sim.faults.cluster_faults import MastersFaults
from mooncake.sim.faults.masters_host import NEWEST, as_known_to_old
from mooncake.sim.faults.masters_run import MastersRun
from mooncake.store.master.log_records import LineBegan, Record, SpaceHeld
from tests.sim.faults.masters_bugs import BUGS, FAULTS, Bug, first_seed


@pytest.mark.parametrize("first", range(0, 40, 8))
def test_seeds(first: int) -> None:
    for seed in range(first, first + 8):
        MastersRun(seed).run()


@pytest.mark.parametrize(
    "seed",
    [
        9,  # a leader that began with nothing issued ids that its predecessor had issued
        36,  # the same, because its wall clock was set back
        45,  # a machine lost the end of its log in a power loss, and led although a standby had all of it
        52,  # the same
        42,  # space that a reader used was allocated again: the successor was set to shorter leases
        112,  # a reply depended on what another listed standby did not have, which then led
        170,  # a standby copied a record that its leader could not write
        186,  # the end of a log was zeros, which were decoded as a record
        222,  # a view stayed open whose replica had moved away, which the next master did not know
        319,  # the same
    ],
)
def test_seeds_that_once_failed(seed: int) -> None:
    MastersRun(seed).run()


def test_a_seed_is_one_history() -> None:
    first, second = MastersRun(5), MastersRun(5)
    first.run()
    second.run()
    assert first.kernel.trace == second.kernel.trace and first.counts == second.counts


def test_without_faults_one_leads_and_no_client_gets_an_error() -> None:
    totals: dict[str, int] = {}
    for seed in range(3):
        run = MastersRun(seed, MastersFaults())
        run.run()
        assert run.counts["terms"] == 1 and run.counts["errors"] == 0, seed
        for name, count in run.counts.items():
            totals[name] = totals.get(name, 0) + count
    assert min(totals[name] for name in ("hits", "misses", "puts", "looks")) > 10, totals


def test_the_sweep_has_every_kind_of_fault_and_much_happens_in_it() -> None:
    drawn = [MastersRun(seed).faults for seed in range(40)]
    for field in cluster_faults.MastersFaults.__dataclass_fields__:
        assert len({getattr(faults, field) for faults in drawn}) > 1 or field == "bad_disk_s", field
    runs = [MastersRun(seed) for seed in (3, 4, 14, 15)]
    for run in runs:
        run.run()
    assert all(sum(run.counts[what] for run in runs) for what in ("crashes", "pauses"))
    for what in ("terms", "puts", "hits", "looks"):
        assert sum(run.counts[what] for run in runs) > 10, what


def test_an_older_version_reads_records_without_their_newest_fields_and_writes_them_so() -> None:
    """The older version that the world simulates behaves as the format does."""
    assert set(NEWEST) == {LineBegan, SpaceHeld}
    for record in (LineBegan(7, 2.0, 5.0), SpaceHeld([("a", 64)], 64, "key", 9)):
        of_old = as_known_to_old([record])[0]
        written = msgspec.to_builtins(record)[: -len(NEWEST[type(record)])]
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(written), type=Record)
        assert read == of_old != record
        longer = [*msgspec.to_builtins(record), "a field of a later version"]
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(longer), type=Record) == record


@pytest.mark.parametrize("bug", FAULTS, ids=lambda bug: bug.__name__)
def test_without_the_bug_nothing_is_violated(bug: Bug) -> None:
    MastersRun(1000, FAULTS[bug]).run()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    assert first_seed(bug, monkeypatch) is not None, f"none of 100 seeds finds it by {BUGS[bug]}"
