# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio

import pytest

from mooncake.driver import Driver
from mooncake.machine import Wake


class Egg:
    """A core for the test: rings ``delay`` seconds after the last event."""

    def __init__(self, delay: float) -> None:
        self.delay = delay
        self.rings_at: float | None = None

    def handle(self, event: str | Wake, now: float) -> list[str]:
        if isinstance(event, Wake):
            assert self.rings_at is not None
            if now < self.rings_at:
                return []
            self.rings_at = None
            return ["ring"]
        self.rings_at = now + self.delay
        return [f"set by {event}"]

    def deadline(self) -> float | None:
        return self.rings_at

    def check(self) -> None:
        assert self.rings_at is None or self.rings_at >= 0

    def story(self, key: str) -> list[str]:
        return []


async def test_effects_come_in_order_and_the_deadline_wakes() -> None:
    seen: list[str] = []
    rung = asyncio.Event()

    def perform(effect: str) -> None:
        seen.append(effect)
        if effect == "ring":
            rung.set()

    driver = Driver(Egg(0.01), perform)
    driver.post("hand")
    driver.post("other hand")
    await asyncio.wait_for(rung.wait(), 5)
    assert seen == ["set by hand", "set by other hand", "ring"]
    driver.close()


async def test_a_driver_wakes_again_after_an_error() -> None:
    rung = asyncio.Event()

    def perform(effect: str) -> None:
        if effect == "ring":
            rung.set()
        else:
            raise ValueError(effect)

    driver = Driver(Egg(0.01), perform)
    with pytest.raises(ValueError, match="set by hand"):
        driver.post("hand")
    await asyncio.wait_for(rung.wait(), 5)
    driver.close()


async def test_a_closed_driver_never_wakes() -> None:
    seen: list[str] = []
    driver = Driver(Egg(0.0), seen.append)
    driver.post("hand")
    driver.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0.01)
    assert seen == ["set by hand"]


async def test_virtual_time_reaches_the_core() -> None:
    now = 100.0
    egg = Egg(5.0)
    driver = Driver(egg, lambda effect: None, now=lambda: now)
    driver.post("hand")
    assert egg.rings_at == 105.0
    driver.close()


async def test_a_deadline_before_the_first_event_wakes() -> None:
    egg, rung = Egg(0.0), asyncio.Event()
    egg.rings_at = 0.0
    driver = Driver(egg, lambda effect: rung.set())
    driver.arm()
    await asyncio.wait_for(rung.wait(), 5)
    driver.close()
