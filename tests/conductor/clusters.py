# SPDX-License-Identifier: Apache-2.0
"""Small clusters for tests of policies: a thousand tokens take a second to compute, a tenth of it to load."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from mooncake.conductor.keyed_prompt import KeyedPrompt
from mooncake.conductor.load import LoadAccounts
from mooncake.conductor.policies import ClusterView, PromptJob
from mooncake.conductor.prediction import CostModels, DecodeModel, LinkModel, Predictor, PrefillModel
from mooncake.conductor.settings import SchedulingSettings

COSTS = CostModels(
    PrefillModel(1e-15, 1e-3, 1e-15), DecodeModel(0.02, 1e-3, 1e-6), LinkModel(1e-9, 1e6), 100, 10
)


def cluster(*queued_s: float, costs: CostModels = COSTS, **settings: Any) -> ClusterView:
    """Instances h:0, h:1, ... with queues of these lengths."""
    loads, predict = LoadAccounts(), Predictor(costs)
    loads.grow(len(queued_s))
    predict.grow(len(queued_s))
    for slot, seconds in enumerate(queued_s):
        if seconds:
            loads.add_prompt(slot, f"r{slot}", seconds, 1, 0.0, 1000.0)
    given = SchedulingSettings(block_tokens=10, **settings)
    names = [f"h:{slot}" for slot in range(len(queued_s))]
    return ClusterView(given, Random(0), loads, predict, names, every(queued_s), np.zeros(len(names)))


def every(queued_s: Any) -> Any:
    return np.arange(len(queued_s))


def job(*cached: float, num_tokens: int = 1000, **fields: Any) -> PromptJob:
    held = np.array(cached, dtype=float)
    return PromptJob(1000.0, num_tokens, held, held, **fields)


def prompt(common: int, own: int, name: int, num_cached: int = 0) -> KeyedPrompt:
    """A prompt with the blocks of a common prefix, then its own."""
    return KeyedPrompt([*range(common), *range(1_000_000 * name, 1_000_000 * name + own)], num_cached)
