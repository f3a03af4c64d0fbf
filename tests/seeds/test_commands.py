# SPDX-License-Identifier: Apache-2.0
"""The documents' command blocks that need no vLLM, in a shell, with sizes and ports of this machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from mooncake.cli.ports import free_ports
from mooncake.compat.config_file import MooncakeConfig
from mooncake.store import MooncakeDistributedStore
from mooncake.transfer.host import reachable_host
from tests.cluster import wait_for
from tests.seeds.blocks import BLOCKS, HERE, block, replaced
from tests.seeds.shell import ROOT, Shell

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HOST = "127.0.0.1"
QWEN = "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4"
READY_S = 60.0


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    running = Shell(tmp_path)
    try:
        yield running
    finally:
        running.close()


def ports(count: int) -> list[int]:
    return free_ports(HOST, count, Random())


def connected(settings: dict[str, object]) -> MooncakeDistributedStore:
    config = MooncakeConfig.of(settings)
    store = MooncakeDistributedStore()
    code = store.setup(
        config.local_hostname,
        config.metadata_server,
        config.global_segment_size,
        config.local_buffer_size,
        config.protocol,
        config.device_name,
        config.master_server_address,
    )
    assert code == 0
    return store


def test_the_package_has_a_version(shell: Shell) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", shell.run(block("000", "version")))


def test_the_guide_s_daemon_is_reached_from_other_hosts_and_logs_its_blocks(shell: Shell) -> None:
    (port,) = ports(1)
    shell.start(
        replaced(
            block("000", "daemon"),
            ("--port 50051", f"--port {port}"),
            ("--capacity-dram 256", "--capacity-dram 0.064"),
            ("--capacity-nvme 2000", "--capacity-nvme 0.064"),
            ("/mnt/nvme/mooncake", str(shell.folder / "nvme" / "mooncake")),
        )
    )
    log = "mooncaked.log"
    wait_for(lambda: " ready role=daemon" in shell.text(log), "mooncaked to be ready", READY_S)
    address = f"{reachable_host('0.0.0.0')}:{port}"  # as another host would name it
    settings = {"local_hostname": HOST, "metadata_server": "P2PHANDSHAKE", "master_server_address": address}
    writer, reader = (connected({**settings, "global_segment_size": 0}) for _ in range(2))
    try:
        assert writer.put("a block", b"of some bytes") == 0
        assert reader.get("a block") == b"of some bytes"
    finally:
        writer.close()
        reader.close()
    lines = shell.run(replaced(block("000", "blocks"), ("tail -f", "cat"))).splitlines()
    found = [(re.search(r"block_\w+", line), re.search(r"peer=\S+:(\d+)", line)) for line in lines]
    kinds = {kind[0]: peer[1] for kind, peer in found if kind is not None and peer is not None}
    assert kinds.keys() == {"block_write", "block_read"} and len(set(kinds.values())) == 2, lines
    assert all('key="a block"' in line and "bytes=13" in line for line in lines), lines
    assert "listening_without_credential" in shell.text(log), "it is open, and says so"


def test_the_guide_s_grpc_call(shell: Shell) -> None:
    pytest.importorskip("grpc", reason="grpcio is not installed (extra grpc)")
    (port,) = ports(1)
    shell.start(f"mooncaked --port {port} --capacity-dram 0.01 &> mooncaked.log &")
    wait_for(lambda: " ready role=daemon" in shell.text("mooncaked.log"), "mooncaked to be ready", READY_S)
    call = replaced(block("000", "daemon status"), ("<STORE_NODE_IP>:50051", f"{HOST}:{port}"))
    if shutil.which("grpc_cli"):
        assert "memory" in shell.run(call)
        return
    # What the program does: it finds the method by reflection, and sends an empty message.
    address, method = re.findall(r"call (\S+) \\\n  (\S+)", call)[0]
    program = """
import sys, grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
address, name = sys.argv[1:]
service, _, method = name.rpartition(".")
channel = grpc.insecure_channel(address)
pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
answer = GetMessageClass(pool.FindServiceByName(service).methods_by_name[method].output_type)
call = channel.unary_unary(f"/{service}/{method}", lambda _: b"", answer.FromString)
print(call(None, timeout=20))
"""
    (shell.folder / "call.py").write_text(program)
    printed = shell.run(f"python call.py {address} {method}")
    assert 'tier: "memory"' in printed and "capacity_bytes" in printed, printed


def test_the_post_s_master_and_configuration(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """No etcd runs: the file names one, as programs of the existing package need it."""
    port, metrics = ports(2)
    data = shell.folder / "data"
    data.mkdir()
    (shell.folder / "logs").mkdir()
    changes = ("10001", str(port)), ("/mnt/mooncake_data", str(data))
    flag = ("--port", f"--metrics_port {metrics} --port")
    shell.start(replaced(block("002", "master"), *changes, flag))
    wait_for(lambda: " ready role=master" in shell.text("logs/master.txt"), "the master to be ready", READY_S)
    sizes = ("274877906944", str(64 << 20)), ("10.1.222.133", HOST)
    (shell.folder / "mooncake.json").write_text(replaced(block("002", "mooncake.json"), *changes, *sizes))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(shell.folder / "mooncake.json"))
    config = MooncakeConfig.load_from_env()
    assert (config.cluster_id, config.root_fs_dir) == ("mooncake_cluster", str(data))
    store = connected(json.loads((shell.folder / "mooncake.json").read_text()))
    try:
        assert store.put("key", b"value") == 0 and store.get("key") == b"value"
        assert list((data / "mooncake_cluster").iterdir()), "the directory of this host's objects"
    finally:
        store.close()


@pytest.mark.parametrize("name", ["rdma", "tcp"])
def test_the_connector_guide_s_master_and_configurations(shell: Shell, name: str) -> None:
    port, metrics = ports(2)
    flag = ("50001", f"{port} --metrics_port {metrics}")
    shell.start(f"({replaced(block('004', 'master'), flag)}) &> master.log")
    wait_for(lambda: " ready role=master" in shell.text("master.log"), "the master to be ready", READY_S)
    given = replaced(block("004", name), ("192.168.0.137", HOST), ("50001", str(port)))
    settings = json.loads(given) | {"global_segment_size": 64 << 20, "local_buffer_size": 16 << 20}
    if name == "rdma" and not Path("/sys/class/infiniband/erdma_0").exists():
        config = MooncakeConfig.of(settings)
        store = MooncakeDistributedStore()
        code = store.setup(
            *(config.local_hostname, config.metadata_server, config.global_segment_size),
            *(config.local_buffer_size, config.protocol, config.device_name, config.master_server_address),
        )
        assert code == -600, "the card is not here"
        return
    store = connected(settings)
    try:
        assert store.put("key", b"value") == 0 and store.get("key") == b"value"
    finally:
        store.close()


def test_the_proxies_their_requests_and_instances_that_are_added(shell: Shell) -> None:
    """Both documents' proxies and requests, over engines that compute nothing."""
    engines = ports(8)
    names = (8100, 8101, 8102, 8103, 8200, 8201, 8202, 8203)
    moved = [(f"localhost:{old}", f"localhost:{new}") for old, new in zip(names, engines, strict=True)]
    folder = shell.folder / "model"
    folder.mkdir()
    for old, port in zip(names, engines, strict=True):
        role = "prefill" if old < 8200 else "decode"
        shell.start(f"mooncake dev fake-engine --role {role} --port {port} &> {old}.log")
    for old in names:
        wait_for(lambda: " ready role=" in shell.text(f"{old}.log"), f"engine {old} to be ready", READY_S)  # noqa: B023

    first, second, third = ports(3)
    commands = [
        replaced(
            block("002", "proxy"),
            ("python3 ../proxy_demo.py", "mkdir -p logs; mooncake_proxy"),
            ("--port 8000", f"--port {first}"),
            moved[0],
            moved[4],
        ),
        replaced(
            block("004", "proxy"),
            ("python3 examples/online_serving/disagg_examples/disagg_proxy_demo.py", "mooncake_proxy"),
            ("--port 8000", f"--port {second}"),
            *(moved[at] for at in (0, 1, 4, 5)),
        ),
        replaced(
            block("004", "proxy with a key"),
            ("python3 vllm/examples/online_serving/disagg_examples/disagg_demo.py", "mooncake_proxy"),
            ("--port 8000", f"--port {third}"),
            *(moved[at] for at in (0, 1, 4, 5)),
        ),
    ]
    for number, command in enumerate(commands):
        shell.start(f"({command}) &> proxy{number}.log")
    for port in (first, second, third):
        shell.run(f"curl -sS --retry 60 --retry-connrefused --retry-delay 1 localhost:{port}/health")

    model = "/home/vllm/Qwen2.5-7B-Instruct-GPTQ-Int4"
    request = replaced(block("002", "request"), ("http://127.0.0.1:8100", f"http://127.0.0.1:{first}"))
    answer = json.loads(shell.run(request))
    assert answer["choices"][0]["text"] and answer["usage"]["completion_tokens"] == 30, answer
    assert answer["model"] == model or model not in json.dumps(answer.get("error", ""))

    for port in (second, third):
        request = replaced(block("004", "request"), ("localhost:8000", f"localhost:{port}"))
        request = replaced(request, ('"max_tokens": 1000', '"max_tokens": 10'))
        assert json.loads(shell.run(request))["usage"]["completion_tokens"] == 10

    key = 'export ADMIN_API_KEY="xxxxxxxx"\n'
    added = (("add prefill 8102", 2), ("add prefill 8103", 3), ("add decode 8202", 6), ("add decode 8203", 7))
    for name, at in added:
        command = replaced(
            block("004", name), ("http://localhost:8000", f"http://localhost:{third}"), moved[at]
        )
        assert json.loads(shell.run(key + command))["status"] == "added"
        wrong = shell.run(
            replaced(command, ("$ADMIN_API_KEY", "wrong"), ("curl", "curl -o /dev/null -w '%{http_code}'"))
        )
        assert wrong == "401"
    show = replaced(block("004", "status"), ("localhost:8000", f"localhost:{third}"), (" | jq", ""))
    status = json.loads(shell.run(replaced(show, ("curl", 'curl -s -H "X-API-Key: xxxxxxxx"'))))
    assert (status["prefill_node_count"], status["decode_node_count"]) == (4, 4), status
    assert set(status["prefill_nodes"]) == {f"localhost:{port}" for port in engines[:4]}


def test_every_block_is_run_or_says_why_not() -> None:
    text = "\n".join(
        (ROOT / one).read_text() for one in (HERE, "tests/vllm/test_seeds.py", "scripts/test-wheel")
    )
    for one in BLOCKS:
        assert bool(one.run_by) != bool(one.why_not), one
        if one.run_by.endswith(".py"):
            source = (ROOT / one.run_by).read_text()
            assert one.seed in source and one.name.split()[0] in source, (
                f"{one.run_by} does not run {one.name}"
            )
    assert "mooncake" in text and len(BLOCKS) > 40


def test_no_command_of_the_documents_is_missing() -> None:
    """Where the documents are at hand; the list itself is checked everywhere."""
    folder = Path(os.environ.get("MOONCAKE_SEED_DOCUMENTS", ROOT / "no such folder"))
    known = re.sub(r"\s+", " ", "\n".join(one.text for one in BLOCKS))
    assert "mooncaked --port 50051" in known.replace("\\ ", "")
    commands = re.compile(
        r"^\s*(?:nohup )?((?:mooncaked|mooncake_master)(?: -.*)?|grpc_cli .*|curl -X .*|.* \\)$"
    )
    for document in sorted(folder.glob("00[024]_*.txt")):
        for line in document.read_text().splitlines():
            found = commands.match(line)
            if found:
                assert re.sub(r"\s+", " ", found[1]).strip() in known, f"{document.name}: {line}"


def test_the_table_is_printed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.seeds.blocks"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=True,
    )
    assert len(done.stdout.splitlines()) == len(BLOCKS)
