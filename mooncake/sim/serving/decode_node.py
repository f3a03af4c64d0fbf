# SPDX-License-Identifier: Apache-2.0
"""A simulated decode instance: which requests are in its batch, wait for memory, or leave.

It owns the account of its memory and refuses to know where the KV came from. A request takes memory for its
prompt and its whole answer when it joins, so that none is preempted; one that finds none waits in order of
arrival. Between joins and leaves there are no events (``decode_batch.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from mooncake.sim.kernel import Kernel
from mooncake.sim.serving.decode_batch import DecodeBatch
from mooncake.sim.serving.fabric import Port
from mooncake.sim.serving.node_costs import NodeCosts
from mooncake.sim.serving.sim_request import SimRequest


class DecodeNode:
    """``done(request, at)`` is called for every complete answer, ``stepped(node)`` repeatedly."""

    def __init__(
        self,
        kernel: Kernel,
        number: int,
        costs: NodeCosts,
        *,
        max_batch: int,
        done: Callable[[SimRequest, float], None],
        stepped: Callable[[str, DecodeBatch], None],
    ) -> None:
        self.number = number
        self.id = f"decode-{number}"
        self.into = Port(f"{self.id} in", costs.nic_bytes_per_s)
        self.batch = DecodeBatch(costs.decode)
        self.used_tokens = 0
        self._kernel = kernel
        self._capacity_tokens = costs.device_tokens
        self._max_batch = max_batch
        self._waiting: deque[SimRequest] = deque()
        self._version = 0
        self._done, self._stepped = done, stepped

    def __repr__(self) -> str:
        return f"DecodeNode({self.id} batch={len(self.batch)} waiting={len(self._waiting)})"

    @property
    def is_idle(self) -> bool:
        return not self.batch and not self.used_tokens and not self._waiting

    def takes(self, request: SimRequest) -> bool:
        """Whether the request could ever fit."""
        return request.num_input + request.num_output <= self._capacity_tokens

    def join(self, request: SimRequest) -> None:
        """The KV of a request has arrived: it decodes from the next step on."""
        self._waiting.append(request)
        batch = self.batch
        if batch:
            num_steps = batch.steps_until(self._kernel.now)
            if num_steps >= batch.next_leave or not self._has_room(self._waiting[0]):
                return  # a request that leaves lets it in
            batch.advance(num_steps)
        self._admit()

    def _has_room(self, request: SimRequest) -> bool:
        needed = request.num_input + request.num_output
        return self.used_tokens + needed <= self._capacity_tokens and len(self.batch) < self._max_batch

    def _admit(self) -> None:
        batch, waiting = self.batch, self._waiting
        if not batch:
            batch.at = max(batch.at, self._kernel.now)
        while waiting and self._has_room(waiting[0]):
            request = waiting.popleft()
            self.used_tokens += request.num_input + request.num_output
            batch.join(request)
        self._version += 1
        if batch:
            at = batch.at + batch.seconds(batch.next_leave)
            self._kernel.call_at(at, self._leave, self._version)

    def _leave(self, version: int) -> None:
        if version != self._version:
            return
        batch = self.batch
        self._stepped(self.id, batch)
        batch.advance(batch.next_leave)
        done = batch.leave()
        for request in done:
            self.used_tokens -= request.num_input + request.num_output
        self._admit()
        for request in done:
            self._done(request, batch.at)
