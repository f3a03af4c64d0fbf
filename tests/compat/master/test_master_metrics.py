# SPDX-License-Identifier: Apache-2.0
"""The page has every metric of the existing master's dashboards, with its name and kind."""

from __future__ import annotations

import re
from pathlib import Path

from mooncake.compat.master.master_metrics import ALWAYS_0
from mooncake.store import messages as m
from tests.compat.master.conftest import MasterWithHttp

ROOT = Path(__file__).parents[3]
EXISTING = dict(
    line.split() for line in Path(__file__).with_name("master-metrics.txt").read_text().splitlines()
)
ON_DASHBOARDS = """
master_allocated_bytes master_total_capacity_bytes master_key_count master_soft_pin_key_count
master_active_clients master_put_start_requests_total master_put_start_failures_total
master_batch_put_start_items_total master_batch_get_replica_list_failed_items_total
master_put_start_alloc_failures_total master_put_start_partial_allocations_total mem_cache_hit_nums_
file_cache_hit_nums_ mem_cache_nums_ file_cache_nums_ valid_get_nums_ total_get_nums_
mem_cache_hit_bytes_total master_successful_evictions_total master_attempted_evictions_total
master_evicted_key_count master_evicted_size_bytes master_put_start_discard_cnt
master_value_size_bytes_bucket master_value_size_bytes_sum master_value_size_bytes_count
"""


async def samples(served: MasterWithHttp) -> tuple[dict[str, str], dict[str, float]]:
    """Kinds by metric, values by sample."""
    status, text = await served.ask("/metrics")
    assert status == 200
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    values = re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? ([0-9.e+]+)$", text, re.M)
    return kinds, {name: float(value) for name, value in values}


async def test_every_metric_has_its_name_and_kind(served: MasterWithHttp) -> None:
    kinds, values = await samples(served)
    assert len(EXISTING) == 138
    assert {name: kinds.get(name) for name in EXISTING} == EXISTING
    assert not {name for name, kind in EXISTING.items() if kind != "histogram"} - values.keys()


async def test_values_on_the_dashboards(served: MasterWithHttp) -> None:
    await served.mount()
    await served.put("a", "b")
    await served.rpc.call(m.LookupObjects(["a", "b", "c"]), 5)
    await served.rpc.call(m.LookupObjects(["a"]), 5)
    await served.rpc.call(m.Remove(["b"], True), 5)
    _, values = await samples(served)
    assert not set(ON_DASHBOARDS.split()) - values.keys()
    expected = {
        "master_key_count": 1,
        "master_total_capacity_bytes": 1 << 20,
        "master_active_clients": 1,
        "master_batch_put_start_items_total": 2,
        "master_batch_put_end_items_total": 2,
        "master_batch_get_replica_list_failed_items_total": 1,
        "master_get_replica_list_requests_total": 1,
        "master_remove_requests_total": 1,
        "mem_cache_hit_nums_": 3,
        "mem_cache_hit_bytes_total": 300,
        "file_cache_hit_nums_": 0,
        "valid_get_nums_": 3,
        "total_get_nums_": 4,
        "master_value_size_bytes_count": 2,
        "master_value_size_bytes_sum": 200,
        "master_mount_segment_requests_total": 1,
    }
    assert {name: values[name] for name in expected} == expected


async def test_segments_and_evictions_of_memory(served: MasterWithHttp) -> None:
    assert "segment_total_capacity_bytes" not in (await samples(served))[0], "as without a segment there"
    await served.mount('h"ost:1', 4096)
    await served.put("a")
    await served.mount("b", 8192)
    kinds, _ = await samples(served)
    assert kinds["segment_allocated_bytes"] == kinds["segment_total_capacity_bytes"] == "gauge"
    _, text = await served.ask("/metrics")
    found = dict(re.findall(r"^(segment_\w+\{.*\}) ([0-9.]+)$", text, re.M))
    assert float(found['segment_total_capacity_bytes{segment="h\\"ost:1"}']) == 4096
    assert float(found['segment_total_capacity_bytes{segment="b"}']) == 8192
    assert float(found['segment_allocated_bytes{segment="h\\"ost:1"}']) >= 100
    assert float(found['segment_allocated_bytes{segment="b"}']) == 0
    for number in range(200):  # more than both segments have room for
        await served.put(f"k{number}")
    _, values = await samples(served)
    assert values["master_evicted_key_count_mem"] == values["master_evicted_key_count"] > 0
    assert values["master_successful_evictions_mem"] == values["master_successful_evictions_total"] > 0
    assert values["master_evicted_size_bytes_mem"] == values["master_evicted_size_bytes"]


async def test_a_summary_is_one_line(served: MasterWithHttp) -> None:
    await served.mount()
    await served.put("a")
    status, text = await served.ask("/metrics/summary")
    assert status == 200 and text.count("\n") == 1
    assert "Keys: 1 | Clients: 1 |" in text and "Put=1/1" in text


def test_metrics_that_stay_0_are_documented() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert f"\n{len(EXISTING)} names of the existing master" in text
    assert not [name for name in ALWAYS_0 if f"`{name}`" not in text]


async def test_soft_pins_are_counted_while_they_last(served: MasterWithHttp) -> None:
    await served.mount()
    await served.put("a", "b", "c")
    for ttl_s, number in ((60.0, 2), (0.0, 0)):
        await served.rpc.call(m.Pin(["a", "b"], ttl_s), 5)
        assert (await samples(served))[1]["master_soft_pin_key_count"] == number
    await served.rpc.call(m.Pin(["a"], 60.0), 5)
    await served.rpc.call(m.Remove(["a"], True), 5)
    assert (await samples(served))[1]["master_soft_pin_key_count"] == 0
