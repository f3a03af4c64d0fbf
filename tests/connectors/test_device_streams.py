# SPDX-License-Identifier: Apache-2.0
"""Waiting for events of a device on an event loop; implementations of a device have tests of their own."""

from __future__ import annotations

from mooncake.connectors.device_streams import reached
from tests.connectors.late_device import LateDevice


async def test_a_loop_waits_for_an_event_until_it_is_reached() -> None:
    device, done = LateDevice(), []
    device.compute(lambda: done.append(1))
    await reached(device.computed())
    assert done == [1]
    await reached(None)
