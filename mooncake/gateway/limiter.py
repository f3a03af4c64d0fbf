# SPDX-License-Identifier: Apache-2.0
"""The limit on concurrent answers, and the time to retry when it is reached.

Owns the count and the pause, which follows from the duration of answers. It is apart from the conductor's
limits: this one protects the gateway's process, those protect the workers.
"""

from __future__ import annotations

import asyncio

from prometheus_client import Gauge

from mooncake import metrics
from mooncake.gateway.clients import Client
from mooncake.http.openai import ApiError, gateway_stopping

_in_flight = Gauge(
    "mooncake_gateway_requests_in_flight",
    "Answers in progress, one per prompt and choice.",
    registry=metrics.registry,
)


class Permit:
    """A request's share of the limit and of its client's quota, until ``leave``."""

    def __init__(
        self, limiter: ConcurrencyLimiter, client: Client | None, num_answers: int, now: float
    ) -> None:
        """Raises ApiError as ``ConcurrencyLimiter.enter`` does, or because of the client's quota."""
        self._limiter, self._client, self._num_answers, self._began = limiter, client, num_answers, now
        limiter.enter(num_answers)
        if client is not None:
            try:
                client.enter(num_answers, now)
            except BaseException:
                limiter.leave(num_answers, 0.0)
                raise
        self._is_inside = True

    def leave(self, now: float) -> None:
        """Release the share; repeated calls have no effect."""
        if not self._is_inside:
            return
        self._is_inside = False
        self._limiter.leave(self._num_answers, now - self._began)
        if self._client is not None:
            self._client.leave(self._num_answers)


class ConcurrencyLimiter:
    """Admits up to ``limit`` answers at a time, and none after ``stop``."""

    def __init__(self, limit: int) -> None:
        self.num_in_flight = 0
        self.is_stopping = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._limit = limit
        self._mean_duration_s = 1.0

    def enter(self, num_answers: int) -> None:
        """Admit a request for ``num_answers`` answers.

        Raises:
            ApiError: 400 when it never fits, 429 with the time until enough are expected to have ended,
                503 after ``stop``.
        """
        if self.is_stopping:
            raise gateway_stopping()
        if num_answers > self._limit:
            message = f"the request asks for {num_answers} answers; allowed: at most {self._limit}"
            raise ApiError(400, message, param="n", code="invalid_value")
        num_missing = self.num_in_flight + num_answers - self._limit
        if num_missing > 0:
            # At the limit, answers end at a rate of limit / mean duration.
            wait_s = num_missing * self._mean_duration_s / self._limit
            message = (
                f"the gateway has {self.num_in_flight} answers in progress, at most {self._limit} are allowed"
            )
            raise ApiError(429, message, code="overloaded", retry_after_s=wait_s)
        self.num_in_flight += num_answers
        self._is_empty.clear()
        _in_flight.set(self.num_in_flight)

    def leave(self, num_answers: int, duration_s: float) -> None:
        """Record the end of an admitted request."""
        self.num_in_flight -= num_answers
        assert self.num_in_flight >= 0
        if not self.num_in_flight:
            self._is_empty.set()
        self._mean_duration_s += 0.1 * (duration_s - self._mean_duration_s)
        _in_flight.set(self.num_in_flight)

    def stop(self) -> None:
        """Admit no more answers. Those in progress go on."""
        self.is_stopping = True

    async def wait_until_empty(self) -> None:
        await self._is_empty.wait()
