# SPDX-License-Identifier: Apache-2.0
"""vLLM's own encoder cache classes, unmodified, on our ``mooncake.engine`` and ``mooncake.store``.

Its classes are driven as its runner drives them: their engines need the runner that vLLM has for GPUs only,
because the one for CPUs calls no encoder cache connector in a step without tokens.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import wait_for
from tests.contract.connectors import StoreConnector
from tests.vllm_server import HOST, free_port, store_configuration

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", HOST)


def configuration(role: str, port: int) -> Any:
    from vllm.config import ECTransferConfig

    parallel = types.SimpleNamespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, data_parallel_index=0
    )
    transfer = ECTransferConfig(
        ec_connector="ECMooncakeConnector",
        ec_role=role,
        ec_buffer_device="cpu",
        ec_buffer_size=float(1 << 22),
        ec_ip=HOST,
        ec_port=port,
        ec_connector_extra_config={"mooncake_protocol": "tcp"},
    )
    return types.SimpleNamespace(parallel_config=parallel, ec_transfer_config=transfer)


@pytest.fixture
def workers() -> Iterator[tuple[Any, Any]]:
    """A producer and a consumer, each with a transfer engine of its own."""
    from vllm.distributed.ec_transfer.ec_connector.mooncake.worker import ECMooncakeWorker

    port = free_port()
    consumer = ECMooncakeWorker(configuration("ec_consumer", port))
    consumer.start_services()
    producer = ECMooncakeWorker(configuration("ec_producer", port))
    yield producer, consumer
    producer.close()
    consumer.close()


def test_the_peer_connector_pushes_embeddings_to_a_consumer(workers: tuple[Any, Any]) -> None:
    import torch
    from vllm.distributed.ec_transfer.ec_connector.mooncake import metadata as m

    producer, consumer = workers
    outputs = {f"image{number}": torch.randn(16 + number, 64).to(torch.bfloat16) for number in range(3)}
    pushes, loads = [], []
    for name, tensor in outputs.items():
        fields = (name, tensor.nbytes, tuple(tensor.shape), "bfloat16")
        address = f"tcp://{HOST}:{consumer._control_port}"
        pushes.append(m.ECMooncakePushSpec(*fields, address, f"transfer {name}", "request"))
        loads.append(m.ECMooncakeLoadSpec(*fields, f"transfer {name}"))
    producer.start_save_caches(m.ECMooncakeConnectorMetadata(pushes=pushes), encoder_cache={})
    for name in outputs:
        producer.save_caches(outputs, name)
    wait_for(lambda: not producer.build_connector_worker_meta().pending_saves, "the pushes to end", 60.0)

    found: dict[str, Any] = {}
    consumer.start_load_caches(m.ECMooncakeConnectorMetadata(loads=loads), found)
    report = consumer.build_connector_worker_meta()
    assert report.loaded == set(outputs) and not report.failed_loads
    assert all(torch.equal(found[name], tensor) for name, tensor in outputs.items())


def test_a_push_that_never_came_is_a_failed_load(workers: tuple[Any, Any]) -> None:
    from vllm.distributed.ec_transfer.ec_connector.mooncake import metadata as m

    _, consumer = workers
    load = m.ECMooncakeLoadSpec("image", 2048, (16, 64), "bfloat16", "transfer nothing")
    found: dict[str, Any] = {}
    consumer.start_load_caches(m.ECMooncakeConnectorMetadata(loads=[load]), found)
    report = consumer.build_connector_worker_meta()
    assert report.failed_loads == {"image"} and not report.loaded and not found


def test_the_shared_store_saves_an_output_once_for_all_encoders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding import backend, data, store_client

    running = StoreConnector()
    running.start(tmp_path)
    environment = store_configuration(tmp_path, running.address)
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", environment["MOONCAKE_CONFIG_PATH"])

    def encoder(namespace: str) -> Any:
        client = store_client.create_mooncake_embedding_store_client(read_buffer_bytes=1 << 20)
        return backend.MooncakeEmbeddingStoreBackend(
            client, namespace, max_pending_items=4, max_pending_bytes=1 << 20
        )

    tensor = torch.randn(16, 64).to(torch.bfloat16)
    wanted = {"image": data.TensorSpec((16, 64), "torch.bfloat16", tensor.nbytes)}
    first, second, other = encoder("model"), encoder("model"), encoder("other")
    try:
        assert first.resolve_inputs(wanted, {}, "cpu") == set()
        first.save_output("image", tensor)
        wait_for(lambda: first.reap() is None and not first._pending, "the output to be saved", 60.0)
        found: dict[str, Any] = {}
        assert second.resolve_inputs(wanted, found, "cpu") == {"image"}
        assert torch.equal(found["image"], tensor)
        assert other.resolve_inputs(wanted, {}, "cpu") == set(), "another name space"
    finally:
        for one in (first, second, other):
            one.shutdown()
        running.stop()
