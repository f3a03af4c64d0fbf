# SPDX-License-Identifier: Apache-2.0
"""The real clocks. The simulated one is in ``sim/kernel.py``; cores get neither, only ``now``."""

from __future__ import annotations

import time

monotonic = time.monotonic
"""Seconds for deadlines and durations; never goes back, not comparable between machines."""

wall = time.time
"""Seconds since 1970, for people and for stamps that leave the machine."""
