# SPDX-License-Identifier: Apache-2.0
"""Our ``MooncakeStoreConnector`` in the real vLLM: what is loaded is right, and what fails is computed.

One engine at a time in this process (scheduler, rank and connector in it, float32), so that a test can
look at them and break them; where a prefix comes from another process, that one is a child.
"""

from __future__ import annotations

import gc
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mooncake import clock
from mooncake.connectors.peer_push import Sender
from mooncake.connectors.store_link import StoreLink, StoreLoad
from mooncake.connectors.vllm.plugin import register
from tests.cluster import wait_for
from tests.vllm.engine import BLOCK_TOKENS, Engine, a_prompt
from tests.vllm_server import HOST, QUIET, free_port, num_stored, running_store, start_store

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

MODULE = {"kv_connector": "MooncakeStoreConnector", "kv_connector_module_path": "mooncake.connectors.vllm"}
PROMPT = a_prompt("Zanzibar")
NUM_TOKENS = 12


@dataclass(frozen=True)
class Answered:
    token_ids: list[int]
    num_cached: int


class Here:
    """A vLLM engine in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool

    def complete(
        self, *prompts: str, max_tokens: int = NUM_TOKENS, kv_transfer_params: dict[str, Any] | None = None
    ) -> list[Answered]:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": kv_transfer_params} if kv_transfer_params else None
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        outputs = self.llm.generate(list(prompts), sampling, use_tqdm=False)
        return [Answered(list(one.outputs[0].token_ids), one.num_cached_tokens or 0) for one in outputs]

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache()

    def metric(self, name: str) -> float:
        return sum(getattr(one, "value", 0.0) for one in self.llm.get_metrics() if one.name == name)

    def is_at_rest(self) -> bool:
        """Whether no block is held, by requests or by saves.

        A save that ends gives its blocks back in the engine's next step. A server goes on stepping while
        blocks are held; here ``complete`` steps, and a save to a store that is away outlasts it.
        """
        if self.pool.get_num_free_blocks() < self.pool.num_gpu_blocks - 1:
            self.llm.llm_engine.step()
        return bool(self.pool.get_num_free_blocks() == self.pool.num_gpu_blocks - 1)


@contextmanager
def engine(model: Path, connector: dict[str, Any] | None, **more: Any) -> Iterator[Here]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(name, value)
        from vllm import LLM
        from vllm.config import KVTransferConfig
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if connector is not None:
            more["kv_transfer_config"] = KVTransferConfig(**connector)
        usual: dict[str, Any] = {"dtype": "float32", "max_model_len": 2048, "disable_log_stats": False}
        usual |= {"enforce_eager": True, "distributed_executor_backend": "uni"}
        here = Here(LLM(model=str(model), **{**usual, **more}))
        try:
            yield here
        finally:
            here.llm.llm_engine.engine_core.shutdown()
            del here.llm, here.scheduler, here.pool
            gc.collect()
            cleanup_dist_env_and_memory()


def connector(store: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {**MODULE, "kv_role": role, "kv_connector_extra_config": {"mooncake_store_addr": store, **extra}}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_store(tmp_path_factory.mktemp("store")) as address:
        yield address


@pytest.fixture(scope="module")
def computed(store: str, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answered:
    """The answer of an engine in another process that computed and saved the prompt, and was killed."""
    child = Engine(model, tmp_path_factory.mktemp("first") / "engine.log", connector(store))
    try:
        answered = child.wait_until_ready().complete(PROMPT, NUM_TOKENS, ignore_eos=True)
        assert answered.num_cached == 0
        blocks = answered.num_prompt // BLOCK_TOKENS
        wait_for(lambda: num_stored(store) >= blocks, "the prompt's blocks to be stored", 120.0)
    finally:
        child.kill()
    return Answered(answered.token_ids, blocks * BLOCK_TOKENS)


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "layerwise"])
def test_a_prefix_of_a_killed_engine_is_loaded_and_right(
    store: str, model: Path, computed: Answered, is_async: bool
) -> None:
    with engine(model, connector(store, load_async=is_async)) as here:
        assert here.complete(PROMPT) == [computed]
        here.forget()
        assert here.complete(PROMPT) == [computed], "again, from the store"
        assert here.is_at_rest()
        assert here.metric("vllm:mooncake_connector_failed_blocks") == 0


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "layerwise"])
def test_a_load_that_fails_each_time_is_tried_once(
    store: str, model: Path, computed: Answered, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    """Such as of a segment that this engine can't reach. The store still finds the blocks."""

    def load_part(*_: Any) -> StoreLoad:
        return StoreLoad(0, 0, clock.monotonic(), is_bad=True)

    monkeypatch.setattr(StoreLink, "load_part", load_part)
    with engine(model, connector(store, load_async=is_async)) as here:
        [answer] = here.complete(PROMPT)
        assert answer.token_ids == computed.token_ids
        num_blocks = computed.num_cached // BLOCK_TOKENS
        assert here.metric("vllm:mooncake_connector_failed_blocks") in (num_blocks, num_blocks - 1)
        assert here.is_at_rest()


def test_blocks_of_a_load_that_fails_are_not_pushed_to_decode(
    store: str, model: Path, computed: Answered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer-wise loads and pushes under MultiConnector: the step in which the load fails ends the prompt."""
    address = f"{HOST}:{free_port()}"
    push: dict[str, Any] = {**MODULE, "kv_connector": "MooncakeConnector"}
    to_decode = {**push, "kv_role": "kv_producer", "kv_connector_extra_config": {"listen_addr": address}}
    from_prefill = {**push, "kv_role": "kv_consumer"}
    from_prefill["kv_connector_extra_config"] = {"prefill_addr": address, "listener_offset": 0}
    both: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    both["kv_load_failure_policy"] = "recompute"
    both["kv_connector_extra_config"] = {"connectors": [connector(store, load_async=False), to_decode]}

    asked = threading.Event()
    awaited = Sender._awaited

    def note(sender: Sender, transfer_id: str) -> Any:
        asked.set()
        return awaited(sender, transfer_id)

    def load_part(*_: Any) -> StoreLoad:
        return StoreLoad(0, 0, clock.monotonic(), is_bad=True)

    monkeypatch.setattr(Sender, "_awaited", note)
    decode = Engine(model, tmp_path / "decode.log", from_prefill, core=1)
    try:
        decode.wait_until_ready()
        with engine(model, both) as here, ThreadPoolExecutor() as thread:
            monkeypatch.setattr(StoreLink, "load_part", load_part)
            wanted = {"kv_transfer_params": {"do_remote_prefill": True, "transfer_id": "1"}}
            taking = thread.submit(decode.complete, PROMPT, NUM_TOKENS, ignore_eos=True, extra_args=wanted)
            assert asked.wait(60.0), "decode waits for the first bytes that are offered"
            offered = {"do_remote_decode": True, "transfer_id": "1"}
            here.complete(PROMPT, max_tokens=1, kv_transfer_params=offered)
            assert here.metric("vllm:mooncake_connector_failed_blocks") > 0
            while not taking.done():
                here.llm.llm_engine.step()
            taken = taking.result()
            assert taken.num_cached >= taken.num_prompt - 1, "decode computed the prompt"
            assert taken.token_ids == computed.token_ids
            wait_for(here.is_at_rest, "the offered blocks to be given back", 60.0)
    finally:
        decode.close()


OTHERS: dict[str, dict[str, Any]] = {
    "dtype": {"dtype": "bfloat16"},
    "block size": {"block_size": 32},
    "rope": {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}},
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_block_of_another_kind_is_never_loaded(
    store: str, model: Path, computed: Answered, other: str
) -> None:
    with engine(model, connector(store, role="kv_consumer"), **OTHERS[other]) as here:
        assert here.complete(PROMPT)[0].num_cached == 0
        assert here.metric("vllm:mooncake_connector_loaded_blocks") == 0


def test_a_block_of_other_weights_is_never_loaded(
    store: str, model: Path, computed: Answered, tmp_path: Path
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    other = tmp_path / "model"
    shutil.copytree(model, other)
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.17.mlp.up_proj.weight"
    tensors[name] = tensors[name] * (1 + 1e-2 * torch.randn_like(tensors[name]))
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with engine(other, connector(store, role="kv_consumer")) as here:
        assert here.complete(PROMPT)[0].num_cached == 0


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "layerwise"])
def test_a_daemon_that_dies_in_a_load_costs_time_only(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    daemon, address = start_store(tmp_path)
    load_part = StoreLink.load_part

    def die_first(link: StoreLink, *args: Any) -> StoreLoad:
        """Kill the daemon after the blocks were found and leased."""
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()
        return load_part(link, *args)

    try:  # over tcp: from shared memory the blocks would still arrive, and be right
        with engine(model, connector(address, load_async=is_async, protocol="tcp")) as here:
            (first,) = here.complete(PROMPT)
            wait_for(here.is_at_rest, "the blocks to be saved", 60.0)
            here.forget()
            monkeypatch.setattr(StoreLink, "load_part", die_first)
            (again,) = here.complete(PROMPT)
            assert daemon.returncode == -signal.SIGKILL, "the load began"
            assert again.token_ids == first.token_ids
            assert here.metric("vllm:mooncake_connector_failed_blocks") > 0
            wait_for(here.is_at_rest, "the blocks of a save that fails to be given back", 60.0)
            here.forget()
            assert here.complete(PROMPT)[0].token_ids == first.token_ids, "nor is what follows harmed"
            wait_for(here.is_at_rest, "the blocks of a save that fails to be given back", 60.0)
    finally:
        daemon.kill()
        daemon.wait()


def test_preempted_requests_answer_as_alone_and_give_their_blocks_back(store: str, model: Path) -> None:
    prompts = [a_prompt(word, 14) for word in ("Lisbon", "Madrid")]
    max_tokens = 100  # each needs two blocks at first and then a third; there are four
    with engine(model, connector(store), num_gpu_blocks_override=5, max_model_len=512) as here:
        together = here.complete(*prompts, max_tokens=max_tokens)
        assert here.metric("vllm:num_preemptions") > 0
        wait_for(here.is_at_rest, "saved blocks to be given back", 60.0)
        here.forget()
        again = here.complete(*prompts, max_tokens=max_tokens)
        assert all(one.num_cached > 0 for one in again)
    with engine(model, None) as alone:
        expected = [alone.complete(prompt, max_tokens=max_tokens)[0].token_ids for prompt in prompts]
    assert [one.token_ids for one in together] == expected
    assert [one.token_ids for one in again] == expected


def test_by_name_beside_another_connector_it_counts_and_publishes_events(
    store: str, model: Path, tmp_path: Path, computed: Answered
) -> None:
    """Our plugin, MultiConnector, metrics and KV events at once."""
    from vllm.config import KVEventsConfig

    ours = {name: value for name, value in connector(store).items() if name != "kv_connector_module_path"}
    example: dict[str, Any] = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    example["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path / "files")}
    several: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    several["kv_connector_extra_config"] = {"connectors": [ours, example]}
    register()
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with engine(model, several, kv_events_config=events) as here:
        published: list[Any] = []
        (mine, _) = here.scheduler.connector.sub_connectors
        assert type(mine).__module__ == "mooncake.connectors.vllm.store_connector"
        take = mine.take_events

        def listen() -> list[Any]:
            news = list(take())
            published.extend(news)
            return news

        mine.take_events = listen
        assert here.complete(PROMPT) == [computed]
        here.complete(a_prompt("Nairobi"))
        wait_for(here.is_at_rest, "saved blocks to be given back", 60.0)
        here.complete("One step more, which takes along what was reported.")
        assert here.metric("vllm:mooncake_connector_loaded_blocks") == computed.num_cached / BLOCK_TOKENS
        assert {event.medium for event in published} == {"cpu"}
        assert all(len(event.token_ids) == BLOCK_TOKENS for event in published)
        parents = [event.parent_block_hash for event in published]
        assert parents[1:] == [event.block_hashes[0] for event in published[:-1]]
