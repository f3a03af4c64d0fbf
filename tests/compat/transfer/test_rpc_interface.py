# SPDX-License-Identifier: Apache-2.0
"""``RpcInterface``: bytes and tensors from one program to another's callback."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import queue
import socket
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake.compat.transfer.rpc_interface import PART_BYTES
from mooncake.engine import (
    CoroRPCInterface,
    ReceivedData,
    ReceivedTensor,
    RpcInterface,
    create_rpc_client,
    create_rpc_server,
)
from tests.waiting import wait_until


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Receiver:
    def __init__(self) -> None:
        self.address = free_address()
        self.data: list[ReceivedData] = []
        self.tensors: list[ReceivedTensor] = []
        self.server = create_rpc_server()
        assert self.server.initialize_server(self.address, thread_count=2)
        self.server.set_data_receive_callback(self.data.append)
        self.server.set_tensor_receive_callback(self.tensors.append)
        assert self.server.start_server_async()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.stop_server()


def test_data(receiver: Receiver) -> None:
    client = create_rpc_client()
    big = np.random.default_rng(1).integers(0, 256, 2 * PART_BYTES + 5, dtype=np.uint8)
    assert client.send_data(receiver.address, b"hello") == 0
    assert client.send_data(receiver.address, big) == 0
    assert client.send_data(receiver.address, b"") == 0
    hello, large, empty = receiver.data
    assert hello.get_bytes() == b"hello" and hello.data_size == 5
    assert hello.source_address.startswith("127.0.0.1:")
    assert large.get_memory_view() == big.data and empty.data_size == 0


def test_a_sender_that_is_dropped_leaves_no_open_socket(receiver: Receiver) -> None:
    sender = create_rpc_client()
    assert sender.send_data(receiver.address, b"hello") == 0
    connection = sender._clients[receiver.address]._socket
    assert connection is not None and connection.sock.fileno() >= 0
    del sender
    gc.collect()
    assert connection.sock.fileno() == -1


def test_data_is_a_dict(receiver: Receiver) -> None:
    """As the existing package's callbacks get it, which read ``received["data"]``."""
    assert create_rpc_client().send_data(receiver.address, b"hello") == 0
    [received] = receiver.data
    assert isinstance(received, dict) and sorted(received) == ["data", "source"]
    assert type(received["data"]) is bytes and received["data"] == b"hello"
    assert received["source"] == received.source_address


def test_a_forked_child_that_ends_leaves_its_parent_s_connections(receiver: Receiver) -> None:
    sender = create_rpc_server()
    assert sender.send_data(receiver.address, b"before") == 0
    child = os.fork()
    if child == 0:
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            if (finalizer.peek() or [None])[0] is sender:  # as at the end of a process
                finalizer()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    (client,) = sender._clients.values()
    connection = client._socket
    assert sender.send_data(receiver.address, b"after") == 0
    assert client._socket is connection is not None, "the connection is the same"


def test_a_forked_child_has_connections_of_its_own_and_leaves_the_port_to_its_parent(
    receiver: Receiver,
) -> None:
    sender, other = create_rpc_client(), Receiver()
    assert sender.send_data(receiver.address, b"parent") == 0
    goes_on, is_over = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(is_over)
            sent = sender.send_data(receiver.address, b"child")
            os.read(goes_on, 1)
            os._exit(0 if sent == 0 and sender.send_data(receiver.address, b"child") == 0 else 1)
        os._exit(2)
    os.close(goes_on)
    try:
        wait_until(lambda: len(receiver.data) == 2, "the child's message")
        assert sender.send_data(receiver.address, b"parent") == 0
        other.server.stop_server()
        again = create_rpc_server()
        assert again.initialize_server(other.address) and again.start_server_async(), "the port is free"
        again.stop_server()
    finally:
        os.close(is_over)
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0
    assert [one.get_bytes() for one in receiver.data] == [b"parent", b"child", b"parent", b"child"]


def test_a_tensor_without_a_callback_of_its_own_arrives_as_data() -> None:
    server, address = create_rpc_server(), free_address()
    received: list[ReceivedData] = []
    server.set_data_receive_callback(received.append)
    assert server.initialize_server(address) and server.start_server_async()
    try:
        array = np.arange(3, dtype=np.float32)
        assert create_rpc_client().send_tensor(address, array) == 0
        assert [data["data"] for data in received] == [array.tobytes()]
    finally:
        server.stop_server()


def test_tensors(receiver: Receiver) -> None:
    client = RpcInterface()
    assert client.initialize()
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert client.send_tensor(receiver.address, array) == 0
    [tensor] = receiver.tensors
    assert (tensor.dtype, tensor.shape, tensor.total_bytes) == ("float32", (3, 4), 48)
    assert tensor.get_data_as_bytes() == array.tobytes() and tensor.get_data_size() == 48
    assert np.array_equal(np.frombuffer(tensor.get_memory_view(), np.float32).reshape(tensor.shape), array)
    assert client.send_tensor(receiver.address, "no tensor") == -1


def test_torch_tensors(receiver: Receiver) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    sent = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    assert create_rpc_client().send_tensor(receiver.address, sent.t()) == 0
    [tensor] = receiver.tensors
    assert (tensor.dtype, tensor.shape) == ("torch.bfloat16", (3, 2))
    got = torch.frombuffer(tensor.get_memory_view(), dtype=torch.bfloat16).reshape(3, 2)
    assert torch.equal(got, sent.t())


async def test_from_coroutines(receiver: Receiver) -> None:
    loop, client = asyncio.get_running_loop(), CoroRPCInterface()
    assert client.initialize_client(pool_size=4, timeout_seconds=20)
    sent = [client.send_data_async(receiver.address, bytes([number]), loop) for number in range(20)]
    sent.append(client.send_tensor_async(receiver.address, np.zeros(3), loop))
    assert await asyncio.gather(*sent) == [0] * 21
    assert sorted(data.get_bytes()[0] for data in receiver.data) == list(range(20))


def test_failed_calls_return_an_error(receiver: Receiver) -> None:
    client = create_rpc_client()
    assert client.send_data(free_address(), b"x") == -1
    assert client.send_data("nonsense", b"x") == -1
    assert client.send_data(receiver.address, 5) == -1
    assert not RpcInterface().start_server()
    assert not RpcInterface().initialize_server("no port")
    second = RpcInterface()
    assert second.initialize(receiver.address) and not second.start_server_async(), "the address is taken"

    def broken(data: ReceivedData) -> None:
        raise ValueError("the receiver's own mistake")

    receiver.server.set_data_receive_callback(broken)
    assert client.send_data(receiver.address, b"x") == -1


def test_serving_until_stopped() -> None:
    server = RpcInterface()
    address = free_address()
    assert server.initialize(listen_address=address, thread_count=1)
    arrived = threading.Event()
    server.set_data_receive_callback(lambda data: arrived.set())
    answers: list[bool] = []
    serving = threading.Thread(target=lambda: answers.append(server.start_server()))
    serving.start()
    client = create_rpc_client()
    for _ in range(200):
        if client.send_data(address, b"x") == 0:
            break
        arrived.wait(0.05)
    assert arrived.is_set() and serving.is_alive()
    server.stop_server()
    serving.join(60)
    assert answers == [True] and client.send_data(address, b"x") == -1
    server.stop_server()


def test_a_callback_may_stop_its_server(caplog: pytest.LogCaptureFixture) -> None:
    server, address = create_rpc_server(), free_address()
    ends: queue.Queue[BaseException | None] = queue.Queue()

    def stop(data: ReceivedData) -> None:
        try:
            server.stop_server()
            ends.put(None)
        except BaseException as error:
            ends.put(error)

    server.set_data_receive_callback(stop)
    assert server.initialize_server(address) and server.start_server_async()
    serving = server._server
    assert serving is not None
    assert create_rpc_client().send_data(address, b"stop") == -1
    assert ends.get(timeout=60) is None
    serving._pool.shutdown()
    del serving
    gc.collect()
    left = [one for one in caplog.records if one.name in ("asyncio", "concurrent.futures")]
    assert not left, "no task was left to wait for the callback"
    assert create_rpc_client().send_data(address, b"too late") == -1
    assert server.start_server_async(), "it can be started again"
    server.stop_server()


def test_tensors_without_elements_in_memory(receiver: Receiver) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta")):
        assert create_rpc_client().send_tensor(receiver.address, tensor) == -1
    assert not receiver.tensors and not receiver.data
