# SPDX-License-Identifier: Apache-2.0
"""Calls before ``setup``, after ``close``, without a master, at the end of the process: they never crash."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest

from mooncake.compat.store import embedded_node
from mooncake.compat.transfer import TransferEngine
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
from mooncake.store.node.node import Node
from tests.compat.store.servers import RunningMaster, a_store, segments_of
from tests.contract.metadata_servers import free_port

MIB = 1 << 20
WORDS = ("127.0.0.1", "P2PHANDSHAKE", 0, MIB, "tcp", "")

BEFORE: dict[str, tuple[tuple[Any, ...], Any]] = {
    "close": ((), 0),
    "health_check": ((), 1),
    "get_hostname": ((), ""),
    "put": (("k", b"v"), -600),
    "put_parts": (("k", b"v"), -600),
    "put_batch": ((["k"], [b"v"]), -600),
    "upsert": (("k", b"v"), -600),
    "upsert_parts": (("k", b"v"), -600),
    "upsert_batch": ((["k"], [b"v"]), -600),
    "put_from": (("k", 1, 1), -600),
    "put_from_with_metadata": (("k", 1, 1, 1, 1), -600),
    "upsert_from": (("k", 1, 1), -600),
    "batch_put_from": ((["k"], [1], [1]), [-600]),
    "batch_upsert_from": ((["k"], [1], [1]), [-600]),
    "batch_put_from_multi_buffers": ((["k"], [[1]], [[1]]), []),
    "get": (("k",), b""),
    "get_batch": ((["k"],), [b""]),
    "get_buffer": (("k",), None),
    "batch_get_buffer": ((["k", "l"],), [None, None]),
    "get_size": (("k",), -600),
    "get_into": (("k", 1, 1), -600),
    "batch_get_into": ((["k"], [1], [1]), [-600]),
    "batch_get_into_multi_buffers": ((["k"], [[1]], [[1]]), [-600]),
    "is_exist": (("k",), -600),
    "batch_is_exist": ((["k", "l"],), [-600, -600]),
    "get_into_ranges": (([1], [["k"]], [[[0]]], [[[0]]], [[[1]]]), [[[-600]]]),
    "remove": (("k",), -600),
    "batch_remove": ((["k", "l"],), [-600, -600]),
    "remove_by_regex": (("k",), -600),
    "remove_all": ((), -600),
    "get_replica_desc": (("k",), []),
    "batch_get_replica_desc": ((["k"],), {}),
    "batch_replica_clear": ((["k"],), []),
    "create_copy_task": (("k", ["s"]), ((0, 0), -600)),
    "create_move_task": (("k", "s", "t"), ((0, 0), -600)),
    "query_task": (((1, 1),), (None, -600)),
    "get_offload_rpc_read_count": ((), 0),
    "alloc_from_mem_pool": ((1,), 0),
    "register_buffer": ((1, 1), -600),
    "unregister_buffer": ((1,), -600),
}
"""Arguments of each call, and its result when there is no session."""


@pytest.mark.parametrize("call", BEFORE)
def test_before_setup_and_after_close(master: RunningMaster, call: str) -> None:
    arguments, result = BEFORE[call]
    store = MooncakeDistributedStore()
    assert getattr(store, call)(*arguments) == result
    assert store.setup(*WORDS, master.address) == 0
    assert store.close() == 0
    assert getattr(store, call)(*arguments) == result


@pytest.mark.parametrize("name", ["x" * 64, "a..b:1", "a\0b:1"])
def test_names_that_no_host_can_have(name: str) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", name) < 0
    assert store.close() == 0 and store.setup_dummy(0, 0, name) < 0


def test_the_signature_of_setup() -> None:
    parameters = inspect.signature(MooncakeDistributedStore().setup).parameters
    assert list(parameters)[:7] == [
        "local_hostname",
        "metadata_server",
        "global_segment_size",
        "local_buffer_size",
        "protocol",
        "rdma_devices",
        "master_server_addr",
    ]
    assert parameters["engine"].default is None and parameters["tenant_id"].default == "default"
    for name in ("enable_ssd_offload", "ssd_offload_path", "tenant_id"):
        assert name in (MooncakeDistributedStore.setup.__doc__ or "") and name in parameters


def test_setup_refuses_other_arguments(master: RunningMaster) -> None:
    store = MooncakeDistributedStore()
    with pytest.raises(TypeError, match="ssd_colour"):
        store.setup(*WORDS, master.address, ssd_colour="red")
    with pytest.raises(TypeError, match="master_server_addr"):
        store.setup(*WORDS)
    with pytest.raises(TypeError, match="global_segment_size"):
        store.setup("h", "P2PHANDSHAKE", "16MB", MIB, "tcp", "", master.address)
    assert store.health_check() == 1


def test_setup_fails_with_a_code_when_the_memory_is_not_allocated_in_time(
    master: RunningMaster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released, allocate = threading.Event(), Node._allocate_pool

    def slow(node: Node) -> Any:
        released.wait(20)
        return allocate(node)

    monkeypatch.setattr(Node, "_allocate_pool", slow)
    monkeypatch.setattr(embedded_node, "START_S", 0.05)
    store = MooncakeDistributedStore()
    try:
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address) == -1
    finally:
        released.set()
        store.close()
    assert "within 0.05 s" in caplog.text


def test_setup_with_a_dictionary(master: RunningMaster, caplog: pytest.LogCaptureFixture) -> None:
    store = MooncakeDistributedStore()
    config = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "1 MB",
        "local_buffer_size": 1 << 20,
        "device_name": "",
        "master_server_address": master.address,
        "colour": "red",
    }
    assert store.setup(config) == 0
    assert "colour" in caplog.text and "device_name" not in caplog.text
    assert store.put("dictionary", b"x") == 0
    assert store.setup(config) == -600, "it is already set up"
    assert store.close() == store.close() == 0


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"local_hostname": ""}, "local_hostname"),
        ({"metadata_server": ""}, "metadata_server"),
        ({"global_segment_size": "much"}, "global_segment_size"),
        ({"global_segment_size": 1023}, "global_segment_size"),
        ({"global_segment_size": -1}, "global_segment_size"),
        ({"local_buffer_size": "2TB"}, "local_buffer_size"),
        ({"global_segment_size": "1000000 TB"}, "available"),
        ({"protocol": "carrier pigeon"}, "protocol"),
        ({"client_http_port": 99999}, "client_http_port"),
        ({"master_server_addr": "nowhere"}, "nowhere"),
        ({"local_hostname": "127.0.0.1:99999"}, "local_hostname"),
    ],
)
def test_an_invalid_argument_is_named(
    master: RunningMaster, caplog: pytest.LogCaptureFixture, change: dict[str, Any], named: str
) -> None:
    config = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "0",
        "master_server_addr": master.address,
    }
    store = MooncakeDistributedStore()
    assert store.setup(config | change) < 0
    assert named in caplog.text
    assert store.health_check() == 1


def test_setup_after_one_that_failed(master: RunningMaster) -> None:
    port = free_port()
    with a_store(master) as first:
        assert first.get_hostname().startswith("127.0.0.1:")
        taken = MooncakeDistributedStore()
        others = ("P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address)
        assert taken.setup("", *others) == -600
        assert taken.setup(f"127.0.0.1:{port}", *others) == -600, "a failed setup is closed first"
        assert taken.close() == 0
        assert taken.setup(f"127.0.0.1:{port}", *others) == 0
        assert taken.get_hostname() == f"127.0.0.1:{port}"
        taken.close()


def test_a_port_that_is_in_use_is_replaced(master: RunningMaster, caplog: pytest.LogCaptureFixture) -> None:
    """Processes of one host that share a configuration have one host name with one port."""
    port = free_port()
    words = (f"127.0.0.1:{port}", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address)
    first, second = MooncakeDistributedStore(), MooncakeDistributedStore()
    assert first.setup(*words) == second.setup(*words) == 0
    assert first.get_hostname() == f"127.0.0.1:{port}"
    assert second.get_hostname().startswith("127.0.0.1:") and second.get_hostname() != first.get_hostname()
    assert f"port {port} of local_hostname" in caplog.text and second.get_hostname() in caplog.text
    assert first.put("shared configuration", b"v") == 0 and second.get("shared configuration") == b"v"
    first.close()
    second.close()


@pytest.mark.parametrize("metadata", ["P2PHANDSHAKE", "http://127.0.0.1:9/metadata"])
def test_a_host_name_that_does_not_resolve_is_a_label(
    master: RunningMaster, caplog: pytest.LogCaptureFixture, metadata: str
) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("trainer-0.invalid", metadata, MIB, MIB, "tcp", "", master.address) == 0
    assert store.get_hostname().startswith("trainer-0.invalid:")
    with a_store(master, 0) as reader:
        assert store.put("label", b"v") == 0 and reader.get("label") == b"v"
        assert segments_of(reader, "label")
    store.close()
    assert ("does not resolve" in caplog.text) is (metadata == "P2PHANDSHAKE")


def test_a_local_buffer_of_any_size(master: RunningMaster) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", MIB, 100, "tcp", "", master.address) == 0
    assert store.put("small", bytes(100)) == 0 and store.get("small") == bytes(100)
    assert store.put("large", bytes(101)) == -600
    store.close()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", MIB, -1, "tcp", "", master.address) == -600
    store.close()


def test_with_an_engine(master: RunningMaster) -> None:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address, object()) == -600
    assert store.close() == 0
    assert (
        store.setup("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address, engine.get_engine())
        == 0
    )
    assert store.put("engine", b"v") == 0 and store.get("engine") == b"v"
    store.close()
    assert engine.send_probe(f"127.0.0.1:{engine.get_rpc_port()}") == 0, "the program's engine stays open"


@pytest.mark.parametrize(("hostname", "shown"), [("[::1]", "[::1]:"), ("localhost", "localhost:")])
def test_other_forms_of_a_host(master: RunningMaster, hostname: str, shown: str) -> None:
    store = MooncakeDistributedStore()
    assert store.setup(hostname, "P2PHANDSHAKE", MIB, MIB, "tcp", "", master.address) == 0
    assert store.get_hostname().startswith(shown)
    assert store.put("host", b"v") == 0 and store.get("host") == b"v"
    store.close()


def test_several_master_addresses(master: RunningMaster) -> None:
    store = MooncakeDistributedStore()
    assert store.setup(*WORDS, "k8s://default/mooncake") == -600
    assert store.close() == 0
    assert store.setup(*WORDS, f"127.0.0.1:{free_port()},{master.address}") == 0
    assert store.health_check() == 0
    store.close()


def test_a_master_that_stops_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_DROPIN_TIMEOUT_S", "1")
    monkeypatch.setenv("MOONCAKE_DROPIN_PROBE_TIMEOUT_S", "0.5")
    monkeypatch.setenv("MOONCAKE_DROPIN_SETUP_TIMEOUT_S", "2")
    master = RunningMaster()
    with a_store(master) as store:
        assert store.put("k", b"v") == 0
        master.stop()
        assert store.health_check() == 2
        assert store.put("l", b"v") == -900
        assert (store.get("k"), store.is_exist("k"), store.batch_is_exist(["k", "l"])) == (
            b"",
            -900,
            [-900] * 2,
        )
        assert (store.get_size("k"), store.remove("k")) == (-900, -900)
        assert MooncakeDistributedStore().setup(*WORDS, master.address) == -1
        master.start()
        monkeypatch.undo()
        while store.health_check() != 0:
            pass
        while (code := store.put("l", b"v")) == -200:
            pass
        assert code == 0
    master.close()


def test_closing_during_calls(master: RunningMaster) -> None:
    codes: list[int] = []
    with a_store(master) as store:
        started = threading.Event()

        def work() -> None:
            while (code := store.put("k", b"v")) != -600:
                codes.append(code)
                started.set()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait(30)
        assert store.close() == 0
        for thread in threads:
            thread.join(30)
    assert set(codes) <= {0, -900}


PROGRAM = """
import os, signal, sys
from mooncake import MooncakeDistributedStore, ReplicateConfig
# Under nohup or in the background the tests' children would inherit that these are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler), signal.signal(signal.SIGHUP, signal.SIG_DFL)
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", sys.argv[1]) == 0
assert store.put("left", b"v", ReplicateConfig()) == 0
if os.fork() == 0:
    code = store.put("child", b"v")
    os._exit(0 if code == -600 and store.close() == 0 else 1)
assert os.wait()[1] == 0
if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(store.get_hostname(), flush=True)
while sys.argv[2] == "busy":
    store.upsert("busy", b"v"), store.get("busy")
if sys.argv[2] != "exit":
    signal.pause()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("how", "number", "code"),
    [
        ("exit", 0, 0),
        ("signal", signal.SIGTERM, -signal.SIGTERM),
        ("signal", signal.SIGINT, -signal.SIGINT),
        ("signal", signal.SIGHUP, -signal.SIGHUP),
        ("busy", signal.SIGTERM, -signal.SIGTERM),
        ("handler", signal.SIGTERM, 7),
    ],
)
def test_a_program_that_never_closes(master: RunningMaster, how: str, number: int, code: int) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, master.address, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert program.stdout is not None
    name = program.stdout.readline().strip()
    assert name.startswith("127.0.0.1:"), program.stderr and program.stderr.read()
    if number:
        program.send_signal(number)
    assert program.wait(30) == code
    assert master.server is not None
    assert name not in master.server.master.segments.mounted, "it unmounted its segment"


LAST_PUT = """
import atexit, sys
from mooncake import MooncakeDistributedStore
store = MooncakeDistributedStore()
atexit.register(lambda: print(store.put("last", b"v"), store.get("last")))
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", sys.argv[1]) == 0
"""


@pytest.mark.processes
def test_a_store_is_open_in_what_runs_at_exit(master: RunningMaster) -> None:
    """Also in a function that was registered before ``setup``."""
    done = subprocess.run(
        [sys.executable, "-c", LAST_PUT, master.address],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert done.stdout == "0 b'v'\n", done.stderr


@pytest.mark.processes
def test_a_program_that_is_killed(master: RunningMaster, store: MooncakeDistributedStore) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, master.address, "killed"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": "."},
    )
    assert program.stdout is not None
    name = program.stdout.readline().strip()
    config = ReplicateConfig()
    config.preferred_segment = name
    assert store.put("on the killed node", b"v", config) == 0
    assert segments_of(store, "on the killed node") == [name]
    program.kill()
    program.wait(30)
    while store.is_exist("on the killed node"):
        pass
    assert store.get("on the killed node") == b""
    assert store.put("after it", b"v", config) == 0, "it is placed on another segment"


def collect(store_of: list[MooncakeDistributedStore], on_its_node: bool) -> None:
    """Drop the only reference to a store, here or on the thread of its node, which ends with the session."""
    session = store_of[0]._session
    assert session is not None and session._node is not None
    loop, thread = session._node._loop, session._node._thread
    del session
    if on_its_node:
        loop.call_soon_threadsafe(store_of.clear)
        thread.join(20)
    else:
        store_of.clear()
        gc.collect()
    assert not store_of and not thread.is_alive()


@pytest.mark.parametrize("on_its_node", [False, True])
def test_after_a_store_is_collected_nothing_lands_in_its_segment(
    master: RunningMaster, on_its_node: bool
) -> None:
    """An embedded segment that ends takes its objects with it, and only those."""
    with a_store(master, segment_bytes=8 * MIB) as stays:
        going = [MooncakeDistributedStore()]
        arguments = ("127.0.0.1", "P2PHANDSHAKE", 8 * MIB, MIB, "tcp", "", master.address)
        assert going[0].setup(*arguments) == 0
        name = going[0].get_hostname()
        there = ReplicateConfig()
        there.preferred_segment = name
        assert stays.put("before", b"x" * 1000, there) == 0
        assert segments_of(stays, "before") == [name]
        collect(going, on_its_node)
        assert stays.is_exist("before") == 0 and stays.get("before") == b""
        keys = [f"after-{number}" for number in range(50)]
        assert [stays.put(key, key.encode(), there) for key in keys] == [0] * len(keys)
        assert [stays.get(key) for key in keys] == [key.encode() for key in keys]
