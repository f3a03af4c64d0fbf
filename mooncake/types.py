# SPDX-License-Identifier: Apache-2.0
"""Types that several packages share and no single one owns."""

from __future__ import annotations

import enum
from typing import Literal

ObjectKey = str
"""Name of an object in the store: 1 to 1,024 bytes of UTF-8 without NUL."""

InstanceId = str
"""Name of a serving instance (a worker): its ``host:port``."""


KvTransfer = Literal["auto", "pool", "push"]
"""How KV goes from prefill to decode: through the pool, pushed, or whichever is predicted to be faster."""


class WorkerRole(enum.StrEnum):
    """The part of a request that a worker computes."""

    PREFILL = "prefill"
    DECODE = "decode"


class Tier(enum.StrEnum):
    """The kind of memory that holds the bytes of a block."""

    DEVICE = "device"
    MEMORY = "memory"
    SSD = "ssd"
