"""The store under faults: a short sweep, seeds that once failed, and proof that the checkers see."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from mooncake.sim.checkers import Violation
from mooncake.sim.faults import Faults
from mooncake.sim.store_run import StoreRun
from mooncake.store import applying, catalog, master, objects, operations, records, segments, writing

CALM = Faults()
ROUGH = Faults(
    slow_chance=0.05,
    break_chance=0.01,
    partition_every_s=10.0,
    crash_master_every_s=15.0,
    crash_node_every_s=10.0,
    crash_client_every_s=15.0,
    transfer_failure_chance=0.1,
    slow_transfer_chance=0.1,
    corruption_every_s=5.0,
)


@pytest.mark.parametrize("seed", range(30))
def test_seeds(seed: int) -> None:
    StoreRun(seed).run()


@pytest.mark.parametrize(
    "seed",
    [
        5054,  # clients that started in the calm part went on working
        5497,  # a writer counted as writing until it heard of its end
        40278,  # a write was begun after its reservation's deadline
    ],
)
def test_seeds_that_once_failed(seed: int) -> None:
    StoreRun(seed).run()


@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize("has_oplog", [False, True])
def test_everything_fails_at_once(seed: int, has_oplog: bool) -> None:
    run = StoreRun(seed, dataclasses.replace(ROUGH, has_oplog=has_oplog))
    run.run()
    assert run.cluster.checkers.counts["hits"] > 0


def test_without_faults_nothing_is_lost_and_nobody_hears_an_error() -> None:
    totals: dict[str, int] = {}
    for seed in range(3):
        run = StoreRun(seed, CALM)
        run.run()
        assert run.cluster.checkers.counts["errors"] == 0
        assert run.cluster.master.master.counts.lost_objects == 0
        for name, count in run.cluster.checkers.counts.items():
            totals[name] = totals.get(name, 0) + count
    assert min(totals[name] for name in ("hits", "misses", "puts", "looks")) > 10


def test_a_seed_is_one_history() -> None:
    first, second = StoreRun(5), StoreRun(5)
    first.run()
    second.run()
    assert first.kernel.trace == second.kernel.trace
    assert first.kernel.num_steps == second.kernel.num_steps
    assert first.cluster.checkers.counts == second.cluster.checkers.counts


# Each bug is one that somebody could write; a sweep of thirty seeds must find it.

FIRST_SEED = {"forgets_the_last_master": 60}
"""Where finding it takes a master without a log and more luck."""


def reuses_space_at_once(patch: pytest.MonkeyPatch) -> None:
    unlink = catalog.Catalog.unlink

    def broken(self: catalog.Catalog, stored: objects.StoredObject, reason: str, now: float) -> int:
        stored.lease_until = now
        return unlink(self, stored, reason, now)

    patch.setattr(catalog.Catalog, "unlink", broken)


def forgets_the_last_master(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(segments.Segment, "takes_objects", lambda self, now: self.is_alive)


def takes_a_restarted_node_for_its_predecessor(patch: pytest.MonkeyPatch) -> None:
    mount = segments.Segments.mount

    def broken(self: segments.Segments, message: object, connection: object, now: float) -> object:
        known = self.mounted.get(message.segment)  # type: ignore[attr-defined]
        if known is not None:
            known.epoch = message.epoch  # type: ignore[attr-defined]
        return mount(self, message, connection, now)  # type: ignore[arg-type]

    patch.setattr(segments.Segments, "mount", broken)


def believes_any_bytes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(operations.Operations, "_mismatches", lambda self, grants, part, checksums: [])


def forgets_to_write_some_objects_down(patch: pytest.MonkeyPatch) -> None:
    record_of = catalog.record_of

    def broken(stored: objects.StoredObject) -> object:
        return record_of(stored) if stored.object_id % 7 else records.ObjectGone(stored.key, 0)

    for module in (catalog, master):
        patch.setattr(module, "record_of", broken)


def forgets_what_its_predecessor_promised(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(applying.Applying, "_space_held", lambda self, record, now: None)


def never_asks_twice(patch: pytest.MonkeyPatch) -> None:
    """A put-start whose answer was lost looks, the second time, like somebody else's put."""
    reserve = writing.Writing._reserve

    def broken(self: writing.Writing, put_id: int, *rest: object) -> object:
        return reserve(self, -1, *rest)  # type: ignore[arg-type]

    patch.setattr(writing.Writing, "_reserve", broken)


@pytest.mark.parametrize(
    "bug",
    [
        reuses_space_at_once,
        forgets_the_last_master,
        takes_a_restarted_node_for_its_predecessor,
        believes_any_bytes,
        forgets_to_write_some_objects_down,
        forgets_what_its_predecessor_promised,
        never_asks_twice,
    ],
)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(Violation, match="seed"):
        first = FIRST_SEED.get(bug.__name__, 0)
        for seed in range(first, first + 30):
            StoreRun(seed).run()
