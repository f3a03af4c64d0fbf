# SPDX-License-Identifier: Apache-2.0
"""Our store connector in the real vLLM with KV memory that it takes for a device's: a CPU's behind a double.

vLLM computes on the CPU and knows nothing of it. The connector gathers blocks, passes them through a staging
area smaller than a prompt, and waits for events of copies that are made late and in any order
(``tests/connectors/late_device.py``). A block that is reported too early has the wrong contents.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.connectors.staged_memory import StagedMemory
from tests.cluster import wait_for
from tests.connectors.late_device import LateDevice
from tests.vllm.engine import BLOCK_TOKENS, a_prompt
from tests.vllm.test_store_connector import Answered, Here, connector, engine
from tests.vllm_server import running_store

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

PROMPT = a_prompt("Timbuktu", 60)
OTHERS = [a_prompt(word, 30) for word in ("Samoa", "Tonga", "Fiji")]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_store(tmp_path_factory.mktemp("store")) as address:
        yield address


@pytest.fixture(scope="module")
def alone(model: Path) -> list[Answered]:
    """The answers of an engine without a connector."""
    with engine(model, None) as here:
        return [here.complete(prompt)[0] for prompt in (PROMPT, *OTHERS)]


def memory_of(here: Here) -> Any:
    """The worker side's memory, in this process."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker = get_kv_transfer_group()._worker
    return worker.transfer._link._memory


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "layerwise"])
def test_answers_through_a_staging_area_are_those_of_an_engine_alone(
    store: str, model: Path, alone: list[Answered], monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    device = LateDevice(computes_now=True)
    monkeypatch.setattr("mooncake.connectors.vllm.kv_memory.device_of", lambda tensor: device)
    block_bytes = 30 * 2 * 3 * BLOCK_TOKENS * 64 * 4  # layers, keys and values, heads, tokens, dim, float32
    extra: dict[str, Any] = {
        "load_async": is_async,
        "staging_bytes": 6 * block_bytes,
        "tenant_id": f"async-{is_async}",
    }
    prompts = [PROMPT, *OTHERS]
    with engine(model, connector(store, **extra)) as here:
        memory = memory_of(here)
        assert isinstance(memory, StagedMemory) and not memory.has_room(4, "load")
        computed = here.complete(*prompts)
        assert [one.token_ids for one in computed] == [one.token_ids for one in alone], device
        assert all(one.num_cached == 0 for one in computed)
        wait_for(here.is_at_rest, "saved blocks to be given back", 120.0)
        tokenizer = here.llm.get_tokenizer()
        num_blocks = [(len(tokenizer.encode(prompt)) - 1) // BLOCK_TOKENS for prompt in prompts]
        assert max(num_blocks) > 3, "more than half of the area has room for"
        here.forget()
        before = device.num_copies
        loaded = here.complete(*prompts)
        assert [one.token_ids for one in loaded] == [one.token_ids for one in alone], device
        assert [one.num_cached for one in loaded] == [count * BLOCK_TOKENS for count in num_blocks]
        assert device.num_copies > before
        assert here.metric("vllm:mooncake_connector_loaded_blocks") == sum(num_blocks)
        assert here.metric("vllm:mooncake_connector_failed_blocks") == 0
        assert here.metric("vllm:mooncake_connector_unsaved_blocks") == 0
        wait_for(here.is_at_rest, "saved blocks to be given back", 120.0)
        assert memory.has_room(3, "load") and memory.has_room(3, "save")
