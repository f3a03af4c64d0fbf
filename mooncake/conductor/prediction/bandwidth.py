# SPDX-License-Identifier: Apache-2.0
"""Bandwidth estimates between instances, and the time at which each network card is free.

The estimate of a path comes from the path's own samples, else from its source's, else from all. Small
transfers yield the latency, large ones the rate. A source that many read from is busy: its booked reads are
an account of time, like a queue of prompts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from mooncake.conductor.prediction.cost_models import LinkModel
from mooncake.conductor.prediction.regression import Floats

_LATENCY_BYTES = 65_536
_WEIGHT = 0.1  # of a new sample
_TRUSTED_SAMPLES = 4


@dataclass(slots=True)
class _Source:
    s_per_byte: float
    path_s_per_byte: Floats
    num_samples: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.num_samples = np.zeros(len(self.path_s_per_byte))


class BandwidthEstimates:
    """Estimates by pairs of slots."""

    def __init__(self, prior: LinkModel) -> None:
        self.latency_s = prior.latency_s
        self.s_per_byte = 1 / prior.bytes_per_s
        self.egress_free_at: Floats = np.empty(0)
        self.ingress_free_at: Floats = np.empty(0)
        self.ssd_free_at: Floats = np.empty(0)
        self._sources: dict[int, _Source] = {}

    def grow(self, num_slots: int) -> None:
        added = num_slots - len(self.egress_free_at)
        self.egress_free_at = np.append(self.egress_free_at, np.full(added, -math.inf))
        self.ingress_free_at = np.append(self.ingress_free_at, np.full(added, -math.inf))
        self.ssd_free_at = np.append(self.ssd_free_at, np.full(added, -math.inf))
        self._sources.clear()  # columns have another length now: learned again within a few transfers

    def forget(self, slot: int) -> None:
        """Reset a slot, which another instance has now."""
        self._sources.pop(slot, None)
        for source in self._sources.values():
            source.num_samples[slot] = 0
        self.egress_free_at[slot] = self.ingress_free_at[slot] = self.ssd_free_at[slot] = -math.inf

    def add(self, source: int, target: int, size_bytes: int, seconds: float) -> None:
        """Add one transfer as a sample; an impossible duration is ignored."""
        if not 0 < seconds < math.inf or size_bytes <= 0:
            return
        if size_bytes <= _LATENCY_BYTES:
            self.latency_s += _WEIGHT * (seconds - self.latency_s)
            return
        # A transfer that seems faster than its latency still took a tenth of its time for its bytes.
        per_byte = max(seconds - self.latency_s, seconds / 10) / size_bytes
        known = self._sources.get(source)
        if known is None:
            path = np.full(len(self.egress_free_at), per_byte)
            known = self._sources[source] = _Source(per_byte, path)
        self.s_per_byte += _WEIGHT * (per_byte - self.s_per_byte)
        known.s_per_byte += _WEIGHT * (per_byte - known.s_per_byte)
        before = known.path_s_per_byte[target] if known.num_samples[target] else per_byte
        known.path_s_per_byte[target] = before + _WEIGHT * (per_byte - before)
        known.num_samples[target] += 1

    def s_per_byte_from(self, source: int) -> Floats | float:
        """Seconds per byte by target slot, or one number for all."""
        known = self._sources.get(source)
        if known is None:
            return self.s_per_byte
        return np.where(known.num_samples >= _TRUSTED_SAMPLES, known.path_s_per_byte, known.s_per_byte)

    def book(self, source: int, target: int, seconds: float, now: float) -> None:
        """Book both network cards, or one instance's SSD, for a transfer that was decided now."""
        if source == target:
            self.ssd_free_at[source] = max(now, self.ssd_free_at[source]) + seconds
            return
        begin = max(now, self.egress_free_at[source], self.ingress_free_at[target])
        self.egress_free_at[source] = self.ingress_free_at[target] = begin + seconds

    def check(self) -> None:
        assert self.latency_s > 0 and self.s_per_byte > 0
        for source in self._sources.values():
            assert source.s_per_byte > 0 and (source.path_s_per_byte > 0).all()
