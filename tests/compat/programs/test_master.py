# SPDX-License-Identifier: Apache-2.0
"""The existing master's command line: every flag, every form of one, and the setting that it becomes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mooncake.compat.programs.gflags import TEXT
from mooncake.compat.programs.master import MasterOptions, read
from mooncake.compat.programs.master_flags import FLAGS
from mooncake.errors import InvalidArgument

OF_THE_EXISTING_PROGRAM = """
rpc_port port rpc_address rpc_interface rpc_thread_num max_threads rpc_conn_timeout_seconds
rpc_enable_tcp_no_delay metrics_port metrics_host enable_metric_reporting enable_http_metadata_server
http_metadata_server_host http_metadata_server_port enable_metadata_cleanup_on_timeout
default_kv_lease_ttl default_kv_soft_pin_ttl max_kv_soft_pin_ttl allow_evict_soft_pinned_objects
eviction_ratio eviction_high_watermark_ratio client_ttl put_start_discard_timeout_sec
put_start_release_timeout_sec allocation_strategy memory_allocator use_mmap_arena_allocator
mmap_arena_pool_size enable_offload offload_on_evict offload_force_evict offloading_queue_limit
offload_cap_ratio promotion_on_hit
promotion_admission_threshold promotion_max_per_heartbeat promotion_queue_limit root_fs_dir
global_file_segment_size quota_bytes enable_disk_eviction dynamic_replication_mode
dynamic_replication_admission_qps_threshold dynamic_replication_heat_window_seconds
dynamic_replication_max_memory_replicas enable_ha ha_backend_type ha_backend_connstring etcd_endpoints
cluster_id enable_oplog oplog_poll_interval_ms oplog_batch_max_entries batch_oplog_retry_timeout_sec
pod_name pod_namespace enable_snapshot enable_snapshot_restore snapshot_interval_seconds
snapshot_retention_count snapshot_child_timeout_seconds snapshot_backup_dir snapshot_object_store_type
snapshot_catalog_store_type snapshot_catalog_store_connstring max_total_finished_tasks
max_total_pending_tasks max_total_processing_tasks pending_task_timeout_sec processing_task_timeout_sec
max_retry_attempts enable_multi_tenants tenant_quota_connector_type tenant_quota_connector_uri
enable_kv_events kv_events_bind_endpoint kv_events_backend_id kv_events_emit_legacy_compat
kv_events_emit_object_key kv_events_queue_capacity enable_cxl cxl_path cxl_size nof_eviction_ratio
nof_eviction_high_watermark_ratio nof_heartbeat_interval_sec nof_heartbeat_probe_timeout_ms
nof_heartbeat_failures_threshold config_path
"""


OWN_DEFAULTS = (
    "client_ttl",
    "put_start_release_timeout_sec",
    "promotion_on_hit",
    "offload_force_evict",
    "promotion_admission_threshold",
    "dynamic_replication_mode",
)
"""Flags that leave our own default when they are not given; it differs from the existing program's."""


def options(line: str, **environment: str) -> MasterOptions:
    return read(line.split(), environment)


def test_every_flag_is_known() -> None:
    assert not set(OF_THE_EXISTING_PROGRAM.split()) - FLAGS.keys()


@pytest.mark.parametrize("name", FLAGS)
def test_an_explicit_default_changes_nothing(name: str) -> None:
    flag = FLAGS[name]
    if name == "config_path":
        return
    defaults = options("")
    for line in ([f"--{name}={flag.default}"], [f"-{name.replace('_', '-')}", flag.default]):
        explicit = read(line, {})
        assert not explicit.warnings
        if name not in OWN_DEFAULTS:
            assert explicit == defaults


@pytest.mark.parametrize("name", sorted(FLAGS))
def test_bad_values_name_the_flag(name: str) -> None:
    if FLAGS[name].kind is TEXT:
        arguments = [f"--{name}=a\0b"]
    else:
        arguments = [f"--{name}=\u00bd pound"]
    with pytest.raises(InvalidArgument, match=f"--{name}"):
        read(arguments, {})


def test_empty_words_are_defaults_of_the_existing_program() -> None:
    names = ("object_store", "payload_store", "payload_backend", "catalog_store", "catalog_backend")
    for name, word in zip(names, ("local", "local", "local", "embedded", "embedded"), strict=True):
        flag = f"--snapshot_{name}_type="
        assert read([flag], {}) == read([flag + word], {}) == options("")
    assert "snapshot_object_store_type" in options("--snapshot_object_store_type=s3").warnings[0]
    assert not options("--kv_events_tenant_id=default").warnings


def test_the_defaults_of_the_existing_program() -> None:
    settings = options("").settings
    assert (settings.host, settings.port, settings.metrics_host, settings.metrics_port) == (
        "0.0.0.0",
        50051,
        "0.0.0.0",
        9003,
    )
    assert (settings.lease_s, settings.high_watermark, settings.eviction_ratio) == (10.0, 0.9, 0.05)
    assert options("").metadata is None


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--rpc_port=7 --port=8", "port", 7),
        ("--rpc-port 0 --port=8", "port", 8),
        ("-default_kv_lease_ttl=5s", "lease_s", 5.0),
        ("--default-kv-lease-ttl 30m", "lease_s", 1800.0),
        ("-default_kv_lease_ttl=999999", "lease_s", 999.999),
        ("--default_kv_lease_ttl=1h", "lease_s", 3600.0),
        ("-client_ttl=30", "segment_ttl_s", 30.0),
        ("", "segment_ttl_s", 5.0),
        ("--eviction_high_watermark_ratio=1.0 --eviction_ratio=0.0", "high_watermark", 1.0),
        ("--put_start_discard_timeout_sec=2 --put_start_release_timeout_sec=10", "grace_s", 8.0),
        ("", "grace_s", 5.0),
        ("--rpc_address 127.0.0.1 --metrics-port=0", "host", "127.0.0.1"),
        ("--enable_snapshot --snapshot_backup_dir /d --cluster_id=c", "oplog", "/d/c.oplog"),
        ("--enable_oplog", "oplog", ""),
        ("--max_kv_soft_pin_ttl=1h", "max_pin_s", 3600.0),
        ("", "promote_after_hits", 2),
        ("--promotion_on_hit --promotion_admission_threshold=5", "promote_after_hits", 5),
        ("--promotion_admission_threshold=5", "promote_after_hits", 5),
        ("--promotion_on_hit=false", "promote_after_hits", 0),
        ("--nooffload_force_evict", "evict_undemoted", False),
        ("", "evict_undemoted", True),
        ("", "hot_uses_per_s", 100.0),
        ("--dynamic_replication_mode=off", "hot_uses_per_s", 0.0),
        (
            "--dynamic_replication_mode=enforce --dynamic_replication_admission_qps_threshold=7",
            "hot_uses_per_s",
            7.0,
        ),
        ("--dynamic_replication_mode=enforce", "max_hot_replicas", 2),
        ("--enable_multi_tenants", "strict_tenants", True),
        ("", "strict_tenants", False),
        ("--enable_multi_tenants --tenant_quota_connector_uri=/d/t.yaml", "tenants_file", "/d/t.yaml"),
        ("--tenant_quota_connector_uri=/d/t.yaml", "tenants_file", ""),
        ("--enable_ha --etcd_endpoints=http://a:1,b:2", "election", "etcd://a:1;b:2"),
        (
            "--enable_ha --ha_backend_type=redis --ha_backend_connstring=redis://a:1/",
            "election",
            "redis://a:1",
        ),
        ("--enable_ha --ha_backend_type=k8s --ha_backend_connstring=a/b", "election", "k8s://a/b"),
        ("--enable_ha --ha_backend_type=k8s --pod_namespace=a", "election", "k8s://a"),
        ("--enable_ha --etcd_endpoints=a:1 --cluster_id=c", "cluster_id", "c"),
        (
            "--enable_kv_events --kv_events_bind_endpoint=tcp://*:1 --kv_events_backend_id=b",
            "kv_events_backend",
            "b",
        ),
        ("--enable_kv_events --kv_events_bind_endpoint=tcp://*:1", "kv_events_endpoint", ""),
        ("--kv_events_bind_endpoint=tcp://*:1 --kv_events_backend_id=b", "kv_events_endpoint", ""),
    ],
)
def test_what_flags_become(line: str, field: str, value: Any) -> None:
    assert getattr(options(line).settings, field) == value


def test_the_shared_directory_is_a_setting() -> None:
    line = "--port 10001 --root_fs_dir /mnt/mooncake_data --cluster_id other"
    found = options(line)
    settings = found.settings
    assert (settings.root_fs_dir, settings.cluster_id) == ("/mnt/mooncake_data", "other")
    assert settings.root_fs_size_bytes == 0 and not found.warnings
    assert options(f"{line} --global_file_segment_size=4GB").settings.root_fs_size_bytes == 4 * 10**9
    (warning,) = options("--global_file_segment_size=4GB").warnings
    assert "used only with --root_fs_dir" in warning


def test_command_lines_of_known_launchers() -> None:
    sglang = options("--enable_http_metadata_server=true --eviction_high_watermark_ratio=0.95")
    assert sglang.metadata == ("0.0.0.0", 8080) and not sglang.warnings
    queue = options(
        "-client_ttl=30 -default_kv_lease_ttl=999999 -default_kv_soft_pin_ttl=999999 "
        "--allow_evict_soft_pinned_objects=false --rpc_address 0.0.0.0 --rpc_port 50051 "
        "--eviction_high_watermark_ratio=1.0 --eviction_ratio=0.0 --v=1 -logtostderr"
    )
    assert queue.settings.lease_s == 999.999
    assert options("--noenable_metric_reporting").settings.report_s == 0 != options("").settings.report_s


def test_flags_without_effect_cause_a_warning_with_the_reason() -> None:
    assert options("--enable_cxl --rpc_thread_num=4").warnings == [
        "--enable_cxl: memory behind CXL is mounted by a node like any other",
        "--rpc_thread_num: one event loop serves all connections",
    ]
    assert "--snapshot_backup_dir" in options("--enable_snapshot").warnings[0]
    assert not options("--rpc_thread_num=0").warnings


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("--evicton_ratio=0.1", "--eviction_ratio?"),
        ("--nonsense", "--help"),
        ("master", "argument"),
        ("--eviction_ratio=1.5", "from 0 to 1"),
        ("--default_kv_lease_ttl=-1", "milliseconds"),
        ("--client_ttl=-1", "from 0"),
        ("--undefok=foo --bar=1", "--help"),
        ("--port", "a value"),
        ("--port=65536", "to 65535"),
        ("--enable_ha", "--etcd_endpoints"),
        ("--enable_ha --ha_backend_type=redis", "--ha_backend_connstring"),
        ("--enable_ha --ha_backend_type=k8s", "--pod_namespace"),
        ("--config_path=/nowhere/at.all", "readable"),
        ("--flagfile=/nowhere/at.all", "readable"),
        ("--fromenv=port", "FLAGS_port"),
        ("--root_fs_dir=relative", "absolute"),
        ("--root_fs_dir=/mnt/../etc", "without `..`"),
        ("--root_fs_dir=/mnt --cluster_id=a/b", "cluster_id"),
        ("--cluster_id=..", "cluster_id"),
    ],
)
def test_invalid_flags(line: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(why)):
        options(line)


@pytest.mark.parametrize(
    ("flag", "field", "value"),
    [
        ("--default_kv_lease_ttl=0", "lease_s", 0.1),
        ("--client_ttl=0", "segment_ttl_s", 0.1),
        ("--put_start_discard_timeout_sec=0", "put_s", 1.0),
        ("--eviction_high_watermark_ratio=0", "high_watermark", 0.01),
        ("--eviction_ratio=1.0", "eviction_ratio", 0.99 * 0.9),
        ("--promotion_admission_threshold=0", "promote_after_hits", 1),
    ],
)
def test_a_value_that_only_the_existing_program_has_is_replaced(flag: str, field: str, value: float) -> None:
    found = options(flag)
    assert getattr(found.settings, field) == value
    assert any(warning.startswith(flag.partition("=")[0]) for warning in found.warnings)


@pytest.mark.parametrize(
    "line", ["--undefok=foo,bar --foo=1 --port=7", "--port=7 -foo=1 --nobar --undefok bar,foo"]
)
def test_flags_that_may_be_unknown(line: str) -> None:
    assert options(line).settings.port == 7 and not options(line).warnings


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_files_of_flags(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"master{suffix}"
    content = {"rpc_port": 7, "default_kv_lease_ttl": "5s", "enable_http_metadata_server": True}
    lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in content.items())
    file.write_text(json.dumps(content) if suffix == ".json" else lines)
    found = options(f"--config_path={file} --default_kv_lease_ttl=6s")
    assert (found.settings.port, found.settings.lease_s) == (7, 6.0)
    assert found.metadata == ("0.0.0.0", 8080)
    for wrong, why in (
        ("[1]", "object"),
        ("{", "well-formed"),
        ('{"port": {}}', "port"),
    ):
        file.write_text(wrong)
        with pytest.raises(InvalidArgument, match=re.escape(why)) as error:
            options(f"--config_path={file}")
        assert str(file) in str(error.value)
    file.write_text('{"prot": 1, "metrics_port": 9}')
    found = options(f"--config_path={file}")
    assert (found.settings.port, found.settings.metrics_port) == (50051, 9)
    assert found.warnings == [f"prot in {file} is unknown; did you mean port?"]


def test_a_flag_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "flags"
    file.write_text("# comment\n\n--port=7\n-default_kv_lease_ttl=5s\n")
    found = options(f"--flagfile={file} --fromenv=client_ttl", FLAGS_client_ttl="3")
    assert (found.settings.port, found.settings.lease_s, found.settings.segment_ttl_s) == (7, 5.0, 3.0)


def test_a_flag_file_that_names_itself_is_refused(tmp_path: Path) -> None:
    """Reading it would not end. One that is named twice, one after the other, is read twice."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    first.write_text(f"--port=7\n--flagfile={second}\n")
    for back in (first, second):
        second.write_text(f"--client_ttl=3\n--flagfile={tmp_path}/./{back.name}\n")
        with pytest.raises(InvalidArgument, match=back.name):
            options(f"--flagfile={first}")
    third.write_text("--client_ttl=4\n")
    second.write_text(f"--flagfile={third},{third}\n--flagfile={third}\n")
    found = options(f"--flagfile={first} --flagfile={second} --metrics_port=9")
    assert (found.settings.port, found.settings.segment_ttl_s, found.settings.metrics_port) == (7, 4.0, 9)


@pytest.mark.processes
def test_a_process_of_that_name_serves() -> None:
    program = Path(sys.executable).with_name("mooncake_master")
    if not program.exists():
        pytest.skip("the console script is not installed in this environment")
    arguments = ["-rpc_port=0", "--port=0", "--metrics-port", "0", "--rpc_address", "127.0.0.1"]
    process = subprocess.Popen([program, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        seen, metrics = "", ""
        for line in process.stderr:
            seen += line
            metrics = next(iter(re.findall(r"metrics=(\S+)", line)), metrics)
            if re.search(r"Master service started on port (\d+)$", line):
                break
        assert metrics, seen
        with urllib.request.urlopen(f"http://{metrics}/health", timeout=10) as answer:
            assert json.load(answer)["service_ready"] is True
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
        assert b"mooncake_master" in command
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait(10)


def test_bad_flags_end_the_program_with_one_line() -> None:
    command = [sys.executable, "-c", "from mooncake.compat.programs.master import main; main()", "--prot=1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ})
    assert found.returncode == 2
    assert found.stderr.strip().splitlines() == ["error: flag is '--prot=1'; allowed: --port?"]


@pytest.mark.parametrize("flag", ["--metrics_port", "--http_metadata_server_port", "--port"])
def test_a_taken_port_names_its_flag(flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"--metrics_port": 0, "--http_metadata_server_port": 0, "--port": 0}
        ports[flag] = taken.getsockname()[1]
        arguments = [f"{name}={port}" for name, port in ports.items()]
        arguments += ["--enable_http_metadata_server", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        arguments += ["--http_metadata_server_host=127.0.0.1"]
        command = [
            sys.executable,
            "-c",
            "from mooncake.compat.programs.master import main; main()",
            *arguments,
        ]
        found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    error = found.stderr.strip().splitlines()[-1]
    assert str(ports[flag]) in error and flag.replace("_", "-") in error.replace("_", "-")


@pytest.mark.parametrize("program", ["master", "client", "transfer_engine_bench"])
def test_help_for_a_reader_that_has_ended(program: str) -> None:
    """As in ``mooncake_master --help | head -1``."""
    script = f"import sys; from mooncake.compat.programs.{program} import main; main(['--help'])"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", script], stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
