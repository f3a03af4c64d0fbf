# SPDX-License-Identifier: Apache-2.0
"""The policies by name: one for prefill, one for decode."""

from __future__ import annotations

from mooncake.conductor.policies.overlap import kvcache_centric, overlap
from mooncake.conductor.policies.selection import (
    Policy,
    at_random,
    decode_by_load,
    decode_by_tbt,
    prefill_by_cache,
    prefill_by_load,
    round_robin,
)

POLICIES: dict[str, tuple[Policy, Policy]] = {
    "overlap": (overlap, decode_by_tbt),
    "kvcache_centric": (kvcache_centric, decode_by_tbt),
    "cache_aware": (prefill_by_cache, decode_by_load),
    "load": (prefill_by_load, decode_by_load),
    "round_robin": (round_robin, round_robin),
    "random": (at_random, at_random),
}
"""What ``SchedulingSettings.scheduling`` may be."""
