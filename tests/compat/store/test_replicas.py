# SPDX-License-Identifier: Apache-2.0
"""Single replicas: described, copied, moved and dropped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mooncake.compat.store.public_types import ReplicaStatus, TaskStatus, TaskType
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from tests.compat.store.servers import LONG_LEASES, RunningMaster, a_store, segments_of
from tests.waiting import wait_until

MIB = 1 << 20


@pytest.fixture
def pair(master: RunningMaster) -> Iterator[tuple[MooncakeDistributedStore, MooncakeDistributedStore]]:
    with a_store(master, MIB) as one, a_store(master, MIB) as other:
        yield one, other
        one.remove_all(force=True)


def finish(store: MooncakeDistributedStore, task_id: tuple[int, int]) -> TaskStatus:
    while True:
        response, code = store.query_task(task_id)
        assert code == 0 and response is not None
        if response.status in (TaskStatus.SUCCESS, TaskStatus.FAILED):
            assert response.id == task_id and response.created_at_ms_epoch > 0
            return response.status


def test_a_replica_is_described(pair: tuple[MooncakeDistributedStore, MooncakeDistributedStore]) -> None:
    one, other = pair
    config = ReplicateConfig()
    config.preferred_segment = other.get_hostname()
    assert one.put("k", b"value", config) == 0
    (copy,) = one.get_replica_desc("k")
    assert copy.status is ReplicaStatus.COMPLETE
    assert copy.is_memory_replica() and not copy.is_disk_replica() and not copy.is_local_disk_replica()
    place = copy.get_memory_descriptor().buffer_descriptor
    assert (place.size, place.transport_endpoint) == (5, other.get_hostname()) and place.buffer_address
    with pytest.raises(RuntimeError, match="not on disk"):
        copy.get_disk_descriptor()
    assert list(one.batch_get_replica_desc(["none", "k"])) == ["k"]


def test_a_described_object_is_leased() -> None:
    """The addresses are of use only as long as the bytes stay where they are."""
    master = RunningMaster(LONG_LEASES)
    with a_store(master, MIB) as store:
        assert store.put_batch(["one", "other", "free"], [b"v"] * 3) == 0
        assert len(store.get_replica_desc("one")) == 1
        assert list(store.batch_get_replica_desc(["other", "none"])) == ["other"]
        assert store.batch_remove(["one", "other", "free"]) == [-706, -706, 0]
    master.close()


def test_replicas_are_made_and_dropped(
    pair: tuple[MooncakeDistributedStore, MooncakeDistributedStore],
) -> None:
    one, other = pair
    config = ReplicateConfig()
    config.replica_num = 5
    assert one.put("k", b"value", config) == 0, "as many as there are segments"
    assert sorted(segments_of(one, "k")) == sorted([one.get_hostname(), other.get_hostname()])
    cleared: list[str] = []

    def clear() -> bool:
        cleared.extend(one.batch_replica_clear(["k", "none"], other.get_hostname()))
        return bool(cleared)

    wait_until(clear)  # until the lease of the description has ended
    assert cleared == ["k"]
    assert segments_of(one, "k") == [one.get_hostname()]
    assert one.get("k") == b"value"


def test_copy_and_move(pair: tuple[MooncakeDistributedStore, MooncakeDistributedStore]) -> None:
    one, other = pair
    here, there = one.get_hostname(), other.get_hostname()
    config = ReplicateConfig()
    config.preferred_segments = [here]
    assert one.put("k", b"value", config) == 0
    task_id, code = one.create_copy_task("k", [there])
    assert code == 0 and task_id != (0, 0)
    assert finish(one, task_id) is TaskStatus.SUCCESS
    assert sorted(segments_of(one, "k")) == sorted([here, there])
    assert one.put("m", b"value", config) == 0
    task_id, code = one.create_move_task("m", here, there)
    assert code == 0 and finish(one, task_id) is TaskStatus.SUCCESS
    response, _ = one.query_task(task_id)
    assert response is not None and response.type is TaskType.REPLICA_MOVE and "SUCCESS" in repr(response)
    assert response.message == "Task completed successfully"
    assert segments_of(one, "m") == [there]
    assert other.get("m") == b"value"


def test_invalid_tasks(pair: tuple[MooncakeDistributedStore, MooncakeDistributedStore]) -> None:
    one, other = pair
    assert one.put("k", b"value") == 0
    assert one.create_copy_task("k", ["nowhere"]) == ((0, 0), -600)
    assert one.create_copy_task("none", [one.get_hostname()]) == ((0, 0), -704)
    assert one.create_copy_task("k", []) == ((0, 0), -600)
    here = segments_of(one, "k")[0]
    elsewhere = next(name for name in (one.get_hostname(), other.get_hostname()) if name != here)
    for source, target in (("nowhere", here), (here, here), (elsewhere, here), ("", elsewhere), (here, "no")):
        assert one.create_move_task("k", source, target) == ((0, 0), -600)
    assert one.create_move_task("none", here, elsewhere) == ((0, 0), -704)
    for wrong in ("x", 5, (1, 2, 3), (1, "a")):
        with pytest.raises(TypeError):
            one.query_task(wrong)  # type: ignore[arg-type]
    for unknown in ((1, 10**6), (0, 0), (7, 7), (1, -1), (1, 1 << 70)):
        assert one.query_task(unknown) == (None, -1400)
