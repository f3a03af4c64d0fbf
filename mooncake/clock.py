"""The real clocks. The simulated one lives in ``sim/kernel.py``; cores see neither, only ``now``."""

from __future__ import annotations

import time

monotonic = time.monotonic
"""Seconds for deadlines and durations; never goes back, means nothing outside this machine."""

wall = time.time
"""Seconds since 1970, for people and for stamps that leave the machine."""
