# SPDX-License-Identifier: Apache-2.0
"""``MooncakeECConnector`` in real vLLM: an image that one engine has encoded is not encoded by another."""

from __future__ import annotations

import signal
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mooncake.compat.store.tensor_format import HEADER_BYTES
from mooncake.errors import InvalidArgument
from mooncake.store import Store
from mooncake.store import messages as m
from tests.cluster import wait_for
from tests.contract.connectors import StoreConnector
from tests.vllm.vision_engine import Seen, VisionEngine
from tests.vllm.vision_model import make_model
from tests.vllm_server import num_stored

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

IMAGE = 1
ROLES = {"first": "ec_both", "consumer": "ec_consumer", "producer": "ec_producer"}

Engines = dict[str, VisionEngine]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreConnector]:
    running = StoreConnector()
    running.start(tmp_path_factory.mktemp("store"))
    yield running
    running.stop()


def connector(store: StoreConnector, role: str) -> dict[str, Any]:
    return {
        "ec_connector": "MooncakeECConnector",
        "ec_connector_module_path": "mooncake.connectors.vllm",
        "ec_role": role,
        "ec_connector_extra_config": {"mooncake_store_addr": store.address},
    }


@pytest.fixture(scope="module")
def engines(store: StoreConnector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines that start together; ``weights`` and ``processor`` differ from the others in just that."""
    folder = tmp_path_factory.mktemp("engines")
    same = make_model(folder / "model")
    other = {"weights": make_model(folder / "weights", seed=1)}
    other["processor"] = make_model(folder / "processor", mean=0.4)
    running = {
        name: VisionEngine(
            other.get(name, same),
            folder / f"{name}.log",
            connector(store, ROLES.get(name, "ec_both")),
            core=number % 2,
        )
        for number, name in enumerate([*ROLES, *other])
    }
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(lambda one: one.wait_until_ready(), running.values()))
        yield running
    finally:
        for engine in running.values():
            engine.close()


def encode(engine: VisionEngine, store: StoreConnector, image: int, **more: Any) -> Seen:
    """The answer of an engine that encodes the image, which is stored when this returns."""
    before = num_stored(store.address)
    seen = engine.ask(image, **more)
    assert seen.num_encoded == 1
    wait_for(lambda: num_stored(store.address) == before + 1, "the image's embeddings to be stored", 60.0)
    return seen


@pytest.fixture(scope="module")
def encoded(store: StoreConnector, engines: Engines) -> Seen:
    return encode(engines["first"], store, IMAGE)


def test_another_process_does_not_encode_the_image_again(engines: Engines, encoded: Seen) -> None:
    consumer = engines["consumer"]
    again = consumer.ask(IMAGE)
    assert again.num_encoded == 0
    assert (again.token_ids, again.logprobs) == (encoded.token_ids, encoded.logprobs)
    assert consumer.metric("vllm:mooncake_encoder_hits") == 1
    assert consumer.metric("vllm:mooncake_encoder_loaded_bytes") > 0


def test_another_image_is_encoded_and_a_consumer_does_not_save_it(engines: Engines, encoded: Seen) -> None:
    consumer = engines["consumer"]
    other = consumer.ask(IMAGE + 1)
    assert other.num_encoded == 1 and other.logprobs != encoded.logprobs, "the image matters"
    assert consumer.metric("vllm:mooncake_encoder_misses") == 1
    assert consumer.ask(IMAGE + 1) == Seen(other.token_ids, other.logprobs, 0), "vLLM's own cache has it"
    assert consumer.metric("vllm:mooncake_encoder_saved_outputs") == 0


@pytest.mark.parametrize("name", ["weights", "processor"])
def test_another_model_or_processor_never_hits(
    engines: Engines, store: StoreConnector, encoded: Seen, name: str
) -> None:
    assert encode(engines[name], store, IMAGE).logprobs != encoded.logprobs
    assert engines[name].metric("vllm:mooncake_encoder_hits") == 0


def test_a_producer_encodes_for_a_consumer(engines: Engines, store: StoreConnector, encoded: Seen) -> None:
    assert engines["producer"].ask(IMAGE).num_encoded == 0, "the store has it"
    encode(engines["producer"], store, IMAGE + 2)
    seen = engines["consumer"].ask(IMAGE + 2)
    assert seen.num_encoded == 0
    assert (seen.token_ids, seen.logprobs) == _computed(engines["first"], store, IMAGE + 2)


def _computed(engine: VisionEngine, store: StoreConnector, image: int) -> tuple[list[int], list[list[float]]]:
    """The answer of an engine that may not use what was stored before."""
    engine.reset_encoder_cache()
    seen = encode(engine, store, image)
    return seen.token_ids, seen.logprobs


def test_a_name_that_a_client_chose_names_nothing_in_the_store(
    engines: Engines, store: StoreConnector
) -> None:
    encode(engines["producer"], store, 10, uuid="cat")
    assert engines["consumer"].ask(10, uuid="dog").num_encoded == 0, "the same image of another name"
    other = engines["consumer"].ask(11, uuid="cat")
    assert other.num_encoded == 1, "another image of the same name"
    assert (other.token_ids, other.logprobs) == _computed(engines["first"], store, 11)


def test_requests_of_another_salt_find_nothing(engines: Engines, store: StoreConnector) -> None:
    for image in (50, 51):
        encode(engines["producer"], store, image, salt="alice")
    consumer = engines["consumer"]
    assert consumer.ask(50, salt="bob").num_encoded == 1
    assert consumer.ask(51, salt="alice").num_encoded == 0


def test_after_weights_were_replaced_nothing_older_is_used(
    engines: Engines, store: StoreConnector, encoded: Seen
) -> None:
    first = engines["first"]
    encode(first, store, 20)
    assert _computed(first, store, 20) == _computed(first, store, 20)
    assert engines["consumer"].ask(20).num_encoded == 1, "what it saved since has another identity"


def test_an_object_that_was_changed_is_not_used(engines: Engines, store: StoreConnector) -> None:
    with Store(store.address) as client:
        before = set(_keys(client))
        encode(engines["producer"], store, 30)
        (key,) = set(_keys(client)) - before
        value = bytearray(client.get(key) or b"")
        value[HEADER_BYTES + 5] ^= 1
        assert client.put(key, bytes(value), replace=True) is None
    consumer = engines["consumer"]
    seen = consumer.ask(30)
    assert seen.num_encoded == 1 and consumer.metric("vllm:mooncake_encoder_refused") == 1
    assert (seen.token_ids, seen.logprobs) == _computed(engines["first"], store, 30)


def _keys(client: Store) -> list[str]:
    found = client.ask(m.ListKeys("encoder/", 1000))
    assert isinstance(found, m.Keys)
    return list(found.keys)


def test_the_plugin_registers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import ECTransferConfig
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory

    from mooncake.connectors.vllm.encoder_connector import MooncakeECConnector
    from mooncake.connectors.vllm.plugin import register

    monkeypatch.setattr(ECConnectorFactory, "_registry", dict(ECConnectorFactory._registry))
    for _ in range(2):  # vLLM loads plugins more than once in a process
        register()
    config = ECTransferConfig(ec_connector="MooncakeECConnector", ec_role="ec_both")
    assert ECConnectorFactory.get_connector_class(config) is MooncakeECConnector


def an_item(**fields: Any) -> Any:
    data = {name: types.SimpleNamespace(data=value) for name, value in fields.items()}
    return types.SimpleNamespace(modality="image", data=data)


def test_all_that_an_encoder_is_given_counts() -> None:
    import torch

    from mooncake.connectors.encoder_output import content_digest
    from mooncake.connectors.vllm.encoder_connector import _parts

    pixels = torch.arange(12.0).reshape(3, 4)
    items = [
        an_item(pixels=pixels, grid=[1, 2]),
        an_item(pixels=pixels + 1, grid=[1, 2]),
        an_item(pixels=pixels.reshape(4, 3), grid=[1, 2]),
        an_item(pixels=pixels.to(torch.bfloat16), grid=[1, 2]),
        an_item(pixels=pixels, grid=[2, 1]),
        an_item(pixels=[pixels[:1], pixels[1:]], grid=[1, 2]),
        an_item(pixels=pixels, grid=[1, 2], second_per_grid=0.5),
        an_item(pixels=pixels, grid=[1, 2], second_per_grid=None),
    ]
    digests = [content_digest(_parts(one)) for one in items]
    assert len(set(digests)) == len(items)
    strided = torch.arange(24.0).reshape(3, 8)[:, ::2] / 2
    assert content_digest(_parts(an_item(pixels=strided, grid=[1, 2]))) == digests[0], "the same values"
    with pytest.raises(TypeError, match="set, whose content"):
        content_digest(_parts(an_item(pixels={1, 2})))


def test_an_item_without_its_content_is_recognized() -> None:
    import torch

    from mooncake.connectors.vllm.encoder_connector import EncoderSchedulerSide, _is_encoded

    side = EncoderSchedulerSide.__new__(EncoderSchedulerSide)
    side._placeholders = types.SimpleNamespace(fields_for=lambda modality: {"image_grid_thw"})
    grid = torch.tensor([1, 2, 2])
    assert side._lacks_content(an_item(image_grid_thw=grid)) and side._lacks_content(an_item())
    whole = an_item(image_grid_thw=grid, pixel_values=torch.ones(3))
    assert not side._lacks_content(whole) and _is_encoded(whole)
    assert not _is_encoded(an_item(image_embeds=torch.ones(3), image_grid_thw=grid)), (
        "it is the output itself"
    )


@pytest.mark.parametrize(
    "extra",
    [{"lookup_timeout_s": 0}, {"load_timeout_s": "5"}, {"load_timeout_s": True}, {"load_timeout_s": 1e9}],
)
def test_timeouts_that_make_no_sense_are_refused(extra: dict[str, Any]) -> None:
    from mooncake.connectors.vllm.encoder_connector import _link_settings

    assert _link_settings({"load_timeout_s": 2}).load_timeout_s == 2.0
    with pytest.raises(InvalidArgument, match="seconds"):
        _link_settings(extra)


def test_without_the_store_images_are_encoded(engines: Engines, store: StoreConnector) -> None:
    store.signal(signal.SIGKILL)
    consumer = engines["consumer"]
    assert consumer.ask(40).num_encoded == 1 and consumer.ask(41).num_encoded == 1
    assert consumer.metric("vllm:mooncake_encoder_failures") == 2
