# SPDX-License-Identifier: Apache-2.0
"""Two conductors, two gateways and fake engines: the leader is killed under load, and no client sees it."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from tests.kill.conductors import hit_rate, kill_leader, loaded_pair

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

NUM_REQUESTS = 40


async def test_no_request_fails_when_the_leading_conductor_is_killed(tmp_path: Path) -> None:
    async with loaded_pair(tmp_path, 4, 0.0) as (pair, load), aiohttp.ClientSession() as http:
        await pair.until_followed(http, 0)
        await load.until(NUM_REQUESTS)
        killed = []
        for _ in range(2):
            number, at, _ = await kill_leader(pair, http)
            await pair.until_followed(http, number)
            await pair.until_indexed()
            await load.until(NUM_REQUESTS)
            assert hit_rate([one for one in load.asked if one.began >= at and one.ended]) > 0
            killed.append(number)
        await load.close()
    assert sorted(killed) == [0, 1], "the second one to lead was the other one"
    assert [one.failure for one in load.asked if one.failure] == []
    assert not any(one.is_in_turn for one in load.asked), "a conductor was there for every request"
