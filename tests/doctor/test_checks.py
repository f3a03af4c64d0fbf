# SPDX-License-Identifier: Apache-2.0
"""Every check finds its fault in facts that have it, at the right place, and nothing in healthy facts."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest

from mooncake.doctor.checks import examine
from mooncake.doctor.facts import (
    EngineFacts,
    EngineKind,
    Expectations,
    Facts,
    GatewayFacts,
    HostFacts,
    InstanceFacts,
    PublisherFacts,
    Reach,
    Shot,
    StoreFacts,
    Trouble,
)
from mooncake.doctor.findings import RULES, Severity

A, B, GATEWAY, MASTER = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.9:80", "10.0.0.8:50051"
EXPECTED = Expectations(shares_store=True)


def a_publisher(host: str) -> PublisherFacts:
    return PublisherFacts(
        f"tcp://{host}:5557",
        f"tcp://{host}:5558",
        num_batches=2,
        topics=("kv",),
        is_canary_seen=True,
        canary_hashes=("aa", "bb"),
        replay_answers=True,
    )


def an_engine(address: str, role: str, first_reused: int) -> EngineFacts:
    return EngineFacts(
        address,
        kind=EngineKind.VLLM,
        role=role,
        version="0.32.0",
        models=("m",),
        max_model_len=2048,
        block_tokens=16,
        has_prefix_cache=True,
        hash_algorithm="sha256",
        cache_dtype="auto",
        has_external_lookups=True,
        clock_skew_s=0.0,
        max_files=65536,
        publishers=[a_publisher(address.rpartition(":")[0])],
        first=Shot(200, prompt_tokens=40, cached_tokens=first_reused, text="x", logprob=-0.1),
        second=Shot(200, prompt_tokens=40, cached_tokens=32, text="x", logprob=-0.1),
        other_salt=Shot(200, prompt_tokens=40, cached_tokens=0),
        crossed_tokens=first_reused or None,
        store_growth=None if first_reused else 2,
    )


def healthy() -> Facts:
    rows = [
        InstanceFacts(A, "prefill", "ready", "", 5, False),
        InstanceFacts(B, "decode", "ready", "", 5, False),
    ]
    shot = Shot(200, prompt_tokens=40, cached_tokens=32, counted_hits=0, counted_external_hits=40)
    shot.prefill, shot.decode, shot.route = A, B, "prefill, decode"
    gateway = GatewayFacts(
        GATEWAY,
        is_ours=True,
        version="1",
        models=("m",),
        scheduling="overlap",
        protocol="push",
        conductor="inside this gateway",
        block_tokens=16,
        instances=rows,
        clock_skew_s=0.0,
        max_files=65536,
        first=shot,
        second=copy.copy(shot),
    )
    store = StoreFacts(MASTER, capacity_bytes=1 << 30, num_segments=1, is_read_back=True)
    host = HostFacts(True, 1 << 34, -1, 0, 64)
    return Facts([an_engine(A, "prefill", 0), an_engine(B, "decode", 32)], gateway, store, host)


def the_gateway(facts: Facts) -> GatewayFacts:
    assert facts.gateway is not None
    return facts.gateway


def the_store(facts: Facts) -> StoreFacts:
    assert facts.store is not None
    return facts.store


def publisher_of(facts: Facts, number: int) -> PublisherFacts:
    publishers = facts.engines[number].publishers
    assert publishers is not None
    return publishers[0]


def an_instance(facts: Facts, number: int) -> InstanceFacts:
    rows = the_gateway(facts).instances
    assert rows is not None
    return rows[number]


def shot_of(facts: Facts, number: int) -> Shot:
    shot = facts.engines[number].first
    assert shot is not None
    return shot


def setting(target: Callable[[Facts], object], **values: object) -> Callable[[Facts], None]:
    def change(facts: Facts) -> None:
        found = target(facts)
        for name, value in values.items():
            assert hasattr(found, name)
            setattr(found, name, value)

    return change


def engine(number: int, **values: object) -> Callable[[Facts], None]:
    return setting(lambda facts: facts.engines[number], **values)


def gateway(**values: object) -> Callable[[Facts], None]:
    return setting(the_gateway, **values)


def store(**values: object) -> Callable[[Facts], None]:
    return setting(the_store, **values)


def host(**values: object) -> Callable[[Facts], None]:
    return setting(lambda facts: facts.host, **values)


def publisher(number: int, **values: object) -> Callable[[Facts], None]:
    return setting(lambda facts: publisher_of(facts, number), **values)


def row(number: int, **values: object) -> Callable[[Facts], None]:
    return setting(lambda facts: an_instance(facts, number), **values)


def add_absent(facts: Facts, num: int) -> None:
    rows = the_gateway(facts).instances
    assert rows is not None
    rows += [
        InstanceFacts(f"decode-{number}:8000", "decode", "starting", "no such host", has_answered=False)
        for number in range(num)
    ]


def first_shot(number: int, **values: object) -> Callable[[Facts], None]:
    return setting(lambda facts: shot_of(facts, number), **values)


def failed(status: int = 500) -> Shot:
    return Shot(status, "it failed")


LOST = Reach(Trouble.REFUSED, "nothing listens")
A_EVENTS, B_EVENTS = f"{A} (tcp://10.0.0.1:5557)", f"{B} (tcp://10.0.0.2:5557)"

FAULTS: list[tuple[str, str, Callable[[Facts], None]]] = [
    ("gateway_unreachable", GATEWAY, gateway(reach=LOST)),
    ("tls_mismatch", GATEWAY, gateway(reach=Reach(Trouble.TLS, "this port speaks TLS"))),
    ("no_http_server", GATEWAY, gateway(reach=Reach(Trouble.NO_HTTP, "no HTTP server"))),
    ("certificate_refused", GATEWAY, gateway(reach=Reach(Trouble.CERTIFICATE, "self-signed"))),
    ("client_key_refused", GATEWAY, gateway(key_refused="401")),
    ("client_key_refused", B, engine(1, first=failed(401))),
    ("client_key_refused", B, engine(1, reach=Reach(Trouble.DENIED, "401"))),
    ("status_hidden", GATEWAY, gateway(status_refused="no key", instances=None)),
    ("gateway_request_failed", GATEWAY, gateway(first=failed())),
    ("gateway_request_failed", GATEWAY, gateway(second=failed(503))),
    ("versions_differ", B, engine(1, version="0.31.0")),
    ("path_degraded", GATEWAY, gateway(degraded="no decode instance is ready")),
    (
        "path_degraded",
        GATEWAY,
        gateway(first=Shot(200, cached_tokens=0, route="degraded: no prefill"), second=None),
    ),
    ("no_instance", GATEWAY, gateway(instances=[])),
    ("instance_not_ready", B, row(1, health="down")),
    ("instance_not_ready", B, row(1, health="starting", has_answered=False)),
    ("instances_not_started", GATEWAY, lambda facts: add_absent(facts, 1)),
    ("conductor_unreachable", GATEWAY, gateway(conductors={"h:1": False})),
    ("conductor_unreachable", GATEWAY, gateway(conductors={"h:1": False, "h:2": False})),
    ("conductor_lost", "h:2", gateway(conductors={"h:1": True, "h:2": False})),
    ("scheduling_ignores_cache", GATEWAY, gateway(scheduling="round_robin")),
    ("index_without_events", B, row(1, is_silent=True)),
    ("index_empty", B, row(1, num_blocks=0)),
    ("engine_unreachable", B, engine(1, reach=LOST)),
    ("engine_request_failed", B, engine(1, first=failed())),
    ("prefix_caching_off", B, engine(1, has_prefix_cache=False)),
    ("repeat_not_cached", B, engine(1, second=Shot(200, prompt_tokens=40, cached_tokens=0))),
    ("repeat_not_cached", GATEWAY, gateway(second=Shot(200, prompt_tokens=40, cached_tokens=0))),
    ("cached_tokens_hidden", B, engine(1, second=Shot(200, prompt_tokens=40, counted_hits=32))),
    ("prompt_shorter_than_block", B, engine(1, mean_prompt_tokens=9.0, num_prompts=100)),
    ("salt_ignored", B, engine(1, other_salt=Shot(200, prompt_tokens=40, cached_tokens=32))),
    ("models_differ", B, engine(1, models=("other",))),
    ("answers_differ", B, first_shot(1, text="y")),
    ("answers_differ", B, first_shot(1, logprob=-3.0)),
    ("block_size_differs", B, engine(1, block_tokens=32)),
    ("block_size_differs", B, engine(1, block_tokens=32, kind=EngineKind.OWN)),
    ("hash_algorithm_differs", B, engine(1, hash_algorithm="sha256_cbor")),
    ("hash_seed_differs", B, publisher(1, canary_hashes=("cc", "dd"))),
    ("cache_dtype_differs", B, engine(1, cache_dtype="fp8")),
    ("requests_wait", B, engine(1, num_waiting=3, usage=0.99)),
    ("connector_missing", B, engine(1, has_external_lookups=False)),
    ("connector_missing", B, engine(1, connectors=())),
    ("connector_role", B, engine(1, connectors=("C",), connector_role="kv_producer")),
    ("connector_role", A, engine(0, connectors=("C",), connector_role="kv_consumer")),
    ("pool_not_shared", B, engine(1, crossed_tokens=0, store_growth=2)),
    ("pool_not_written", A, engine(0, store_growth=0)),
    ("pool_not_written", B, engine(1, crossed_tokens=0, store_growth=0)),
    ("decode_without_kv", B, gateway(first=Shot(200, cached_tokens=0, counted_hits=0, prefill=A, decode=B))),
    ("events_off", B, engine(1, publishers=[])),
    ("events_unknown", B, engine(1, publishers=None)),
    ("events_not_flowing", B_EVENTS, publisher(1, num_batches=0)),
    ("events_not_replayable", B_EVENTS, publisher(1, replay_answers=False)),
    ("events_unreadable", B_EVENTS, publisher(1, num_unreadable=1, problem="2 frames")),
    ("master_unreachable", MASTER, store(reach=LOST)),
    ("master_denied", MASTER, store(reach=Reach(Trouble.DENIED, "another key"))),
    ("store_without_memory", MASTER, store(capacity_bytes=0)),
    ("segment_not_ready", MASTER, store(idle_segments=("node (memory): suspect",))),
    (
        "store_not_writable",
        MASTER,
        store(put_refusal="no_space: all segments are drained", num_writable=0, is_read_back=None),
    ),
    ("store_full", MASTER, store(put_refusal="no_space: nothing can be evicted", is_read_back=None)),
    (
        "store_log_unwritable",
        MASTER,
        store(
            put_refusal="storage_error: the oplog: No space left on device",
            put_refusal_code="storage_error",
            is_read_back=None,
        ),
    ),
    ("durable_put_fails", f"{MASTER} (n/ssd)", store(ssd_failures={"n/ssd": "out_of_space: /ssd"})),
    ("durable_put_slow", f"{MASTER} (n/ssd)", store(ssd_delays={"n/ssd": "no copy within 5 s"})),
    ("store_object_lost", MASTER, store(is_read_back=False)),
    ("reports_of_wrong_bytes", MASTER, store(num_wrong_reports=2)),
    ("earlier_canary_lost", B, engine(1, earlier=Shot(200, prompt_tokens=40, cached_tokens=0))),
    ("clock_skew", B, engine(1, clock_skew_s=-300.0)),
    ("clock_skew", GATEWAY, gateway(clock_skew_s=300.0)),
    ("few_file_descriptors", B, engine(1, max_files=64)),
    ("little_shared_memory", "/dev/shm", host(shared_memory_bytes=64 << 20)),
    ("little_locked_memory", "this host", host(locked_memory_bytes=65536, num_rdma_devices=2)),
    ("no_huge_pages", "this host", host(num_huge_pages=0)),
    ("disk_slow", "/ssd", host(disk="/ssd", disk_problem="can't be measured")),
    ("not_examined", B, engine(1, skipped="no time")),
]


def test_healthy_facts_have_no_finding() -> None:
    assert examine(healthy(), EXPECTED) == []


def test_nothing_is_known_and_nothing_is_found() -> None:
    assert examine(Facts(), Expectations()) == []
    unknown = Facts([EngineFacts(A, publishers=[])], GatewayFacts(GATEWAY), None, HostFacts())
    assert {one.code for one in examine(unknown, Expectations())} == {"events_off"}


@pytest.mark.parametrize(
    ("code", "where", "change"), FAULTS, ids=[f"{code}-{n}" for n, (code, _, _) in enumerate(FAULTS)]
)
def test_a_fault_is_found_where_it_is(code: str, where: str, change: Callable[[Facts], None]) -> None:
    facts = healthy()
    change(facts)
    found = examine(facts, EXPECTED)
    assert (code, where) in {(one.code, one.where) for one in found}, found
    (one,) = (one for one in found if (one.code, one.where) == (code, where))
    assert one.seen and one.remedy == RULES[code].remedy


def test_instances_that_do_not_exist_yet_are_one_notice() -> None:
    facts = healthy()
    add_absent(facts, 24)
    (found,) = examine(facts, EXPECTED)
    assert (found.code, found.severity) == ("instances_not_started", Severity.NOTICE)
    assert "24 of 25 decode: decode-0:8000" in found.seen and "no such host" in found.seen
    facts.engines.append(an_engine("decode-7:8000", "decode", 32))
    alarms = {(one.code, one.where) for one in examine(facts, EXPECTED)}
    assert ("instance_not_ready", "decode-7:8000") in alarms, "it was named, and it runs"


def test_one_of_several_conductors_is_no_alarm_about_placements() -> None:
    facts = healthy()
    the_gateway(facts).conductors = {"h:1": True, "h:2": False}
    the_gateway(facts).conductor = "h:1 (leads), h:2 (can't be reached)"
    (found,) = examine(facts, EXPECTED)
    assert (found.code, found.where, found.severity) == ("conductor_lost", "h:2", Severity.WASTEFUL)
    assert "1 of 2" in found.seen
    the_gateway(facts).conductors = {"h:1": True, "h:2": True}
    assert examine(facts, EXPECTED) == []


def test_kv_identities_of_our_workers_are_compared() -> None:
    facts = healthy()
    for number, identity in enumerate(("same" * 8, "other" * 8)):
        facts.engines[number].kind, facts.engines[number].kv_identity = EngineKind.OWN, identity
    assert "kv_identity_differs" in {one.code for one in examine(facts, Expectations())}


def test_expectations_are_compared() -> None:
    facts = healthy()
    assert facts.host is not None
    facts.host.disk, facts.host.disk_bytes_per_s = "/ssd", 100e6
    expected = Expectations(8, "kv@other", 1e9, 1 << 20, 5.0, True)
    found = {one.code for one in examine(facts, expected)}
    assert found == {"prompt_shorter_than_block", "events_wrong_topic", "disk_slow", "few_file_descriptors"}
    assert examine(facts, Expectations(400, "k", 150e6, 1024, 5.0, True)) == []


def test_events_are_needed_where_a_gateway_reads_them() -> None:
    facts = healthy()
    facts.engines[1].publishers, facts.gateway = [], None
    assert [(one.code, one.where) for one in examine(facts, EXPECTED)] == [("events_absent", B)]
    topic = Expectations(events_topic="kv", shares_store=True)
    assert [one.code for one in examine(facts, topic)] == ["events_off"]


def test_engines_that_share_nothing_may_differ() -> None:
    facts = healthy()
    facts.store = None
    facts.engines[1].block_tokens, facts.engines[1].hash_algorithm = 128, "xxhash"
    facts.engines[1].crossed_tokens = 0
    publisher_of(facts, 1).canary_hashes = ("zz",)
    assert examine(facts, Expectations()) == []


def test_what_follows_from_a_lost_engine_is_one_finding_there() -> None:
    facts = healthy()
    facts.engines[1] = EngineFacts(B, Reach(Trouble.SILENT, "no answer"), role="decode")
    assert {one.code for one in examine(facts, EXPECTED) if one.where == B} == {"engine_unreachable"}


def test_rounding_is_no_difference_of_weights() -> None:
    facts = healthy()
    facts.engines[1].first = Shot(200, prompt_tokens=40, cached_tokens=32, text="y", logprob=-2.1)
    shot_of(facts, 0).logprob = -2.0
    assert examine(facts, EXPECTED) == [], "both tokens were about equally likely"


def test_a_publisher_that_connects_to_the_conductor_is_not_silent() -> None:
    facts = healthy()
    one = publisher_of(facts, 1)
    one.num_batches, one.may_connect = 0, True
    assert examine(facts, EXPECTED) == []
    an_instance(facts, 1).num_blocks = 0
    assert {one.code for one in examine(facts, EXPECTED)} == {"events_not_flowing"}


def test_a_prompt_shorter_than_a_block_is_not_expected_to_be_cached() -> None:
    facts = healthy()
    facts.engines[1].block_tokens = facts.engines[0].block_tokens = 784
    facts.engines[1].second = Shot(200, prompt_tokens=40, cached_tokens=0)
    assert "repeat_not_cached" not in {one.code for one in examine(facts, EXPECTED)}


def test_a_pool_that_is_not_shared_is_explained_by_its_cause() -> None:
    facts = healthy()
    facts.engines[1].crossed_tokens, facts.engines[1].store_growth = 0, 2
    facts.engines[1].block_tokens = 32
    assert [one.code for one in examine(facts, EXPECTED)] == ["block_size_differs"]


def test_the_worst_come_first() -> None:
    facts = healthy()
    facts.engines[0].clock_skew_s, facts.engines[1].publishers = 99.0, None
    the_store(facts).capacity_bytes = 0
    order = [one.severity for one in examine(facts, EXPECTED)]
    assert order == [Severity.BROKEN, Severity.WASTEFUL, Severity.NOTICE]


def test_every_code_has_a_fault_here() -> None:
    shown = {code for code, _, _ in FAULTS}
    shown |= {"kv_identity_differs", "events_wrong_topic", "events_absent"}
    assert RULES.keys() == shown
