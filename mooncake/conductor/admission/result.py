# SPDX-License-Identifier: Apache-2.0
"""Requests to admission and its results, as numbers and as text.

Owns the data types and the texts of refusals, so that every rule words the same reason in the same way. It
decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mooncake.conductor.admission.decode_forecast import DecodeLoad
from mooncake.conductor.prediction import DecodeModel

CODES = ("slo_ttft", "slo_tbt", "overload")
"""Why requests are rejected."""

SOONEST_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A request to be decided, with its predicted times on the best pair of instances."""

    request_id: str
    num_tokens: int
    queue_s: float
    prefill_s: float
    "Seconds that its prompt takes on the prefill instance."
    ttft_s: float
    tbt_s: float
    output_tokens: int = 0
    slo_ttft_s: float = 0.0
    "0: none."
    slo_tbt_s: float = 0.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """The instances of both pools; ``step`` models a decode instance's step, ``kv_tokens`` is its memory."""

    num_prefill: int
    num_decode: int
    step: DecodeModel
    kv_tokens: float = math.inf

    def step_s(self, load: DecodeLoad, one_more: AdmissionRequest | None = None) -> float:
        """Seconds of a step when the load (and one more request) is spread evenly."""
        num_requests, num_tokens = load.num_requests, load.num_tokens
        if one_more is not None:
            num_requests, num_tokens = num_requests + 1, num_tokens + one_more.num_tokens
        # No request decodes in half a batch: an average below 1 is a batch of 1.
        share = max(1, min(self.num_decode, num_requests))
        return self.step.seconds(num_requests / share, num_tokens / share)

    def memory_load(self, load: DecodeLoad, one_more: AdmissionRequest) -> float:
        """The part of the decode instances' memory that the contexts take."""
        return (load.num_tokens + one_more.num_tokens) / (max(1, self.num_decode) * self.kv_tokens)

    def whole_memory_load(self, load: DecodeLoad, one_more: AdmissionRequest) -> float:
        """The part of an instance's memory that is taken with this request in it: its context can't be spread
        over several, and every request needs room for its answer, too."""
        answer = one_more.output_tokens
        each = (load.num_tokens + load.num_requests * answer) / max(1, self.num_decode)
        return (each + one_more.num_tokens + answer) / self.kv_tokens

    def most_requests(self, load: DecodeLoad, step_s: float) -> float:
        """How many requests with contexts like those in ``load`` fit, and keep a step that short."""
        mean_tokens = load.num_tokens / max(1, load.num_requests)
        in_time = max(0.0, step_s - self.step.base_s) / max(1e-9, self.added_s(mean_tokens))
        return self.num_decode * min(in_time, self.kv_tokens / max(1.0, mean_tokens))

    def added_s(self, context_tokens: float) -> float:
        """Seconds that a request adds to every step."""
        return self.step.per_request_s + self.step.per_token_s * context_tokens


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """The result. The loads are expected ones, as parts of what the SLOs allow."""

    is_admitted: bool
    code: str = "admitted"
    reason: str = ""
    retry_after_s: float = 0.0
    prefill_load: float = 0.0
    decode_load: float = 0.0
    tbt_room_s: float = 0.0
    "Seconds by which its steps may exceed those of an empty pool, if later results are right; 0: not given."
    is_audited: bool = False
    "It was rejected, and is admitted to check whether that was right."


def too_late(request: AdmissionRequest, late_s: float = 0.0) -> AdmissionResult:
    """The rejection for a TTFT SLO that can't be met; ``late_s``: how much later than predicted it may be."""
    over_s = request.ttft_s + late_s - request.slo_ttft_s
    reason = (
        f"its first token would come after {request.ttft_s:.3g} s (queue {request.queue_s:.3g} s, prompt "
        f"{request.prefill_s:.3g} s), its TTFT SLO is {request.slo_ttft_s:.3g} s"
    )
    if late_s:
        reason += f", and predictions may be {late_s:.3g} s short"
    if over_s > request.queue_s:
        # An empty queue is the most that waiting can bring.
        reason += "; it could not be met even without a queue"
    wait_s = max(SOONEST_RETRY_S, min(over_s, request.queue_s))
    return AdmissionResult(False, "slo_ttft", reason, wait_s, request.ttft_s / request.slo_ttft_s)


def decode_full(
    num_requests: int, slo_tbt_s: float, step_s: float, memory_load: float, wait_s: float, when: str
) -> AdmissionResult:
    """The rejection for a TBT SLO that can't be met; without memory, a request waits amid its answer."""
    reason = (
        f"{num_requests} requests {when}, a step with it would take {step_s * 1000:.3g} ms, its TBT SLO is "
        f"{slo_tbt_s * 1000:.3g} ms"
    )
    if memory_load > 1.0:
        reason += f"; with it they would need {memory_load:.0%} of the decode instances' memory"
    wait_s = max(SOONEST_RETRY_S, wait_s)
    return AdmissionResult(False, "slo_tbt", reason, wait_s, decode_load=max(step_s / slo_tbt_s, memory_load))


def too_expensive(
    resource: str, cost_s: float, most_s: float, demand_rate: float, capacity: int, wait_s: float
) -> AdmissionResult:
    """The rejection of a request that is worth less than what it would displace."""
    reason = (
        f"overload: it would take {cost_s:.3g} s of the {resource} instances, and at most {most_s:.3g} s are "
        f"given now to a request of its priority ({demand_rate:.3g} s are demanded per second, there are "
        f"{capacity})"
    )
    return AdmissionResult(False, "overload", reason, max(SOONEST_RETRY_S, wait_s))
