"""What admission is asked and what it answers, in numbers and in words.

Owns the shapes and the sentences of refusals, so that every rule says the same thing in the same words. It
decides nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mooncake.conductor.admission.decode_forecast import DecodeLoad
from mooncake.conductor.prediction.cost_models import DecodeModel

CODES = ("slo_ttft", "slo_tbt", "overload")
"""Why requests are rejected."""

SOONEST_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class AdmissionRequest:
    """A request to be judged, with what is expected of it on the best pair of instances."""

    request_id: str
    num_tokens: int
    queue_s: float
    prefill_s: float
    "What its prompt takes of the prefill instance's time."
    ttft_s: float
    tbt_s: float
    output_tokens: int = 0
    slo_ttft_s: float = 0.0
    "0: none."
    slo_tbt_s: float = 0.0
    priority: int = 0


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """What there is to serve with; ``step`` is what a decode instance's step takes, ``kv_tokens`` what fits
    into its memory."""

    num_prefill: int
    num_decode: int
    step: DecodeModel
    kv_tokens: float = math.inf

    def step_s(self, load: DecodeLoad, one_more: AdmissionRequest | None = None) -> float:
        """A step when the load (and one more) is spread evenly."""
        num_requests, num_tokens = load.num_requests, load.num_tokens
        if one_more is not None:
            num_requests, num_tokens = num_requests + 1, num_tokens + one_more.num_tokens
        # Nobody decodes in half a batch: where there is one, there is a whole one.
        share = max(1, min(self.num_decode, num_requests))
        return self.step.seconds(num_requests / share, num_tokens / share)

    def memory_load(self, load: DecodeLoad, one_more: AdmissionRequest) -> float:
        """What part of the decode instances' memory the contexts take."""
        return (load.num_tokens + one_more.num_tokens) / (max(1, self.num_decode) * self.kv_tokens)

    def whole_memory_load(self, load: DecodeLoad, one_more: AdmissionRequest) -> float:
        """What part of an instance's memory is taken when this request is in it: its context can't be spread
        over several, and everybody needs room for an answer, too."""
        answer = one_more.output_tokens
        each = (load.num_tokens + load.num_requests * answer) / max(1, self.num_decode)
        return (each + one_more.num_tokens + answer) / self.kv_tokens

    def most_requests(self, load: DecodeLoad, step_s: float) -> float:
        """How many requests with contexts like those in ``load`` fit, and keep a step that short."""
        mean_tokens = load.num_tokens / max(1, load.num_requests)
        in_time = max(0.0, step_s - self.step.base_s) / max(1e-9, self.added_s(mean_tokens))
        return self.num_decode * min(in_time, self.kv_tokens / max(1.0, mean_tokens))

    def added_s(self, context_tokens: float) -> float:
        """By how much a request lengthens every step."""
        return self.step.per_request_s + self.step.per_token_s * context_tokens


@dataclass(frozen=True, slots=True)
class AdmissionResult:
    """The answer. The loads are what is expected, as parts of what the SLOs allow."""

    is_admitted: bool
    code: str = "admitted"
    reason: str = ""
    retry_after_s: float = 0.0
    prefill_load: float = 0.0
    decode_load: float = 0.0
    tbt_room_s: float = 0.0
    "By how much its steps may become longer than in an empty pool, if later verdicts are right; 0: not said."
    is_audited: bool = False
    "It was rejected, and is let in to see whether that was right."


def too_late(request: AdmissionRequest, late_s: float = 0.0) -> AdmissionResult:
    """The TTFT SLO can't be met; ``late_s``: by how much predictions may be short."""
    over_s = request.ttft_s + late_s - request.slo_ttft_s
    reason = (
        f"its first token would come after {request.ttft_s:.3g} s (queue {request.queue_s:.3g} s, prompt "
        f"{request.prefill_s:.3g} s), its TTFT SLO is {request.slo_ttft_s:.3g} s"
    )
    if late_s:
        reason += f", and predictions may be {late_s:.3g} s short"
    if over_s > request.queue_s:
        # An empty queue is the most that waiting can bring.
        reason += "; not even without a queue could it be met"
    wait_s = max(SOONEST_RETRY_S, min(over_s, request.queue_s))
    return AdmissionResult(False, "slo_ttft", reason, wait_s, request.ttft_s / request.slo_ttft_s)


def decode_full(
    num_requests: int, slo_tbt_s: float, step_s: float, memory_load: float, wait_s: float, when: str
) -> AdmissionResult:
    """The TBT SLO can't be met; a request that finds no memory waits in the middle of its answer."""
    reason = (
        f"{num_requests} requests {when}, a step with it would take {step_s * 1000:.3g} ms, its TBT SLO is "
        f"{slo_tbt_s * 1000:.3g} ms"
    )
    if memory_load > 1.0:
        reason += f"; with it they would need {memory_load:.0%} of the decode instances' memory"
    wait_s = max(SOONEST_RETRY_S, wait_s)
    return AdmissionResult(False, "slo_tbt", reason, wait_s, decode_load=max(step_s / slo_tbt_s, memory_load))


def too_expensive(
    resource: str, cost_s: float, most_s: float, asked_rate: float, capacity: int, wait_s: float
) -> AdmissionResult:
    """It is worth less than what it would push out."""
    reason = (
        f"overload: it would take {cost_s:.3g} s of the {resource} instances, and at most {most_s:.3g} s are "
        f"given now to a request of its priority ({asked_rate:.3g} s are asked for per second, there are "
        f"{capacity})"
    )
    return AdmissionResult(False, "overload", reason, max(SOONEST_RETRY_S, wait_s))
