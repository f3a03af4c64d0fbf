# SPDX-License-Identifier: Apache-2.0
"""The layers of a decoder as CUDA graphs, for steps of few rows: one launch between two attentions.

A step that decodes is bound by the launches of its kernels, about forty for each layer, not by what they
compute. All of them but attention's have shapes that depend on the number of rows alone, so they are captured
once for each of ``SIZES`` (a step is padded to the next one; rows do not mix outside attention) and replayed.
Attention, whose shapes grow with each token, stays outside, as the piecewise graphs of other engines have it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from mooncake.inference.model import Attend, Decoder

SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of rows that there are graphs for."""
WARM_UPS = 2
"""Runs before a capture, in which libraries allocate what they keep."""


@dataclasses.dataclass(slots=True)
class _Pieces:
    """The graphs for one number of rows, with the memory that they read and write."""

    positions: Tensor
    hidden: Tensor
    attended: Tensor
    graphs: list[torch.cuda.CUDAGraph]
    """The first ends with the queries of the first layer, the last begins behind the last attention."""
    queries: list[tuple[Tensor, Tensor, Tensor]]
    """q, k and v of each layer."""


class LayerGraphs:
    """Graphs of the layers of one model on a CUDA device, made at a size's first step or by ``prepare``."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self._pieces: dict[int, _Pieces] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def forward_hidden(self, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """As ``Decoder.forward_hidden``, of at most ``SIZES[-1]`` rows."""
        num_rows = hidden.shape[0]
        size = next(size for size in SIZES if size >= num_rows)
        pieces = self._of(size)
        pieces.hidden[:num_rows].copy_(hidden)
        pieces.positions[:num_rows].copy_(positions)
        for layer, graph, queries in zip(self.model.layers, pieces.graphs, pieces.queries, strict=False):
            graph.replay()
            q, k, v = (column[:num_rows] for column in queries)
            pieces.attended[:num_rows].copy_(attend(layer, q, k, v))
        pieces.graphs[-1].replay()
        return pieces.hidden[:num_rows].clone()  # the next step overwrites it

    def prepare(self) -> None:
        """Make those of every size, so that no step waits for them."""
        with torch.inference_mode():
            for size in SIZES:
                self._of(size)

    def _of(self, size: int) -> _Pieces:
        pieces = self._pieces.get(size)
        if pieces is None:
            pieces = self._pieces[size] = self._captured(size)
        return pieces

    def _captured(self, size: int) -> _Pieces:
        model, config = self.model, self.model.config
        device, dtype, width = model.device, model.dtype, config.num_heads * config.head_dim
        pieces = _Pieces(
            torch.zeros(size, dtype=torch.int64, device=device),
            torch.zeros(size, config.hidden_size, dtype=dtype, device=device),
            torch.zeros(size, width, dtype=dtype, device=device),
            [],
            [],
        )
        angles: tuple[Tensor, Tensor] | None = None

        def piece(number: int) -> tuple[Tensor, Tensor, Tensor] | None:
            nonlocal angles
            if number:
                model.behind_attention(number - 1, pieces.hidden, pieces.attended)
            if number == len(model.layers):
                return None
            if angles is None or number == 0:
                angles = model.angles(pieces.positions)
            return model.queries(number, pieces.hidden, angles)

        # Another stream, as a capture requires. "thread_local": other threads copy blocks meanwhile.
        stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                for number in range(len(model.layers) + 1):
                    piece(number)
            for number in range(len(model.layers) + 1):
                graph = torch.cuda.CUDAGraph()
                # Not torch.cuda.graph, which collects Python's garbage before each capture.
                graph.capture_begin(self._memory, capture_error_mode="thread_local")
                try:
                    queries = piece(number)
                finally:
                    graph.capture_end()
                pieces.graphs.append(graph)
                if queries is not None:
                    pieces.queries.append(queries)
        torch.cuda.current_stream(device).wait_stream(stream)
        return pieces
