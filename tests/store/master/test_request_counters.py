# SPDX-License-Identifier: Apache-2.0
"""Requests are counted by the existing master's names."""

from __future__ import annotations

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.request_counters import SIZE_BOUNDS, RequestCounters
from mooncake.store.settings import MasterSettings


def new_counters() -> RequestCounters:
    return RequestCounters(Catalog(MasterSettings(), 1))


def test_one_key_is_a_request_and_more_are_a_batch() -> None:
    counters = new_counters()
    counters.add(m.LookupObjects(["a"]), m.LookupReply(1.0, [None]))
    counters.add(
        m.LookupObjects(["a", "b", "c"]), m.LookupReply(1.0, [None, m.Stored(1, 70, 70, b"", []), None])
    )
    counters.add(m.LookupObjects(["a", "b"]), m.LookupReply(1.0, [None, None]))
    assert counters.counts == {
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
    counters = new_counters()
    sizes = [1, SIZE_BOUNDS[0], SIZE_BOUNDS[-1] + 1, 7]
    request = m.PutStart(1, "h", list("abcd"), sizes, sizes, policy=m.PutPolicy(num_replicas=2))
    place = m.Replica("s", 1, 0)
    reserved = [m.Reserved(1, [place, place]), m.Reserved(2, [place]), m.Reserved(3, [place, place]), None]
    counters.add(request, m.PutStarted(1.0, reserved, {3: Refusal("no_space", "")}))
    assert counters.counts["put_start_partial_allocations"] == 1
    assert counters.counts["put_start_alloc_failures"] == 1
    assert counters.counts["batch_put_start_failed_items"] == 1
    assert (counters.num_by_size[0], counters.num_by_size[-1], sum(counters.num_by_size)) == (2, 1, 3)
    assert counters.put_bytes == sum(sizes[:3])
    refusal = Refusal("expired", "")
    counters.add(m.PutEnd(["a", "b"], [1, 2], [b"", b""]), m.Outcomes([True, refusal]))
    assert counters.counts["batch_put_end_failed_items"] == 1


def test_removals_and_messages_of_nodes_are_counted() -> None:
    counters = new_counters()
    counters.add(m.Remove(["a", "b"], False), m.Outcomes([True, False]))
    counters.add(m.RemoveMatching("", False), m.Removed(3, 0))
    counters.add(m.RemoveMatching("x", False), m.Removed(3, 0))
    counters.add(m.Heartbeat("s", 1), m.Beat(False))
    counters.add(m.Mount("s", 1, "h", 0, 4096, b"", 0.0), m.Mounted(None, 2, 1.0, 1.0))
    counters.add(m.GetMasterStatus(), m.MasterStatus(0, 0, 0, 0, {}, []))
    counters.add(m.LookupObjects(["a"]), Failure("invalid_argument", "too many"))
    assert counters.counts == {
        "remove_requests": 2,
        "remove_failures": 1,
        "remove_all_requests": 1,
        "remove_by_regex_requests": 1,
        "ping_requests": 1,
        "ping_failures": 1,
        "mount_segment_requests": 1,
        "remount_segment_requests": 1,
    }
