# SPDX-License-Identifier: Apache-2.0
"""Only the gateway sets engines' transfer parameters, whatever a client sends."""

from __future__ import annotations

import pytest

from mooncake.gateway.engine_apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, EngineApi
from mooncake.gateway.handoff import (
    EngineEndpoint,
    Protocol,
    decode_body,
    make_handoff,
    prefill_body,
    supports,
    without_transfers,
)
from tests.gateway.test_any_engine import HOSTILE

REQUEST = {"prompt": "p", "kv_transfer_params": {**HOSTILE, "kept": 1}}


def test_a_client_s_transfer_is_dropped() -> None:
    assert without_transfers(REQUEST, are_trusted=False) == {"prompt": "p"}
    assert without_transfers({"prompt": "p"}, are_trusted=False) == {"prompt": "p"}
    assert REQUEST["kv_transfer_params"]["remote_port"] == 666, "it is not modified"  # type: ignore[index]


def test_a_trusted_client_names_neither_a_host_nor_a_transfer() -> None:
    assert without_transfers(REQUEST, are_trusted=True) == {"prompt": "p", "kv_transfer_params": {"kept": 1}}
    assert without_transfers({"kv_transfer_params": HOSTILE}, are_trusted=True) == {}


@pytest.mark.parametrize("are_trusted", [False, True])
def test_equivalent_fields_are_dropped_too(are_trusted: bool) -> None:
    request = {
        "prompt": "p",
        "bootstrap_host": "10.6.6.6",
        "bootstrap_port": 666,
        "bootstrap_room": 1,
        "bootstrap_pair_key": "k",
        "disagg_prefill_dp_rank": 1,
        "routed_dp_rank": 1,
        "data_parallel_rank": 1,
        "ec_transfer_params": HOSTILE,
        "vllm_xargs": {"kv_transfer_params": HOSTILE, "ec_transfer_params": HOSTILE, "a": 1},
    }
    assert without_transfers(request, are_trusted) == {"prompt": "p", "vllm_xargs": {"a": 1}}


@pytest.mark.parametrize("port", [None, 8998])
@pytest.mark.parametrize("protocol", ["pool", "sequential", "push", "bootstrap"])
def test_no_protocol_leaves_an_address_of_a_client_in_a_body(protocol: Protocol, port: int | None) -> None:
    request = without_transfers(REQUEST, are_trusted=True)
    handoff = make_handoff(protocol, "t", EngineEndpoint("p", port), EngineEndpoint("d", port))
    bodies = prefill_body(COMPLETIONS, request, handoff.prefill), decode_body(request, handoff.decode or {})
    for body in bodies:
        found = body.get("kv_transfer_params", {})
        assert found.get("kept") == 1
        assert found.get("transfer_id") in (None, "t")
        assert "10.6.6.6" not in str(found)


@pytest.mark.parametrize(
    ("api", "request_body", "is_supported"),
    [
        (COMPLETIONS, {"prompt": "p"}, True),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, True),
        (COMPLETIONS, {"prompt": ["p"], "n": 1}, True),
        (COMPLETIONS, {"prompt": ["p", "q"]}, False),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, False),
        (COMPLETIONS, {"prompt": "p", "n": 2}, False),
        (COMPLETIONS, {"prompt": "p", "prompt_embeds": "e"}, False),
        (CHAT, {"messages": ["m", "m"], "prompt": ["p", "q"]}, True),
        (CHAT, {"messages": ["m"], "n": 2}, False),
        (MESSAGES, {"messages": ["m"], "prompt": ["p", "q"]}, True),
        (RESPONSES, {"input": ["i", "j"], "prompt": ["p", "q"]}, True),
    ],
)
def test_two_engines_serve_one_sequence(
    api: EngineApi, request_body: dict[str, object], is_supported: bool
) -> None:
    assert supports("sequential", api, request_body) is is_supported
    assert supports("pool", api, request_body), "each engine of a pool finds the blocks by itself"


@pytest.mark.parametrize(
    "fields",
    [{"prompt_logprobs": 0}, {"echo": True, "logprobs": 0}],
)
@pytest.mark.parametrize("protocol", ["pool", "push"])
def test_a_prompt_whose_log_probabilities_are_wanted_goes_to_one_engine(
    protocol: Protocol, fields: dict[str, object]
) -> None:
    """vLLM computes the whole prompt for them, whatever it could load."""
    assert not supports(protocol, COMPLETIONS, {"prompt": "p", **fields})
    assert supports(protocol, COMPLETIONS, {"prompt": "p", "logprobs": 1, "echo": False})


def test_a_chosen_tool_is_left_to_decode() -> None:
    """vLLM decodes the arguments of a message's chosen tool, and fails if one token is all of them."""
    request = {"messages": ["m"], "tools": [{"name": "f"}], "tool_choice": {"type": "tool", "name": "f"}}
    assert prefill_body(MESSAGES, request, {})["tool_choice"]["type"] == "auto"
    assert prefill_body(MESSAGES, {**request, "tool_choice": {"type": "any"}}, {})["tool_choice"] == {
        "type": "any"
    }
    assert decode_body(request, {})["tool_choice"] == request["tool_choice"]


def test_only_responses_are_not_stored_by_the_engine_that_computes_the_prompt() -> None:
    request = {"messages": ["m"], "input": "i", "prompt": "p"}
    stored = {api.path: prefill_body(api, request, {}).get("store") for api in (CHAT, MESSAGES, RESPONSES)}
    assert stored == {CHAT.path: None, MESSAGES.path: None, RESPONSES.path: False}
