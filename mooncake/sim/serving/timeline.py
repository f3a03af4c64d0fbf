# SPDX-License-Identifier: Apache-2.0
"""Samples of a run: queues, batches, hits, rejections, and where the most used blocks are.

It owns the counters that others move and the rows that become the timeline of the results.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mooncake.sim.kernel import Kernel
from mooncake.sim.serving.results import Recorder, Timeline
from mooncake.sim.serving.sim_request import SimRequest

if TYPE_CHECKING:
    from mooncake.sim.serving.cluster_base import ServingCluster


class TimelineSampler:
    def __init__(
        self,
        kernel: Kernel,
        recorder: Recorder,
        every_s: float,
        progress: Callable[[int, float], None] | None,
    ) -> None:
        self.num_open = 0
        """Number of requests that have arrived and not ended."""
        self.has_more = True
        """Whether more arrivals are to come."""
        self.num_running = 0
        self.num_rejected = 0
        self._kernel = kernel
        self._recorder = recorder
        self._every_s = every_s
        self._progress = progress
        self._queue_s = 0.0
        self._num_queued = 0
        self._input_tokens = 0
        self._cached_tokens = 0
        self._uses: Counter[int] = Counter()
        self._world: ServingCluster | None = None
        self._rows: list[tuple[float, ...]] = []

    def start(self, world: ServingCluster) -> None:
        self._world = world
        self._kernel.call_at(self._every_s, self._sample, None)

    def queued(self, request: SimRequest) -> None:
        self._queue_s += request.estimate_s
        self._num_queued += 1

    def began(self, request: SimRequest) -> None:
        self._queue_s -= request.estimate_s
        self._num_queued -= 1
        self._input_tokens += request.num_input
        self._cached_tokens += request.cached_tokens
        if self._world is not None and self._world.cluster.watches_blocks:
            self._uses.update(request.keys)

    def _sample(self, _: object) -> None:
        now, num_arrived = self._kernel.now, len(self._recorder)
        top10, top100 = self._replicas()
        self._rows.append(
            (
                now,
                max(0.0, self._queue_s),
                self._num_queued,
                self.num_running,
                num_arrived,
                self.num_rejected,
                self._input_tokens,
                self._cached_tokens,
                top10,
                top100,
            )
        )
        if self._progress is not None:
            self._progress(num_arrived, now)
        if self.num_open or self.has_more:
            self._kernel.call_at(now + self._every_s, self._sample, None)

    def _replicas(self) -> tuple[float, float]:
        if not self._uses or self._world is None:
            return 0.0, 0.0
        top = heapq.nlargest(100, self._uses, key=lambda key: (self._uses[key], -key))
        caches = self._world.caches()
        counts = [sum(bool(cache.match((key,))) for cache in caches) for key in top]
        return float(np.mean(counts[:10])), float(np.mean(counts))

    def time_line(self) -> Timeline:
        columns = np.array(self._rows, dtype=np.float64).reshape(-1, 10).T
        return Timeline(self._every_s, *columns)
