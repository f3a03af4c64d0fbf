# SPDX-License-Identifier: Apache-2.0
"""``scripts/kill-conductors``: the leading one of two conductors is killed under load, again and again.

Fake engines answer requests of many sessions through two gateways. Together the engines have room for the
prefixes of all sessions, one of them has not: so the share of cached tokens depends on the conductors. A
killed conductor is started anew after a second, and the next kill waits until its index has the blocks that
the other one's has. First the same load runs without kills, as a control of the same length of time as is
counted after a kill: so the figures of one run are compared with each other, on a machine as busy. No request
may fail or be placed in turn, no conductor may lead in place of one that was not killed, and in the minute
after each kill the share of cached tokens must be that of the control, within ``MOST_POINTS``. Exits 1 unless
all of that is so.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import aiohttp

from mooncake.cli.bench.report import describe_machine
from mooncake.cli.ports import free_ports
from mooncake.conductor.messages import REPLIES, GetStatus, Status
from mooncake.errors import MooncakeError
from mooncake.rpc import AsyncClient
from tests.gateway.doubles import save_tokenizer
from tests.program import Program, programs

MOST_POINTS = 3.0
RESTART_AFTER_S = 1.0
INDEX_PART = 0.01
"""Blocks of each instance by which two complete indexes may differ: events are under way."""
PATIENCE_S = 120.0
BLOCK = ("--block-tokens", "16")
NUM_ENGINES = 3
NUM_SESSIONS = 32
SYSTEM_TOKENS, SESSION_TOKENS, OWN_TOKENS = 160, 480, 64
ENGINE = ("--num-blocks", "512", "--prefill-token-s", "0.0005", "--decode-token-s", "0.01", *BLOCK)
"""Room for half of the sessions."""


@dataclass
class Asked:
    """One request and what it came to."""

    began: float
    ended: float = 0.0
    failure: str = ""
    is_in_turn: bool = False
    num_tokens: int = 0
    num_cached: int = 0


class Pair:
    """Two conductors, two gateways, and the engines."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        save_tokenizer(folder)
        self.start = stack.enter_context(programs(folder))
        engines = [self.start("dev", "fake-engine", "--role", "decode", *ENGINE) for _ in range(NUM_ENGINES)]
        ports = free_ports("127.0.0.1", 4, Random())
        self.ports, self.http_ports = ports[:2], ports[2:]
        self.conductors = [self._conductor(number) for number in range(2)]
        both = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        instances = [word for engine in engines for word in ("--decode", engine.address)]
        known = ("--conductor", both, "--model", str(folder), "--served-model-name", "fake", *BLOCK)
        self.gateways = [self.start("gateway", *known, *instances) for _ in range(2)]

    def _conductor(self, number: int) -> Program:
        peer = f"127.0.0.1:{self.ports[1 - number]}"
        words = ("--peers", peer, "--http-port", str(self.http_ports[number]), *BLOCK)
        # These engines share no blocks, so a session is to be served where its blocks are.
        return self.start("conductor", "--scheduling", "cache_aware", *words, port=self.ports[number])

    async def begin_again(self, number: int) -> None:
        """Start a killed conductor."""
        self.conductors[number] = await asyncio.to_thread(self._conductor, number)

    async def leader(self, http: aiohttp.ClientSession, besides: int = -1) -> int:
        """The number of the conductor that leads, another one than ``besides``; waits for it."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for number in (0, 1):
                    if number != besides and await self._page(http, number, "is_leader 1.0"):
                        return number
                await asyncio.sleep(0.02)

    async def until_followed(self, http: aiohttp.ClientSession, number: int) -> None:
        """Return when the leader sends its facts to this conductor, and this one to the leader."""
        async with asyncio.timeout(PATIENCE_S):
            for one in (0, 1):
                peer = f'peer_connected{{peer="127.0.0.1:{self.ports[1 - one]}"}} 1.0'
                while not await self._page(http, one, peer):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)

    async def until_indexed(self) -> None:
        """Return when both conductors' indexes have as many blocks of each instance."""
        async with asyncio.timeout(PATIENCE_S):
            while not _are_alike(await self._num_blocks(0), await self._num_blocks(1)):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def _num_blocks(self, number: int) -> dict[str, int]:
        client = AsyncClient(f"127.0.0.1:{self.ports[number]}", REPLIES, "the conductor")
        try:
            status = await client.call(GetStatus(), 5.0)
        except MooncakeError:
            return {}  # it is just starting
        finally:
            await client.close()
        assert isinstance(status, Status)
        return {row.instance: row.num_blocks for row in status.rows}

    async def _page(self, http: aiohttp.ClientSession, number: int, wanted: str) -> bool:
        url = f"http://127.0.0.1:{self.http_ports[number]}/metrics"
        with contextlib.suppress(aiohttp.ClientError):
            async with http.get(url) as answer:
                return f"\nmooncake_conductor_{wanted}" in await answer.text()
        return False


def _are_alike(one: dict[str, int], other: dict[str, int]) -> bool:
    if not one or one.keys() != other.keys():
        return False
    return all(abs(one[name] - other[name]) <= max(8, INDEX_PART * one[name]) for name in one)


class Load:
    """Clients that send the requests of random sessions, one after the other, through both gateways."""

    def __init__(self, pair: Pair, http: aiohttp.ClientSession, num_clients: int, pause_s: float) -> None:
        self.asked: list[Asked] = []
        self._pair, self._http, self._pause_s = pair, http, pause_s
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(num_clients)]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def between(self, first: float, last: float) -> list[Asked]:
        return [one for one in self.asked if first <= one.began < last and one.ended]

    async def until(self, num_answered: int) -> None:
        """Return when so many more requests have ended."""
        wanted = num_answered + sum(one.ended > 0 for one in self.asked)
        async with asyncio.timeout(PATIENCE_S):
            while sum(one.ended > 0 for one in self.asked) < wanted:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def _client(self, number: int) -> None:
        random = Random(number)
        gateway = self._pair.gateways[number % 2]
        while True:
            prompt = prompt_of(random.randrange(NUM_SESSIONS), random)
            asked = Asked(time.monotonic())
            self.asked.append(asked)
            try:
                await self._ask(gateway, prompt, asked)
            except (aiohttp.ClientError, TimeoutError) as error:
                asked.failure = repr(error)
            asked.ended = time.monotonic()
            await asyncio.sleep(self._pause_s)

    async def _ask(self, gateway: Program, prompt: list[int], asked: Asked) -> None:
        body = {"prompt": prompt, "max_tokens": 8}
        async with self._http.post(f"{gateway.url}/v1/completions", json=body) as answer:
            asked.is_in_turn = "no conductor" in answer.headers.get("x-mooncake-route", "")
            found = await answer.json()
            if answer.status != 200:
                asked.failure = f"{answer.status}: {found}"
                return
            usage = found["usage"]
            asked.num_tokens = usage["prompt_tokens"]
            asked.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def prompt_of(session: int, random: Random) -> list[int]:
    """A prompt of a session: what all have, what the session has, and what is new."""
    system, own = Random("system"), Random(f"session {session}")
    tokens = [system.randrange(256) for _ in range(SYSTEM_TOKENS)]
    tokens += [own.randrange(256) for _ in range(SESSION_TOKENS)]
    return tokens + [random.randrange(256) for _ in range(OWN_TOKENS)]


@contextlib.asynccontextmanager
async def loaded_pair(folder: Path, num_clients: int, pause_s: float) -> AsyncIterator[tuple[Pair, Load]]:
    """The processes under load, ended at the end."""
    with contextlib.ExitStack() as stack:
        pair = await asyncio.to_thread(Pair, folder, stack)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as http:
            load = Load(pair, http, num_clients, pause_s)
            try:
                yield pair, load
            finally:
                await load.close()


async def kill_leader(pair: Pair, http: aiohttp.ClientSession) -> tuple[int, float, float]:
    """Kill it, and start it anew a second later: its number, when, and seconds until the other one led."""
    number = await pair.leader(http)
    at = time.monotonic()
    pair.conductors[number].process.kill()
    again = asyncio.create_task(_later(pair, number))
    await pair.leader(http, besides=number)
    took_s = time.monotonic() - at
    await again
    return number, at, took_s


async def _later(pair: Pair, number: int) -> None:
    await asyncio.sleep(RESTART_AFTER_S)
    await pair.begin_again(number)


def hit_rate(asked: Sequence[Asked]) -> float:
    """Cached tokens as a percentage of all tokens of prompts."""
    return 100.0 * sum(one.num_cached for one in asked) / max(1, sum(one.num_tokens for one in asked))


def longest_s(asked: Sequence[Asked]) -> float:
    return max((one.ended - one.began for one in asked), default=0.0)


def windows(load: Load, first: float, last: float, length_s: float) -> list[float]:
    """Hit rates of consecutive windows."""
    num_windows = max(1, round((last - first) / length_s))
    begins = [first + number * (last - first) / num_windows for number in range(num_windows + 1)]
    return [hit_rate(load.between(*ends)) for ends in itertools.pairwise(begins)]


async def control(load: Load, args: argparse.Namespace) -> tuple[list[float], float]:
    """The hit rates without kills, and the longest request's seconds."""
    await asyncio.sleep(args.before_s)  # caches fill
    first = time.monotonic()
    await asyncio.sleep(args.control_s)
    last = time.monotonic()
    found, rates = load.between(first, last), windows(load, first, last, args.after_s)
    print(
        f"control: {len(found)} requests in {args.control_s:g} s without a kill, {hit_rate(found):.1f} % of "
        f"tokens cached ({min(rates):.1f} to {max(rates):.1f} % in {len(rates)} windows), longest "
        f"{longest_s(found):.2f} s, machine's load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return rates, longest_s(found)


async def run(args: argparse.Namespace) -> int:
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mooncake-conductors-") as folder:
        async with (
            loaded_pair(Path(folder), args.clients, 0.2) as (pair, load),
            aiohttp.ClientSession() as http,
        ):
            await pair.until_followed(http, 0)
            without, usual_s = await control(load, args)
            usual = sum(without) / len(without)
            kills: list[float] = []
            leads_s: list[float] = []
            next_one = await pair.leader(http)
            for kill in range(1, args.kills + 1):
                number, at, took_s = await kill_leader(pair, http)
                if number != next_one:
                    wrong.append(f"kill {kill}: conductor {number} led in place of one that was not killed")
                next_one = 1 - number
                await pair.until_followed(http, number)
                back_s = time.monotonic() - at
                await pair.until_indexed()
                kills.append(at)
                leads_s.append(took_s)
                print(
                    f"kill {kill}: conductor {number}, the other led after {took_s:.2f} s, this one was back "
                    f"after {back_s:.1f} s and had the whole index after {time.monotonic() - at:.1f} s, "
                    f"machine's load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
                await asyncio.sleep(max(0.0, at + args.every_s - time.monotonic()))
            await asyncio.sleep(max(0.0, kills[-1] + args.after_s - time.monotonic()))
            rates: list[float] = []
            for kill, at in enumerate(kills, 1):
                found = load.between(at, at + args.after_s)
                rates.append(hit_rate(found))
                at_kill = longest_s(load.between(at - usual_s, at + 2.0))
                print(
                    f"after kill {kill}: {len(found)} requests in {args.after_s:g} s, "
                    f"{rates[-1]:.1f} % cached, longest at the kill {at_kill:.2f} s"
                )
                if rates[-1] < usual - MOST_POINTS:
                    wrong.append(f"kill {kill}: {rates[-1]:.1f} % of tokens cached, {usual:.1f} % without")
            asked = [one for one in load.asked if one.ended]
            wrong += [f"a request failed: {one.failure}" for one in asked if one.failure]
            in_turn = sum(one.is_in_turn for one in asked)
            if in_turn:
                wrong.append(f"{in_turn} requests were placed without a conductor")
    num_failed = sum(1 for one in asked if one.failure)
    print(
        f"{args.kills} kills: {len(asked)} requests, {num_failed} failed, {in_turn} placed in turn; "
        f"hit rate of the {args.after_s:g} s after a kill {min(rates):.1f} to {max(rates):.1f} %, mean "
        f"{sum(rates) / len(rates):.1f} % ({usual:.1f} % in the control); the other one led "
        f"after {min(leads_s):.2f} to {max(leads_s):.2f} s"
    )
    for one in wrong:
        print(f"VIOLATED {one}")
    return int(bool(wrong))


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/kill-conductors", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="how many (default 20)")
    parser.add_argument("--every-s", type=float, default=60.0, help="seconds between kills (default 60)")
    parser.add_argument(
        "--before-s", type=float, default=60.0, help="seconds for filling caches (default 60)"
    )
    parser.add_argument(
        "--control-s", type=float, default=180.0, help="seconds without kills, to compare (default 180)"
    )
    parser.add_argument("--clients", type=int, default=6, help="clients at a time (default 6)")
    parser.add_argument(
        "--after-s", type=float, default=60.0, help="seconds that count after one (default 60)"
    )
    args = parser.parse_args()
    print(f"machine: {describe_machine()}")
    print(f"command: {shlex.join(['scripts/kill-conductors', *sys.argv[1:]])}", flush=True)
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
