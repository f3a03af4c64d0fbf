# SPDX-License-Identifier: Apache-2.0
"""A load of agents: sessions whose prompts grow by their own answers, at a gateway before fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import aiohttp

LOWEST, HIGHEST = 1, 120
"""Tokens of prompts: bytes of plain text, which every tokenizer of the tests has."""


class Agents:
    """``num_sessions`` sessions side by side, each of so many turns."""

    def __init__(
        self,
        url: str,
        num_sessions: int,
        num_turns: int,
        *,
        shared_tokens: int = 160,
        turn_tokens: tuple[int, int] = (20, 120),
        answer_tokens: tuple[int, int] = (4, 24),
        mean_pause_s: float = 0.3,
        seed: int = 0,
    ) -> None:
        self._url, self._num_sessions, self._num_turns = url, num_sessions, num_turns
        self._turn_tokens, self._answer_tokens = turn_tokens, answer_tokens
        self._mean_pause_s = mean_pause_s
        self._seed = seed
        self._shared = self._tokens(Random(seed), shared_tokens)
        self.num_cached = self.num_input = 0
        """Sums over the answers' usage."""

    @staticmethod
    def _tokens(random: Random, num_tokens: int) -> list[int]:
        return [random.randint(LOWEST, HIGHEST) for _ in range(num_tokens)]

    async def run(self, num_at_once: int) -> None:
        """Run all sessions, so many at a time."""
        places = asyncio.Semaphore(num_at_once)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:

            async def one(number: int) -> None:
                async with places:
                    await self._session(http, number)

            await asyncio.gather(*(one(number) for number in range(self._num_sessions)))

    async def _session(self, http: aiohttp.ClientSession, number: int) -> None:
        random = Random(f"{self._seed} {number}")
        prompt = [*self._shared]
        for _ in range(self._num_turns):
            prompt += self._tokens(random, random.randint(*self._turn_tokens))
            prompt += await self._answer(
                http, prompt, f"session-{number}", random.randint(*self._answer_tokens)
            )
            await asyncio.sleep(random.expovariate(1 / self._mean_pause_s))

    async def _answer(
        self, http: aiohttp.ClientSession, prompt: list[int], session: str, num_tokens: int
    ) -> list[int]:
        body = {"prompt": prompt, "max_tokens": num_tokens, "return_token_ids": True, "ignore_eos": True}
        headers = {"X-Session-ID": session}
        async with http.post(f"{self._url}/v1/completions", json=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
        usage: dict[str, Any] = answer["usage"]
        self.num_input += usage["prompt_tokens"]
        self.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        found: list[int] = answer["choices"][0]["token_ids"]
        return found

    @property
    def hit_rate(self) -> float:
        return self.num_cached / max(1, self.num_input)


async def poisson(
    url: str,
    rate: float,
    seconds: float,
    *,
    prompt_tokens: tuple[int, int],
    answer_tokens: tuple[int, int],
    seed: int,
) -> AsyncIterator[dict[str, Any]]:
    """Send prompts of their own at random instants, whatever became of earlier ones; yield how each ended."""
    random, loop = Random(seed), asyncio.get_running_loop()
    began = loop.time()
    async with aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=300), connector=aiohttp.TCPConnector(limit=0)
    ) as http:

        async def one(prompt: list[int], num_tokens: int) -> dict[str, Any]:
            sent, times = loop.time(), list[float]()
            body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
            async with http.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        times.append(loop.time() - sent)
            steps = max(1, len(times) - 1)
            return {"ttft_s": times[0], "tbt_s": (times[-1] - times[0]) / steps, "e2e_s": times[-1]}

        pending, at = [], 0.0
        while (at := at + random.expovariate(rate)) < seconds:
            length = random.randint(*prompt_tokens)
            prompt = [random.randint(LOWEST, HIGHEST) for _ in range(length)]
            num_tokens = random.randint(*answer_tokens)
            await asyncio.sleep(max(0.0, began + at - loop.time()))
            pending.append(asyncio.ensure_future(one(prompt, num_tokens)))
        for each in pending:
            yield await each
