# SPDX-License-Identifier: Apache-2.0
"""One request's path through the simulated cluster: its lengths, its state, its measured times.

A record, moved by the nodes that serve it; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class SimRequest:
    """Instants are those of the kernel; -1 while they have not been reached."""

    __slots__ = (
        "arrived_at",
        "block_ids",
        "cached_tokens",
        "computed_s",
        "computed_to",
        "decode",
        "estimate_s",
        "fetch_began_at",
        "fetch_ended_at",
        "fetched_tokens",
        "first_run",
        "first_token_at",
        "keys",
        "lasted_s",
        "loads",
        "num_fetching",
        "num_input",
        "num_output",
        "number",
        "predicted_tbt_s",
        "predicted_ttft_s",
        "prefill",
        "prefill_began_at",
        "request_id",
        "tbt_s",
        "token_ids",
        "turn",
        "wait_s",
    )

    def __init__(
        self, number: int, arrived_at: float, num_input: int, num_output: int, keys: Sequence[Any]
    ) -> None:
        self.number = number
        self.request_id = str(number)
        self.arrived_at = arrived_at
        self.num_input = num_input
        self.num_output = num_output
        self.keys = keys
        """Keys of its full blocks, as the nodes' caches know them."""
        self.token_ids: list[int] = []
        """Token ids of its prompt; only in the step-level mode."""
        self.turn = 0.0
        """Among those that wait for the same instance, the lowest is next."""
        self.prefill = -1
        self.decode = -1
        self.predicted_ttft_s = 0.0
        self.predicted_tbt_s = 0.0
        self.estimate_s = 0.0
        """Expected duration of its prefill, while it waits."""
        self.num_fetching = 0
        """Number of fetches under way."""
        self.fetch_began_at = -1.0
        self.fetch_ended_at = -1.0
        self.loads: list[tuple[int, int]] = []
        """Ranges of its blocks (first, end) that come from elsewhere."""
        self.fetched_tokens = 0
        self.cached_tokens = 0
        """Tokens that were not computed: cached where it was prefilled, or fetched to there."""
        self.computed_s = 0.0
        self.lasted_s = 0.0
        """From the first chunk to the last; less than ``computed_s`` in a pipeline of nodes."""
        self.computed_to = 0
        """Tokens of its prompt whose KV is there, while it is computed in chunks."""
        self.prefill_began_at = -1.0
        self.first_token_at = -1.0
        self.block_ids: list[int] = []
        """Its pinned blocks on the node that prefills it."""
        self.first_run = 0
        self.wait_s = 0.0
        """From its first token to the step that makes the second one."""
        self.tbt_s = 0.0

    def __repr__(self) -> str:
        return f"SimRequest({self.request_id} {self.num_input}+{self.num_output} at {self.arrived_at:.3f})"
