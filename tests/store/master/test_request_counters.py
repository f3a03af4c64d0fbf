"""Requests are counted by the existing master's names."""

from __future__ import annotations

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.request_counters import SIZE_BOUNDS, RequestCounters
from mooncake.store.settings import MasterSettings


def new_tally() -> RequestCounters:
    return RequestCounters(Catalog(MasterSettings(), 1))


def test_one_key_is_a_request_and_more_are_a_batch() -> None:
    tally = new_tally()
    tally.add(m.LookupObjects(["a"]), m.LookupReply(1.0, [None]))
    tally.add(
        m.LookupObjects(["a", "b", "c"]), m.LookupReply(1.0, [None, m.Stored(1, 70, 70, b"", []), None])
    )
    tally.add(m.LookupObjects(["a", "b"]), m.LookupReply(1.0, [None, None]))
    assert tally.counts == {
        "hit_nums": 1,
        "hit_bytes": 70,
        "get_replica_list_requests": 1,
        "get_replica_list_failures": 1,
        "batch_get_replica_list_requests": 2,
        "batch_get_replica_list_items": 5,
        "batch_get_replica_list_failed_items": 4,
        "batch_get_replica_list_partial_successes": 1,
        "batch_get_replica_list_failures": 1,
    }


def test_puts_count_their_sizes_and_why_they_failed() -> None:
    tally = new_tally()
    sizes = [1, SIZE_BOUNDS[0], SIZE_BOUNDS[-1] + 1, 7]
    asked = m.PutStart(1, "h", list("abcd"), sizes, sizes, policy=m.PutPolicy(num_replicas=2))
    place = m.Replica("s", 1, 0)
    reserved = [m.Reserved(1, [place, place]), m.Reserved(2, [place]), m.Reserved(3, [place, place]), None]
    tally.add(asked, m.PutStarted(1.0, reserved, {3: Refusal("no_space", "")}))
    assert tally.counts["put_start_partial_allocations"] == 1
    assert tally.counts["put_start_alloc_failures"] == 1
    assert tally.counts["batch_put_start_failed_items"] == 1
    assert (tally.num_by_size[0], tally.num_by_size[-1], sum(tally.num_by_size)) == (2, 1, 3)
    assert tally.put_bytes == sum(sizes[:3])
    refusal = Refusal("expired", "")
    tally.add(m.PutEnd(["a", "b"], [1, 2], [b"", b""]), m.Outcomes([True, refusal]))
    assert tally.counts["batch_put_end_failed_items"] == 1


def test_what_removes_and_what_nodes_say() -> None:
    tally = new_tally()
    tally.add(m.Remove(["a", "b"], False), m.Outcomes([True, False]))
    tally.add(m.RemoveMatching("", False), m.Removed(3, 0))
    tally.add(m.RemoveMatching("x", False), m.Removed(3, 0))
    tally.add(m.Heartbeat("s", 1), m.Beat(False))
    tally.add(m.Mount("s", 1, "h", 0, 4096, b"", 0.0), m.Mounted(None, 2, 1.0, 1.0))
    tally.add(m.GetMasterStatus(), m.MasterStatus(0, 0, 0, 0, {}, []))
    tally.add(m.LookupObjects(["a"]), Failure("invalid_argument", "too many"))
    assert tally.counts == {
        "remove_requests": 2,
        "remove_failures": 1,
        "remove_all_requests": 1,
        "remove_by_regex_requests": 1,
        "ping_requests": 1,
        "ping_failures": 1,
        "mount_segment_requests": 1,
        "remount_segment_requests": 1,
    }
