# SPDX-License-Identifier: Apache-2.0
"""Handoff of a prompt's KV from the engine that computes it to the one that decodes: both request bodies.

Owns the bodies of both requests, for each protocol by which connectors of engines transfer KV:

``pool``        both share a store: prefill makes one token, then decode the answer; nothing else
``sequential``  the ``kv_transfer_params`` of prefill's answer tell decode where to read (NIXL; our workers)
``push``        both are called at the same time with one ``transfer_id``; prefill writes into decode's blocks
``bootstrap``   the same for vLLM's own MooncakeConnector, whose decode queries prefill's bootstrap server

It sends nothing, and knows neither which engines were chosen nor why.

A client's transfer fields never reach an engine: ``kv_transfer_params`` name hosts that an engine would
connect to, and blocks of other requests. ``without_transfers`` removes such fields; for clients that are
trusted by a setting, the fields that name neither a host nor a transfer stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mooncake.gateway.engine_apis import MESSAGES, RESPONSES, EngineApi

Protocol = Literal["auto", "workers", "pool", "sequential", "push", "bootstrap"]

_ONLY_FOR_DECODE = ("stream_options", "n", "best_of", "min_tokens", "logprobs", "top_logprobs", "echo")

_OF_TRANSFERS = ("data_parallel_rank", "routed_dp_rank")
"""Fields of a body that name the rank that has a prompt's blocks, beside those below."""

_OF_TRANSFERS_BEGIN = ("bootstrap_", "disagg_")
"""Prefixes of fields by which SGLang's engines learn of the other side."""

_OF_TRANSFERS_END = "_transfer_params"
"""Suffix of vLLM's fields for transfers of KV and of encoder outputs."""

_NEVER_OF_CLIENTS = ("transfer_id", "push_from", "tp_size", "dp_rank", "data_parallel_rank")
"""Keys of ``kv_transfer_params`` that only the gateway sets, beside those with the prefixes below."""

_NEVER_BEGINNINGS = ("remote_", "do_remote_")

Params = dict[str, Any]


def without_transfers(request: Mapping[str, Any], are_trusted: bool) -> dict[str, Any]:
    """``request`` without a client's fields for transfers between engines."""
    body = {name: value for name, value in request.items() if not _is_of_transfers(name)}
    given = request.get("kv_transfer_params")
    if are_trusted and isinstance(given, Mapping):
        kept = {name: value for name, value in given.items() if not _is_ours(name)}
        if kept:
            body["kv_transfer_params"] = kept
    more = body.get("vllm_xargs")
    if isinstance(more, Mapping) and any(map(_is_of_transfers, more)):
        # vLLM merges these into the same parameters.
        body["vllm_xargs"] = {name: value for name, value in more.items() if not _is_of_transfers(name)}
    return body


def _is_of_transfers(name: str) -> bool:
    return name in _OF_TRANSFERS or name.startswith(_OF_TRANSFERS_BEGIN) or name.endswith(_OF_TRANSFERS_END)


def _is_ours(name: str) -> bool:
    return name in _NEVER_OF_CLIENTS or name.startswith(_NEVER_BEGINNINGS)


@dataclass(frozen=True)
class EngineEndpoint:
    """One engine, as the other side of a transfer needs to know it."""

    host: str
    port: int | None = None
    "Port of its connector: for others' transfers, or of its bootstrap server."
    engine_id: str = ""
    rank: int | None = None
    "Data-parallel rank that computes."


@dataclass(frozen=True)
class Handoff:
    """The transfer parameters of both engines."""

    prefill: Params
    decode: Params | None
    "None: those in prefill's answer."

    @property
    def is_concurrent(self) -> bool:
        """Whether both are called at the same time."""
        return bool(self.decode)


def make_handoff(
    protocol: Protocol, transfer_id: str, prefill: EngineEndpoint, decode: EngineEndpoint
) -> Handoff:
    """Make the parameters for one prompt's KV from ``prefill`` to ``decode``."""
    if protocol == "pool":
        return Handoff({}, {})
    sends = {"do_remote_decode": True, "do_remote_prefill": False}
    receives = {"do_remote_decode": False, "do_remote_prefill": True}
    if protocol == "sequential":
        unknown = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        return Handoff({**sends, **unknown}, None)
    name = {"transfer_id": transfer_id}
    if protocol == "push":
        return Handoff({**sends, **name, **_address(decode)}, {**receives, **name, **_address(prefill)})
    bootstrap = {
        "remote_bootstrap_addr": f"http://{prefill.host}:{prefill.port}",
        "remote_engine_id": prefill.engine_id,
    }
    return Handoff({**sends, **name}, {**receives, **name, **bootstrap})


def _address(side: EngineEndpoint) -> Params:
    return {} if side.port is None else {"remote_host": side.host, "remote_port": side.port}


def supports(protocol: Protocol, api: EngineApi, request: Mapping[str, Any]) -> bool:
    """Whether two engines can serve this request: a transfer moves one sequence, to one reader.

    A conversation that one engine stores, and tools that it calls by itself, are known to no other engine.
    """
    if request.get("previous_response_id") or any(map(_is_called_by_engine, _list(request.get("tools")))):
        return False
    if request.get("prompt_logprobs") is not None or request.get("echo"):
        return False  # an engine computes a whole prompt whose log probabilities it returns, or may return
    if protocol == "pool":
        # vLLM refuses a budget for thinking above the limit of one token, except beside a transfer.
        thinking = request.get("thinking")
        return not (isinstance(thinking, Mapping) and thinking.get("budget_tokens"))
    return api.num_answers(request) == 1


def _is_called_by_engine(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type", "function") not in ("function", "custom")


def _list(found: object) -> list[Any]:
    return found if isinstance(found, list) else []


def prefill_body(api: EngineApi, request: Mapping[str, Any], params: Params) -> dict[str, Any]:
    """``request``, changed so that only its prompt is computed."""
    body = {name: value for name, value in request.items() if name not in _ONLY_FOR_DECODE}
    body |= {"stream": False, api.limits[-1]: 1}
    body |= {name: 1 for name in api.limits if name in body}
    if api is RESPONSES:
        body["store"] = False  # engines store responses unless they are asked not to
    choice = body.get("tool_choice")
    if api is MESSAGES and isinstance(choice, Mapping) and choice.get("type") == "tool":
        # vLLM decodes a chosen tool's arguments, and one token of them is no JSON. The prompt is the same.
        body["tool_choice"] = {**choice, "type": "auto"}
    return _with(body, params)


def decode_body(request: Mapping[str, Any], params: Params) -> dict[str, Any]:
    """``request`` with the transfer parameters of the prompt's KV."""
    return _with(dict(request), params)


def _with(body: dict[str, Any], params: Params) -> dict[str, Any]:
    if params:
        body["kv_transfer_params"] = {**(body.get("kv_transfer_params") or {}), **params}
    return body
