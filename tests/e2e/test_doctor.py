# SPDX-License-Identifier: Apache-2.0
"""``mooncake doctor`` beside fake engines, a gateway and a store: each fault is named, and health is none."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mooncake.cli.ports import free_ports
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from mooncake.transfer import TransferEngine, transfer_from_environment
from tests.cluster import ADMIN_KEY, wait_for
from tests.gateway.doubles import save_tokenizer
from tests.program import Program, programs

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

Start = Callable[..., Program]
ALARMS = ("broken", "wasteful")


def free_address() -> str:
    return f"127.0.0.1:{free_ports('127.0.0.1', 1, Random())[0]}"


@dataclass
class Healthy:
    """Two engines that share a store, and their gateway."""

    folder: Path
    start: Start
    store: Program
    prefill: Program
    decode: Program
    gateway: Program

    def engine(self, role: str, *flags: str, master: str | None = None) -> Program:
        return an_engine(self.start, role, self.store.address if master is None else master, *flags)

    def gateway_of(self, *flags: str) -> Program:
        return a_gateway(self.start, self.folder, *flags)

    @property
    def flags(self) -> tuple[str, ...]:
        return flags_of(self.gateway, self.store.address)


def an_engine(start: Start, role: str, master: str, *flags: str) -> Program:
    more = ("--master", master) if master else ()
    return start("dev", "fake-engine", "--role", role, "--block-tokens", "32", *more, *flags)


def a_gateway(start: Start, folder: Path, *flags: str) -> Program:
    words = ("gateway", "--model", str(folder), "--served-model-name", "fake", "--admin-api-key", ADMIN_KEY)
    return start(*words, "--probe-interval-s", "0.2", *flags)


def flags_of(gateway: Program, master: str) -> tuple[str, ...]:
    named = ("--master", master) if master else ()
    return ("--url", gateway.url, "--admin-api-key", ADMIN_KEY, *named)


def wait_until_routable(gateway: Program, num_ready: int) -> None:
    def are_ready() -> bool:
        answer = gateway.request("GET", "/status", None, headers={"X-API-Key": ADMIN_KEY})
        health = [str(row["health"]) for row in answer.body["instances"]]
        return health == ["ready"] * num_ready

    wait_for(are_ready, "the engines to be ready", 60.0)


@pytest.fixture(scope="module")
def healthy_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Healthy]:
    folder = tmp_path_factory.mktemp("doctor")
    save_tokenizer(folder)
    with programs(folder) as start:
        store = start("daemon", "--capacity-dram", "0.064", "--no-huge-pages")
        engines = [an_engine(start, role, store.address) for role in ("prefill", "decode")]
        roles = [
            flag
            for one, role in zip(engines, ("--prefill", "--decode"), strict=True)
            for flag in (role, one.address)
        ]
        gateway = a_gateway(start, folder, *roles)
        wait_until_routable(gateway, 2)
        yield Healthy(folder, start, store, engines[0], engines[1], gateway)


@pytest.fixture
def healthy(healthy_cluster: Healthy) -> Iterator[Healthy]:
    """What a test starts besides ends with it: a gateway takes 300 MiB."""
    with programs(healthy_cluster.folder) as start:
        yield replace(healthy_cluster, start=start)


def examine(*flags: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of one run."""
    command = [sys.executable, "-m", "mooncake", "doctor", "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def named(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(one["code"], one["where"].partition(" (")[0]) for one in found["findings"]}


def test_health_is_no_finding(healthy: Healthy) -> None:
    for _ in range(3):
        status, found = examine(*healthy.flags)
        assert [one for one in found["findings"] if one["severity"] in ALARMS] == []
        assert status == 0
    first, second = found["facts"]["engines"]
    assert first["second"]["cached_tokens"] == second["second"]["cached_tokens"] == 64, "two blocks of 32"
    assert first["first"]["cached_tokens"] == 0 and second["crossed_tokens"] == 64, "from the store"
    assert first["store_growth"] >= 2
    for one in (first, second):
        assert one["publishers"][0]["is_canary_seen"] and one["publishers"][0]["replay_answers"]
    assert found["facts"]["gateway"]["second"]["cached_tokens"] > 0
    assert found["facts"]["store"]["is_read_back"]


def test_people_read_what_was_seen_and_what_mends_it(healthy: Healthy) -> None:
    command = [sys.executable, "-m", "mooncake", "doctor", *healthy.flags, "--prompt-tokens", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "prompt_shorter_than_block" in done.stdout and "prompts have 9 tokens, a block 32" in done.stdout
    assert "remedy" in done.stdout and "--block-size" in done.stdout


def test_its_object_and_prompts_leave_no_trace_in_the_store_s_names(healthy: Healthy) -> None:
    examine(*healthy.flags)
    with opened(healthy.store.address) as store:
        assert store.ask(m.ListKeys("mooncake-doctor/", 10)).keys == []


def test_an_earlier_prompt_is_looked_for_after_a_restart(healthy: Healthy, tmp_path: Path) -> None:
    flags = (*healthy.flags, "--canary-file", str(tmp_path / "canary.json"))
    examine(*flags)
    _, found = examine(*flags)
    assert all(one["earlier"]["cached_tokens"] == 64 for one in found["facts"]["engines"])
    fresh = healthy.engine("decode", master="")
    _, found = examine("--engine", fresh.url, "--canary-file", str(tmp_path / "canary.json"))
    assert ("earlier_canary_lost", fresh.address) in named(found)


def test_as_a_daemon_it_exports_a_metric_for_each_link(healthy: Healthy) -> None:
    address = free_address()
    host, port = address.split(":")
    command = [sys.executable, "-m", "mooncake", "doctor", "--watch-s", "0.1", *healthy.flags]
    lost = free_address()
    command += ["--metrics-host", host, "--metrics-port", port, "--engine", lost]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            page = wait_for(lambda: links_of(address), "an examination", 120.0)
        finally:
            process.terminate()
        assert process.stderr is not None
        log = process.stderr.read()
    assert process.returncode == 0
    assert page[f'link="engine",where="{lost}"'] == 0.0
    for one in (healthy.prefill, healthy.decode):
        for link in ("engine", "events", "host", "conductor"):
            assert page[f'link="{link}",where="{one.address}"'] == 1.0
    assert page[f'link="store",where="{healthy.store.address}"'] == 1.0
    assert f"code=engine_unreachable severity=broken where={lost}" in log


def links_of(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
        lines = re.findall(r"^mooncake_doctor_link_ok\{(.*)\} (\S+)$", answer.read().decode(), re.M)
    return {labels: float(value) for labels, value in lines}


# Faults beside the healthy processes


def test_what_does_not_answer(healthy: Healthy) -> None:
    lost = free_address()
    status, found = examine("--url", f"http://{lost}", "--engine", lost, "--master", lost)
    assert named(found) >= {
        ("gateway_unreachable", lost),
        ("engine_unreachable", lost),
        ("master_unreachable", lost),
    }
    assert status == 1


def test_tls_on_one_side(healthy: Healthy) -> None:
    https = healthy.gateway.url.replace("http:", "https:")
    _, found = examine("--url", https)
    assert named(found) == {("tls_mismatch", healthy.gateway.address)}


def test_without_the_admin_key(healthy: Healthy) -> None:
    _, found = examine("--url", healthy.gateway.url)
    assert ("status_hidden", healthy.gateway.address) in named(found)


def test_a_client_s_key_is_refused(healthy: Healthy, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "mk-0123456789abcdef0123456789abcdef"\n')
    keys.chmod(0o600)
    gateway = healthy.gateway_of("--decode", healthy.decode.address, "--api-keys-file", str(keys))
    _, found = examine(*flags_of(gateway, ""), "--api-key", "mk-wrong")
    assert ("client_key_refused", gateway.address) in named(found)


def test_a_process_may_open_few_files(healthy: Healthy) -> None:
    pid = healthy.decode.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, before[1]))
    try:
        _, found = examine(*healthy.flags)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert ("few_file_descriptors", healthy.decode.address) in named(found)


def test_a_disk_is_slower_than_promised(healthy: Healthy, tmp_path: Path) -> None:
    _, found = examine(*healthy.flags, "--disk", str(tmp_path), "--disk-write-mb-s", "1e9")
    assert ("disk_slow", str(tmp_path)) in named(found)
    assert not list(tmp_path.iterdir()), "the file is removed"


def test_events_have_another_topic(healthy: Healthy) -> None:
    _, found = examine(*healthy.flags, "--events-topic", "kv@other")
    assert ("events_wrong_topic", healthy.prefill.address) in named(found)


# Faults of engines


@contextmanager
def behind_a_gateway(healthy: Healthy, other: Program, *flags: str) -> Iterator[Program]:
    addresses = (healthy.prefill.address, other.address)
    gateway = healthy.gateway_of("--prefill", addresses[0], "--decode", addresses[1], *flags)
    wait_until_routable(gateway, 2)
    yield gateway


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--block-tokens", "16"), "block_size_differs"),
        (("--seed", "7"), "kv_identity_differs"),
        (("--seed", "7"), "answers_differ"),
        (("--dtype", "bfloat16"), "kv_identity_differs"),
        (("--served-model-name", "other"), "models_differ"),
    ],
)
def test_an_engine_is_configured_otherwise(healthy: Healthy, flags: tuple[str, ...], code: str) -> None:
    other = healthy.engine("decode", *flags)
    with behind_a_gateway(healthy, other) as gateway:
        status, found = examine(*flags_of(gateway, healthy.store.address))
    assert code in {one["code"] for one in found["findings"]}, found["findings"]
    assert status == 1


def test_an_engine_has_no_store(healthy: Healthy) -> None:
    other = healthy.engine("decode", master="")
    with behind_a_gateway(healthy, other) as gateway:
        _, found = examine(*flags_of(gateway, healthy.store.address))
    assert ("connector_missing", other.address) in named(found)


def test_an_engine_uses_another_store(healthy: Healthy) -> None:
    store = healthy.start("daemon", "--capacity-dram", "0.032", "--no-huge-pages")
    other = healthy.engine("decode", master=store.address)
    with behind_a_gateway(healthy, other) as gateway:
        _, found = examine(*flags_of(gateway, healthy.store.address))
    assert ("pool_not_written", other.address) in named(found)


def test_an_engine_is_killed(healthy: Healthy) -> None:
    other = healthy.engine("decode")
    with behind_a_gateway(healthy, other) as gateway:
        other.process.kill()
        _, found = examine(*flags_of(gateway, healthy.store.address))
    assert ("engine_unreachable", other.address) in named(found)


# Faults of the gateway and of the store


def test_a_gateway_without_instances(healthy: Healthy) -> None:
    gateway = healthy.gateway_of()
    _, found = examine(*flags_of(gateway, ""))
    assert ("no_instance", gateway.address) in named(found)


def test_a_gateway_without_its_conductor(healthy: Healthy) -> None:
    gateway = healthy.gateway_of("--conductor", free_address(), "--decode", healthy.decode.address)
    _, found = examine(*flags_of(gateway, ""))
    assert ("conductor_unreachable", gateway.address) in named(found)


def test_a_gateway_that_ignores_caches(healthy: Healthy) -> None:
    gateway = healthy.gateway_of("--scheduling", "random", "--decode", healthy.decode.address)
    _, found = examine(*flags_of(gateway, ""))
    assert ("scheduling_ignores_cache", gateway.address) in named(found)


def test_a_store_without_memory(healthy: Healthy) -> None:
    (port,) = free_ports("127.0.0.1", 1, Random())
    command = [sys.executable, "-m", "mooncake", "master", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            with opened(f"127.0.0.1:{port}") as store:
                assert store.ask(m.GetMasterStatus()).capacity_bytes == 0
            _, found = examine(*flags_of(healthy.gateway, f"127.0.0.1:{port}"))
        finally:
            process.terminate()
    assert ("store_without_memory", f"127.0.0.1:{port}") in named(found)


def test_a_full_store(healthy: Healthy) -> None:
    full = healthy.start("daemon", "--capacity-dram", "0.016", "--no-huge-pages")
    with opened(full.address) as store:
        wait_for(lambda: store.ask(m.GetMasterStatus()).capacity_bytes > 0, "memory", 60.0)
        fill(store)
    _, found = examine(*flags_of(healthy.gateway, full.address))
    assert ("store_full", full.address) in named(found)


def test_a_store_whose_memory_is_drained(healthy: Healthy) -> None:
    drained = healthy.start("daemon", "--capacity-dram", "0.016", "--no-huge-pages", "--name", "only")
    with opened(drained.address) as store:
        wait_for(lambda: store.ask(m.GetMasterStatus()).capacity_bytes > 0, "memory", 60.0)
        assert store.put("kept", b"content") is None
        assert isinstance(store.drain(["only"], [], 1), m.JobStatus)
    _, found = examine(*flags_of(healthy.gateway, drained.address))
    assert {("store_not_writable", drained.address), ("segment_not_ready", drained.address)} <= named(found)


def fill(store: Store) -> None:
    """Put objects that are never evicted, until none of 4 KiB fits."""
    size, number = 1 << 20, 0
    while size >= 4096:
        number += 1
        if store.put(f"fill-{number}", bytes(size), m.PutPolicy(is_hard_pinned=True)) is not None:
            size >>= 1


@contextmanager
def opened(master: str) -> Iterator[Store]:
    with (
        TransferEngine(transfer_from_environment().for_tool()) as engine,
        Store(master, engine, StoreSettings(60.0)) as store,
    ):
        yield store
