"""Nouns that several rooms share and no single room owns."""

from __future__ import annotations

import enum

ObjectKey = str
"""Name of an object in the store: 1 to 1,024 bytes of UTF-8 without NUL."""

InstanceId = str
"""Name of a serving instance (a worker): its ``host:port``."""


class WorkerRole(enum.StrEnum):
    """What a worker is for."""

    PREFILL = "prefill"
    DECODE = "decode"


class Tier(enum.StrEnum):
    """Where the bytes of a block lie."""

    DEVICE = "device"
    MEMORY = "memory"
    SSD = "ssd"
