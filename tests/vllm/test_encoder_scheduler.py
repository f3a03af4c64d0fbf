# SPDX-License-Identifier: Apache-2.0
"""The scheduler's side of ``MooncakeECConnector``: what it looks up, waits for and saves. No engine runs."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest

from mooncake.connectors.encoder_cache import EncoderCache
from mooncake.connectors.encoder_output import EncoderIdentity, Expectation
from mooncake.connectors.encoder_transfer import EncoderLookup

ITEM_TOKENS = 10


class RecordedLookups:
    """Stands for ``EncoderTransfer``: notes each lookup's content, and ends all of them as misses at once."""

    def __init__(self, is_slow: bool = False) -> None:
        self.contents: list[bytes] = []
        self._is_slow = is_slow

    def look_up(
        self,
        content: Callable[[], bytes],
        identity: EncoderIdentity,
        expected: Expectation,
        is_loaded: bool,
        done: Callable[[EncoderLookup], None],
    ) -> None:
        self.contents.append(content())
        if not self._is_slow:
            done(EncoderLookup("miss", self.contents[-1].hex(), None, "not in the store", 0.0))


class CountedWaits(SimpleQueue[Any]):
    """A queue that counts the calls that wait, which do not wait."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if timeout:
            self.num_waits += 1
        return self.get_nowait()


def a_side(is_slow: bool = False) -> Any:
    from mooncake.connectors.vllm.encoder_connector import EncoderPlans, EncoderSchedulerSide
    from mooncake.connectors.vllm.stats import EncoderStats

    side: Any = EncoderSchedulerSide.__new__(EncoderSchedulerSide)
    side._config = types.SimpleNamespace(
        model_config=types.SimpleNamespace(dtype="torch.float32"),
        ec_transfer_config=types.SimpleNamespace(mm_encoder_output_widths={"image": 8}),
    )
    side._loads = side._saves = True
    side._transfer = RecordedLookups(is_slow)
    side.cache = EncoderCache(60.0, 1 << 20)
    side.stats, side.failed = EncoderStats(), set()
    side._facts, side._generation, side._has_tower_adapters = {}, "", False
    side._placeholders = types.SimpleNamespace(fields_for=lambda modality: set())
    side._ended = CountedWaits()
    side._plans = EncoderPlans({}, {})
    side._may_wait, side._knows_handles = True, False
    return side


def data(**fields: Any) -> dict[str, Any]:
    return {name: types.SimpleNamespace(data=value) for name, value in fields.items()}


def a_request(name: str, *items: tuple[str, Any]) -> Any:
    request = types.SimpleNamespace(request_id=name, mm_features=[], lora_request=None, cache_salt=None)
    for item in items:
        append(request, *item)
    return request


def append(request: Any, identifier: str, content: Any) -> None:
    position = types.SimpleNamespace(
        offset=len(request.mm_features) * ITEM_TOKENS, length=ITEM_TOKENS, get_num_embeds=lambda: ITEM_TOKENS
    )
    request.mm_features.append(
        types.SimpleNamespace(identifier=identifier, data=content, modality="image", mm_position=position)
    )


def end_step(side: Any) -> Any:
    return side.plans(types.SimpleNamespace(free_encoder_mm_hashes=[]))


def saved_by(side: Any, request: Any, index: int = 0) -> dict[str, str]:
    """The names that the ranks save when this item is computed, with their keys."""
    side.allocated(request, index)
    saved: dict[str, str] = end_step(side).save_keys
    return saved


def test_two_contents_of_one_name_are_neither_looked_up_nor_saved() -> None:
    side = a_side()
    request = a_request("r", ("cat", data(pixels=1)), ("cat", data(pixels=2)), ("dog", data(pixels=3)))
    assert side.is_ready(request, 0)
    assert len(side._transfer.contents) == 1, "the dog's"
    assert saved_by(side, request, 0) == {} and set(saved_by(side, request, 2)) == {"dog"}


def test_one_content_in_two_places_is_looked_up_once_and_saved() -> None:
    side, image = a_side(), data(pixels=1)
    request = a_request("r", ("cat", image), ("cat", image))
    assert side.is_ready(request, 0) and len(side._transfer.contents) == 1
    assert saved_by(side, request) == {"cat": side._transfer.contents[0].hex()}


def test_a_content_that_is_computed_already_counts_as_well() -> None:
    side = a_side()
    request = a_request("r", ("cat", data(pixels=1)), ("cat", data(pixels=2)))
    assert side.is_ready(request, ITEM_TOKENS) and side._transfer.contents == []
    assert saved_by(side, request, 1) == {}


def test_an_item_that_a_session_gets_later_is_not_saved_under_the_key_of_an_earlier_one() -> None:
    side = a_side()
    request = a_request("r", ("cat", data(pixels=1)))
    assert side.is_ready(request, 0) and len(side._transfer.contents) == 1
    append(request, "cat", data(pixels=2))
    assert side.is_ready(request, ITEM_TOKENS)
    assert saved_by(side, request, 1) == {}


def test_the_last_allocation_of_a_name_in_a_step_decides_what_is_saved() -> None:
    side = a_side()
    first = a_request("first", ("cat", data(pixels=1)))
    second = a_request("second", ("cat", data(pixels=2)), ("cat", data(pixels=3)))
    assert side.is_ready(first, 0) and side.is_ready(second, 0)
    side.allocated(first, 0)
    assert saved_by(side, second) == {}, "vLLM preempted the first one and encodes the second one's"


def test_a_step_waits_once_for_all_requests_whose_lookups_are_in_progress() -> None:
    side = a_side(is_slow=True)
    requests = [a_request(str(number), ("cat", data(pixels=number))) for number in range(5)]
    for num_steps in (1, 2):
        assert not any(side.is_ready(request, 0) for request in requests)
        assert side._ended.num_waits == num_steps
        end_step(side)


def test_a_handle_in_shared_memory_names_no_content(caplog: pytest.LogCaptureFixture) -> None:
    side = a_side()
    handle = {"address": 64, "monotonic_id": 7, "signature": [1, 2]}
    request = a_request("r", ("cat", data(**handle)), ("dog", data(**handle)), ("cow", data(pixels=1)))
    with caplog.at_level(logging.WARNING):
        assert side.is_ready(request, 0) and side.is_ready(request, 0)
    assert len(side._transfer.contents) == 1, "the cow's, which was too large for shared memory"
    assert [saved_by(side, request, index).keys() for index in range(3)] == [set(), set(), {"cow"}]
    logged: list[Any] = [one for one in caplog.records if one.message == "encoder_input_in_shared_memory"]
    assert len(logged) == 1 and "--mm-processor-cache-type lru" in logged[0].fields["remedy"]
