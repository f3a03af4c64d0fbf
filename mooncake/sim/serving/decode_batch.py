# SPDX-License-Identifier: Apache-2.0
"""Continuous batching in closed form: a decoding instance between two changes of its batch.

It owns the arithmetic of steps and refuses to know queues, memory and events. A step takes ``base +
per_request * batch + per_token * context``; the context grows by the batch with every step, so n steps are a
quadratic in n, and neither a step nor a token needs an event of its own. A request's intervals are kept as
runs (how many steps, how long each on average) from which the mean of its longest ones is read when it ends.

    at                                                    a change at ``now`` takes effect
    ├──────┼──────┼───────┼───────┼───────┤               at the end of the step it falls into
                              now ┘
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from mooncake.conductor.prediction import DecodeModel
from mooncake.sim.serving.sim_request import SimRequest

RUNS_KEPT = 2048
"""Number of runs after which those that no request needs are dropped."""

RUN_SPREAD = 0.02
RUN_PARTS = 8
"""A run whose steps differ by more than that share of their mean is split into this many."""

IntervalRun = tuple[int, float]
"""``num`` intervals of ``seconds`` each. With ``num`` 0, the next interval is longer by ``seconds``."""


class DecodeBatch:
    """The requests that one instance decodes, at the end of its step number ``step``."""

    __slots__ = ("at", "context", "dropped", "extra_growth_s", "extra_s", "leaving", "model", "runs", "step")

    def __init__(self, model: DecodeModel) -> None:
        self.model = model
        self.at = 0.0
        """When its last step ended (in the future while one is under way)."""
        self.step = 0
        self.context = 0
        """Tokens of all requests in the batch."""
        self.leaving: list[tuple[int, int, SimRequest]] = []
        """A heap of (step after which it ends, number, request)."""
        self.extra_s = 0.0
        """How much a chunk of a prompt lengthens the next step, and every later one more."""
        self.extra_growth_s = 0.0
        self.runs: list[IntervalRun] = []
        self.dropped = 0
        """Number of runs that were dropped before the first in ``runs``."""

    def __len__(self) -> int:
        return len(self.leaving)

    def seconds(self, num_steps: int) -> float:
        """How long the next ``num_steps`` steps take."""
        model, size = self.model, len(self.leaving)
        first = model.base_s + model.per_request_s * size + model.per_token_s * self.context + self.extra_s
        growth = model.per_token_s * size + self.extra_growth_s
        return num_steps * (first + growth * (num_steps - 1) / 2)

    def steps_until(self, now: float) -> int:
        """How many steps end before ``now``, including the one under way."""
        elapsed = now - self.at
        if elapsed <= 0:
            return 0
        model, size = self.model, len(self.leaving)
        growth = model.per_token_s * size + self.extra_growth_s
        first = model.base_s + model.per_request_s * size + model.per_token_s * self.context + self.extra_s
        b = first - growth / 2
        return math.ceil(2 * elapsed / (b + math.sqrt(b * b + 2 * growth * elapsed)) - 1e-9)

    def advance(self, num_steps: int) -> None:
        if num_steps:
            seconds = self.seconds(num_steps)
            if self.extra_growth_s * num_steps * num_steps > RUN_SPREAD * seconds:
                self._add_uneven(num_steps)
            else:
                self.runs.append((num_steps, seconds / num_steps))
            self.at += seconds
            self.step += num_steps
            self.context += num_steps * len(self.leaving)
            self.extra_s += num_steps * self.extra_growth_s

    def _add_uneven(self, num_steps: int) -> None:
        """The last steps take noticeably longer than the first: add several runs instead of one."""
        begun, begun_s = 0, 0.0
        for part in range(1, RUN_PARTS + 1):
            end = num_steps * part // RUN_PARTS
            if end > begun:
                end_s = self.seconds(end)
                self.runs.append((end - begun, (end_s - begun_s) / (end - begun)))
                begun, begun_s = end, end_s

    def pause(self, seconds: float) -> None:
        """No request in the batch gets a token for so long."""
        self.runs.append((0, seconds))
        self.at += seconds

    @property
    def next_leave(self) -> int:
        """Steps until the next request ends. The batch must not be empty."""
        return self.leaving[0][0] - self.step

    def join(self, request: SimRequest) -> None:
        """Add a request that has its first token and gets the second with the next step."""
        request.first_run = self.dropped + len(self.runs)
        request.wait_s = self.at - request.first_token_at
        self.context += request.num_input + 1
        heapq.heappush(self.leaving, (self.step + request.num_output - 1, request.number, request))

    def leave(self) -> list[SimRequest]:
        """Remove the requests that are complete."""
        done: list[SimRequest] = []
        while self.leaving and self.leaving[0][0] <= self.step:
            request = heapq.heappop(self.leaving)[2]
            self.context -= request.num_input + request.num_output
            request.tbt_s = longest_mean(
                self.runs[request.first_run - self.dropped :], request.wait_s, request.num_output - 1
            )
            done.append(request)
        if done:
            self._drop_runs()
        return done

    def _drop_runs(self) -> None:
        if not self.leaving:
            oldest = self.dropped + len(self.runs)
        elif len(self.runs) > RUNS_KEPT:
            oldest = min(entry[2].first_run for entry in self.leaving)
        else:
            return
        del self.runs[: oldest - self.dropped]
        self.dropped = oldest


def longest_mean(runs: Iterable[IntervalRun], wait_s: float, num_intervals: int, share: float = 0.1) -> float:
    """Mean of the longest ``share`` of the intervals; the first one is longer by ``wait_s``."""
    pieces: list[tuple[float, int]] = []
    longer_s = wait_s
    for count, seconds in runs:
        if not count:
            longer_s += seconds
        elif longer_s > 0:
            pieces.append((seconds + longer_s, 1))
            if count > 1:
                pieces.append((seconds, count - 1))
            longer_s = 0.0
        else:
            pieces.append((seconds, count))
    pieces.sort(reverse=True)
    wanted = left = math.ceil(num_intervals * share)
    total_s = 0.0
    for seconds, count in pieces:
        taken = min(count, left)
        total_s += taken * seconds
        left -= taken
        if not left:
            break
    return total_s / wanted if wanted else 0.0
