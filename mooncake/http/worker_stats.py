# SPDX-License-Identifier: Apache-2.0
"""A worker's reports of its own work: timings of a prompt, and the engine's latest steps.

It owns the shapes only, for both ends: a worker sends ``PromptStats`` with its answer to prefill,
``ResumedStats`` with the first piece of an answer that it continues, and ``StepStats`` and ``KvMemoryStats``
with its answer to ``/ready``; a gateway and a conductor read them to count, and to predict later requests.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

_Count = Annotated[int, Meta(ge=0, le=10**15)]
"""Readers compute with these in floating point, where a number of hundreds of digits raises OverflowError."""


class StageStats(msgspec.Struct, frozen=True):
    """One stage's part in a prompt that a prefill group computed. Instants are seconds since the first stage
    began with the prompt; a stage that is on another host is on its clock, too."""

    first_layer: _Count
    end_layer: _Count
    num_chunks: _Count
    began_s: float
    "When it began with the prompt's first chunk."
    ended_s: float
    "When it was done with the prompt's last chunk."
    computed_s: float
    "Time for which it computed chunks that have rows of this prompt."
    waited_s: float
    "Time without work, from the prompt's beginning to ``ended_s``: the bubble."


class PromptStats(msgspec.Struct, frozen=True):
    """Durations up to a request's first token."""

    queued_s: float
    "Time until it had blocks."
    loaded_s: float
    "Time from then until its first step: the lookup in the pool, and the load."
    computed_s: float
    "Time from its first step to its first token."
    num_local_tokens: _Count
    num_loaded_tokens: _Count
    num_computed_tokens: _Count
    stages: list[StageStats] = []
    "The stages of a prefill group; none for a single worker."


class ResumedStats(msgspec.Struct, frozen=True):
    """Origin of the KV of an answer that another worker began: its prompt and output so far, in tokens."""

    num_local_tokens: _Count
    "Found in the worker's own memory."
    num_loaded_tokens: _Count
    "Loaded from the pool, or pushed by the other worker."
    num_computed_tokens: _Count
    is_pushed: bool = False


class StepStats(msgspec.Struct):
    """The latest steps and loads. ``num_chunks``, ``num_steps`` and ``num_loads`` count all since the start,
    so that a reader knows which of the rows are new to it."""

    num_chunks: _Count = 0
    chunks: list[tuple[_Count, _Count, float]] = []
    "First token, number of tokens, seconds. Of a prefill group: whole prompts, as if each were alone in it."
    num_steps: _Count = 0
    steps: list[tuple[_Count, _Count, float]] = []
    "Number of requests, tokens of their contexts, seconds."
    num_loads: _Count = 0
    loads: list[tuple[_Count, float]] = []
    "Tokens whose KV was loaded from the pool, seconds. Loads that failed are not among them."


class KvMemoryStats(msgspec.Struct, frozen=True):
    """A worker's memory for KV, in tokens."""

    total_tokens: _Count
    used_tokens: _Count
    "In blocks of running requests; blocks that are only cached are as good as free."
    num_requests: _Count
    "Requests that hold blocks."
    context_tokens: _Count = 0
    "Computed tokens of their contexts: more than ``used_tokens`` where they share blocks. 0: unknown."
