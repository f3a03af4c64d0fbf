# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from mooncake.store.master import jobs
from mooncake.types import Tier
from tests.store.conftest import LEASE_S, SETTINGS
from tests.store.master.test_tiering import put_durable, where, work
from tests.store.nodes import Nodes, Place, with_ssd
from tests.store.test_processes import MIB, Processes, content, num_writable
from tests.waiting import wait_until


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(SETTINGS)
    yield nodes
    nodes.master.check()


def ask(nodes: Nodes, message: m.CopyObject | m.DrainSegments | m.AskJob) -> m.JobStatus:
    reply = nodes.say(message)
    assert isinstance(reply, m.JobReply), reply
    return reply.status


def refusal(nodes: Nodes, message: m.CopyObject | m.DrainSegments | m.AskJob) -> str:
    reply = nodes.say(message)
    assert isinstance(reply, m.RefusedReply), reply
    return reply.refusal.code


def live(nodes: Nodes, seconds: float, *places: Place) -> None:
    """Time passes; these nodes send heartbeats and do their tasks."""
    for _ in range(round(seconds / 0.5)):
        nodes.wait(0.5)
        for place in places:
            place.beat()
        work(nodes, *places)


def test_a_copy_goes_to_each_target(nodes: Nodes) -> None:
    a, b, c = (Place(nodes, name) for name in "abc")
    nodes.put("k", host="a")
    job = ask(nodes, m.CopyObject("k", ["b", "c"]))
    assert (job.kind, job.state, job.about, job.num_left) == ("copy", "waiting", "k", 2)
    tasks = b.poll()
    assert ask(nodes, m.AskJob(job.job_id)).state == "running"
    b.work(*tasks)
    half = ask(nodes, m.AskJob(job.job_id))
    assert (half.num_done, half.num_left, half.moved_bytes) == (1, 1, 1000)
    work(nodes, a, b, c)
    done = ask(nodes, m.AskJob(job.job_id))
    assert (done.state, done.num_done, done.num_left, done.reason) == ("done", 2, 0, "")
    assert where(nodes, "k") == ["a", "b", "c"]


def test_a_copy_to_a_segment_that_has_the_object_is_done_at_once(nodes: Nodes) -> None:
    Place(nodes, "a")
    nodes.put("k", host="a")
    assert ask(nodes, m.CopyObject("k", ["a"])).state == "done"


def test_a_move_takes_the_old_replica_away_when_the_new_one_has_come(nodes: Nodes) -> None:
    _, b = Place(nodes, "a"), Place(nodes, "b")
    nodes.put("k", host="a")
    nodes.find("k")
    job = ask(nodes, m.CopyObject("k", ["b"], source="a"))
    assert job.kind == "move" and where(nodes, "k") == ["a"]
    b.work()
    assert where(nodes, "k") == ["b"] and ask(nodes, m.AskJob(job.job_id)).state == "done"
    assert nodes.allocated_bytes == 2048, "a reader may have the old one"
    assert "left a: moved away" in nodes.master.story("k")[-1]


def test_what_can_not_be_copied_is_refused(nodes: Nodes) -> None:
    Place(nodes, "a")
    nodes.put("k", host="a")
    assert refusal(nodes, m.CopyObject("none", ["a"])) == "not_found"
    assert refusal(nodes, m.CopyObject("k", ["nowhere"])) == "unknown_segment"
    assert refusal(nodes, m.CopyObject("k", [])) == "invalid_argument"
    assert refusal(nodes, m.CopyObject("k", ["a"], source="a")) == "invalid_argument"
    assert refusal(nodes, m.CopyObject("k", ["a"], source="b")) == "not_found"
    assert refusal(nodes, m.CopyObject("k", ["a"], tenant="other")) == "not_found"
    assert refusal(nodes, m.AskJob(17)) == "not_found"


def test_a_copy_that_has_no_room_fails_with_a_reason(nodes: Nodes) -> None:
    Place(nodes, "a")
    b = Place(nodes, "b", 4096)
    nodes.put("k", size_bytes=8000, host="a")
    job = ask(nodes, m.CopyObject("k", ["b"]))
    b.poll()
    failed = ask(nodes, m.AskJob(job.job_id))
    assert failed.state == "failed" and "no room" in failed.reason and failed.num_failed == 1


def test_a_job_that_is_cancelled_stops(nodes: Nodes) -> None:
    _, b = Place(nodes, "a"), Place(nodes, "b")
    nodes.put("k", host="a")
    job = ask(nodes, m.CopyObject("k", ["b"]))
    tasks = b.poll()
    assert ask(nodes, m.AskJob(job.job_id, cancel=True)).state == "cancelled"
    assert b.work(*tasks) == [] and where(nodes, "k") == ["a"]


def test_a_drained_segment_takes_nothing_and_is_empty_in_the_end(nodes: Nodes) -> None:
    a, b, c = (Place(nodes, name) for name in "abc")
    nodes.put(*"klmnop", host="a")
    job = ask(nodes, m.DrainSegments(["a"], [], max_concurrency=2))
    assert (job.kind, job.about, job.num_left) == ("drain", "a", 6)
    nodes.put("q", host="a")
    assert where(nodes, "q") != ["a"]
    assert len(b.poll()) + len(c.poll()) == 2, "the limit at a time"
    live(nodes, 8.0, a, b, c)
    done = ask(nodes, m.AskJob(job.job_id))
    assert (done.state, done.num_done, done.num_left) == ("running", 0, 6), "those two were forgotten"


def drained(nodes: Nodes, job: m.JobStatus) -> tuple[str, int, int]:
    status = ask(nodes, m.AskJob(job.job_id))
    return status.state, status.num_done, status.num_left


def status_of(nodes: Nodes, segment: str) -> m.SegmentStatus:
    (status,) = (one for one in nodes.say(m.GetMasterStatus()).segments if one.segment == segment)
    assert isinstance(status, m.SegmentStatus)
    return status


def test_leased_and_pinned_objects_leave_too_and_the_job_waits_for_the_leases(nodes: Nodes) -> None:
    a, b = Place(nodes, "a"), Place(nodes, "b")
    nodes.put("k", "n", host="a")
    stored = nodes.master.objects.readable["n"]
    nodes.master.catalog.pin(stored, is_hard=True, soft_until=0.0, now=nodes.now)
    nodes.find("k")
    job = ask(nodes, m.DrainSegments(["a"], []))
    live(nodes, 2.0, a, b)
    assert where(nodes, "k") == ["b"] and where(nodes, "n") == ["b"] and stored.is_hard_pinned
    assert drained(nodes, job) == ("running", 2, 1), "a reader may still look at k"
    live(nodes, LEASE_S, a, b)
    assert drained(nodes, job) == ("done", 2, 0)
    assert status_of(nodes, "a").is_draining and status_of(nodes, "a").allocated_bytes == 0


def test_a_drain_goes_to_its_targets_and_nowhere_else(nodes: Nodes) -> None:
    a, b, c = (Place(nodes, name) for name in "abc")
    nodes.put("k", "n", host="a")
    job = ask(nodes, m.DrainSegments(["a"], ["c"]))
    live(nodes, 3.0, a, b, c)
    assert where(nodes, "k") == where(nodes, "n") == ["c"] and drained(nodes, job) == ("done", 2, 0)


def test_jobs_name_objects_without_the_masters_own_names(nodes: Nodes) -> None:
    a, b = Place(nodes, "a"), Place(nodes, "b", 4096)
    nodes.put("k", size_bytes=8000, host="a", tenant="red")
    job = ask(nodes, m.CopyObject("k", ["b"], tenant="red"))
    assert job.about == "k of tenant red"
    b.poll()
    job = ask(nodes, m.DrainSegments(["a"], []))
    live(nodes, 1.0, a, b)
    reason = ask(nodes, m.AskJob(job.job_id)).reason
    assert reason == "k of tenant red: no other segment has room for 8000 bytes"


def test_a_drain_without_room_fails_but_nothing_is_evicted_for_it(nodes: Nodes) -> None:
    a, b = Place(nodes, "a"), Place(nodes, "b", 4096)
    nodes.put("other", size_bytes=2000, host="b")
    nodes.put("k", size_bytes=4000, host="a")
    job = ask(nodes, m.DrainSegments(["a"], []))
    live(nodes, 5.0, a, b)
    failed = ask(nodes, m.AskJob(job.job_id))
    assert (
        failed.state == "failed" and failed.num_failed == 1 and "no other segment has room" in failed.reason
    )
    assert where(nodes, "k") == ["a"] and where(nodes, "other") == ["b"]
    assert status_of(nodes, "a").is_draining
    assert ask(nodes, m.AskJob(job.job_id, cancel=True)).state == "cancelled"
    assert not status_of(nodes, "a").is_draining


def test_a_drain_waits_for_objects_being_written(nodes: Nodes) -> None:
    a, b = Place(nodes, "a"), Place(nodes, "b")
    (place,) = nodes.start("k", host="a").reserved
    assert place is not None
    job = ask(nodes, m.DrainSegments(["a"], []))
    live(nodes, 2.0, a, b)
    assert drained(nodes, job) == ("waiting", 0, 1)
    nodes.end("k", place.object_id)
    live(nodes, 2.0, a, b)
    assert drained(nodes, job) == ("done", 1, 0) and where(nodes, "k") == ["b"]


def test_an_object_that_others_have_just_leaves_when_there_is_no_room(nodes: Nodes) -> None:
    a, ssd = with_ssd(nodes)
    put_durable(nodes, "k")
    work(nodes, ssd)
    job = ask(nodes, m.DrainSegments(["a"], []))
    live(nodes, 2.0, a, ssd)
    assert where(nodes, "k") == ["a/ssd"] and drained(nodes, job) == ("done", 1, 0)


def test_memory_that_is_drained_may_go_to_an_ssd_but_an_ssd_not_to_memory(nodes: Nodes) -> None:
    a, ssd = Place(nodes, "a"), Place(nodes, "b/ssd", 65536, tier=Tier.SSD, content_id=9)
    nodes.put("k", host="a")
    ask(nodes, m.DrainSegments(["a"], []))
    live(nodes, 2.0, a, ssd)
    assert where(nodes, "k") == ["b/ssd"]
    c = Place(nodes, "c")
    job = ask(nodes, m.DrainSegments(["b/ssd"], []))
    live(nodes, 4.0, a, c, ssd)
    assert where(nodes, "k") == ["b/ssd"] and drained(nodes, job)[0] == "failed"


def on_one_ssd(nodes: Nodes) -> None:
    _, ssd = with_ssd(nodes)
    Place(nodes, "b")
    put_durable(nodes, "k", host="a")
    ssd.work()
    assert where(nodes, "k") == ["a", "a/ssd"]


def test_a_durable_object_does_not_leave_its_only_ssd_for_memory(nodes: Nodes) -> None:
    """Its writer was promised that it outlives the process."""
    on_one_ssd(nodes)
    assert refusal(nodes, m.CopyObject("k", ["b"], source="a/ssd")) == "durable"
    job = ask(nodes, m.DrainSegments(["a/ssd"], []))
    nodes.wait(4.0)
    assert "a/ssd" in where(nodes, "k")
    assert ask(nodes, m.AskJob(job.job_id)).state == "failed"


def test_a_graceful_unmount_takes_the_segment_away_when_it_is_empty(nodes: Nodes) -> None:
    a, b = Place(nodes, "a"), Place(nodes, "b")
    nodes.put("k", host="a")
    job = ask(nodes, m.DrainSegments(["a"], [], unmount_after_s=60.0))
    b.work()
    live(nodes, 2.0, b)
    assert drained(nodes, job) == ("done", 1, 0)
    assert [one.segment for one in nodes.say(m.GetMasterStatus()).segments] == ["b"]
    assert where(nodes, "k") == ["b"] and nodes.master.counts.lost_objects == 0
    assert a


def test_a_graceful_unmount_does_not_wait_forever(nodes: Nodes) -> None:
    a = Place(nodes, "a")
    nodes.put("k", host="a")
    job = ask(nodes, m.DrainSegments(["a"], [], unmount_after_s=5.0))
    live(nodes, 4.5, a)
    assert where(nodes, "k") == ["a"], "nowhere to go"
    nodes.wait(0.5)
    assert where(nodes, "k") == []
    failed = ask(nodes, m.AskJob(job.job_id))
    assert failed.state == "failed" and "1 objects left" in failed.reason


def test_what_can_not_be_drained_is_refused(nodes: Nodes) -> None:
    Place(nodes, "a"), Place(nodes, "b")
    assert refusal(nodes, m.DrainSegments([], [])) == "invalid_argument"
    assert refusal(nodes, m.DrainSegments(["x"], [])) == "unknown_segment"
    assert refusal(nodes, m.DrainSegments(["a"], ["x"])) == "unknown_segment"
    assert refusal(nodes, m.DrainSegments(["a"], ["a"])) == "invalid_argument"
    assert refusal(nodes, m.DrainSegments(["a"], [], max_concurrency=0)) == "invalid_argument"
    assert refusal(nodes, m.DrainSegments(["a"], [], unmount_after_s=-1.0)) == "invalid_argument"
    nodes.start("k", host="a")
    ask(nodes, m.DrainSegments(["a"], []))
    assert refusal(nodes, m.DrainSegments(["a"], ["b"])) == "busy"
    assert refusal(nodes, m.DrainSegments(["a"], [], unmount_after_s=9.0)) == "busy"


def test_a_drain_that_is_requested_again_is_the_same_job(nodes: Nodes) -> None:
    """The reply to the first request was lost, and the client repeats it."""
    Place(nodes, "a"), Place(nodes, "b")
    nodes.start("k", host="a")
    job = ask(nodes, m.DrainSegments(["a"], ["b"], unmount_after_s=90.0))
    again = ask(nodes, m.DrainSegments(["a"], ["b"], unmount_after_s=90.0))
    assert (again.job_id, again.state) == (job.job_id, job.state)
    assert ask(nodes, m.AskJob(job.job_id, cancel=True)).state == "cancelled"
    assert ask(nodes, m.DrainSegments(["a"], ["b"])).job_id != job.job_id, "that one has ended"


def test_a_move_that_is_requested_again_is_done(nodes: Nodes) -> None:
    a, b, _ = (Place(nodes, name) for name in "abc")
    nodes.put("k", host="a")
    job = ask(nodes, m.CopyObject("k", ["b"], source="a"))
    b.work()
    again = ask(nodes, m.CopyObject("k", ["b"], source="a"))
    assert (again.job_id, again.state, where(nodes, "k")) == (job.job_id, "done", ["b"])
    assert refusal(nodes, m.CopyObject("k", ["c"], source="a")) == "not_found", "no job has moved it there"
    back = ask(nodes, m.CopyObject("k", ["a"], source="b"))
    a.work()
    assert ask(nodes, m.AskJob(back.job_id)).state == "done" and where(nodes, "k") == ["a"]
    once_more = ask(nodes, m.CopyObject("k", ["b"], source="a"))
    assert once_more.job_id > back.job_id, "it is at the source again"


def test_a_drain_goes_to_disks_that_do_not_fail(nodes: Nodes) -> None:
    a = Place(nodes, "a/ssd", 65536, tier=Tier.SSD, content_id=7)
    b = Place(nodes, "b/ssd", 1 << 20, tier=Tier.SSD, content_id=8)
    c = Place(nodes, "c/ssd", 65536, tier=Tier.SSD, content_id=9)
    memory = Place(nodes, "m")
    nodes.put("k", host="m")
    ask(nodes, m.CopyObject("k", ["a/ssd"], source="m"))
    a.work()
    assert where(nodes, "k") == ["a/ssd"]
    job = ask(nodes, m.DrainSegments(["a/ssd"], []))
    num_failed = 0
    for _ in range(10):
        todo = b.answered() or b.poll()
        while todo:
            num_failed += 1
            todo = b.fail(todo[0], "io_error")
        b.beat()
        live(nodes, 1.0, a, c, memory)
    assert num_failed == 3, "it has most room, and each copy is tried three times"
    assert where(nodes, "k") == ["c/ssd"] and drained(nodes, job)[0] == "done"


def test_a_disk_that_can_not_be_read_does_not_count_against_the_targets_of_its_drain(nodes: Nodes) -> None:
    """Nothing would be evicted on them meanwhile, so their own nodes could copy nothing to them."""
    a = Place(nodes, "a/ssd", 65536, tier=Tier.SSD, content_id=7)
    b = Place(nodes, "b/ssd", 65536, tier=Tier.SSD, content_id=8)
    Place(nodes, "m")
    nodes.put("k", host="m")
    ask(nodes, m.CopyObject("k", ["a/ssd"], source="m"))
    a.work()
    ask(nodes, m.DrainSegments(["a/ssd"], []))
    todo = b.poll()
    assert todo
    while todo:
        todo = b.fail(todo[0], "io_error")
    assert nodes.master.segments.mounted["b/ssd"].disk_failing_until == 0.0


def test_a_target_that_goes_away_is_replaced_by_another(nodes: Nodes) -> None:
    a, b, c = Place(nodes, "a"), Place(nodes, "b"), Place(nodes, "c", 4096)
    nodes.put("k", host="a")
    job = ask(nodes, m.DrainSegments(["a"], []))
    assert len(b.poll()) == 1, "it has most room"
    nodes.say(m.Unmount("b", 7), b.connection)
    live(nodes, 3.0, a, c)
    assert where(nodes, "k") == ["c"] and drained(nodes, job)[0] == "done"


@pytest.mark.processes
def test_a_node_is_drained_under_reads_and_unmounted() -> None:
    """With real processes: no reader misses anything, and the drained process may stop."""
    keys = [f"k{number}" for number in range(16)]
    with contextlib.closing(Processes()) as processes:
        processes.start_master()
        processes.start_node("one")
        with Store(processes.address, settings=StoreSettings(timeout_s=20.0)) as store:
            wait_until(lambda: num_writable(store) == 1)
            for number, key in enumerate(keys):
                assert store.put(key, content(number, MIB)) is None
            processes.start_node("two")
            wait_until(lambda: num_writable(store) == 2)
            job = store.ask(m.DrainSegments(["one"], [], unmount_after_s=60.0)).status

            def is_done() -> bool:
                for number, key in enumerate(keys):
                    assert store.get(key) == content(number, MIB), key
                status = store.job(job.job_id)
                assert status is not None and status.state not in ("failed", "cancelled"), status
                return status.state == "done"

            wait_until(is_done)
            assert store.job(job.job_id).moved_bytes == len(keys) * MIB  # type: ignore[union-attr]
            assert [one.segment for one in store.ask(m.GetMasterStatus()).segments] == ["two"]
            processes.kill("one")
            for number, key in enumerate(keys):
                assert store.get(key) == content(number, MIB), key


def test_a_drain_keeps_replicas_on_different_hosts(nodes: Nodes) -> None:
    """However much more room there is where the other replica is."""
    a, b = Place(nodes, "a", host="h1"), Place(nodes, "b", host="h2")
    nodes.put("k", host="h1", policy=m.PutPolicy(num_replicas=2))
    assert sorted(where(nodes, "k")) == ["a", "b"]
    large, small = Place(nodes, "c", 1 << 20, host="h2"), Place(nodes, "d", host="h3")
    nodes.wait(0.6)
    ask(nodes, m.DrainSegments(["a"], []))
    live(nodes, 1.0, a, b, large, small)
    assert sorted(where(nodes, "k")) == ["b", "d"]


def test_cancelling_a_drain_that_failed_reopens_nothing_that_another_drains(nodes: Nodes) -> None:
    a = Place(nodes, "a")
    nodes.put("k", host="a")
    failed = ask(nodes, m.DrainSegments(["a"], []))
    live(nodes, 3.0, a)
    assert ask(nodes, m.AskJob(failed.job_id)).state == "failed", "there is no other segment"
    Place(nodes, "b", 64)
    again = ask(nodes, m.DrainSegments(["a"], []))
    assert again.state in ("waiting", "running")

    def is_draining() -> bool:
        return nodes.master.segments.mounted["a"].is_draining

    ask(nodes, m.AskJob(failed.job_id, cancel=True))
    assert is_draining()
    ask(nodes, m.AskJob(again.job_id, cancel=True))
    assert not is_draining()


def test_a_move_to_where_everything_leaves_takes_no_replica_away(nodes: Nodes) -> None:
    """The target began to be drained while the copy was under way."""
    Place(nodes, "a")
    b = Place(nodes, "b")
    nodes.put("k", host="a")
    ask(nodes, m.CopyObject("k", ["b"], source="a"))
    (task,) = b.poll()
    ask(nodes, m.DrainSegments(["b"], []))
    nodes.post(m.Poll("b", 7, [m.TaskDone(task.task_id, None)], b.seen, 16), b.connection, "b")
    assert "a" in where(nodes, "k")


def test_a_large_segment_is_looked_at_in_slices(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can be moved, which takes several steps to find out; the outcome is the same."""
    monkeypatch.setattr(jobs, "SURVEY_OBJECTS", 3)
    a, b = Place(nodes, "a"), Place(nodes, "b", 2048)
    nodes.put(*"klmnopqr", host="a", size_bytes=1000)
    job = ask(nodes, m.DrainSegments(["a"], []))
    assert nodes.master.replication._drains[job.job_id].to_survey, "else this shows nothing"
    live(nodes, 6.0, a, b)
    status = ask(nodes, m.AskJob(job.job_id))
    assert (status.state, status.num_done, status.num_failed) == ("failed", 2, 6)
    c = Place(nodes, "c")
    again = ask(nodes, m.DrainSegments(["a"], []))
    live(nodes, 12.0, a, b, c)
    done = ask(nodes, m.AskJob(again.job_id))
    assert (done.state, done.num_done, done.num_left) == ("done", 6, 0)
