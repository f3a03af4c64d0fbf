# SPDX-License-Identifier: Apache-2.0
"""One of two processes that measure ``send`` and ``recv`` of torch.distributed with gloo, over loopback.

Rank 0 obeys lines on its standard input, ``<bytes of a message> <messages in flight> <bytes back> <times>``,
and prints the seconds of each time as a JSON list. A time is over when the bytes have come back, because a
send of gloo ends before its bytes have arrived. Rank 1 posts its receives for the next time before it sends
them, so that no message waits for a buffer. Imports torch and nothing of this package.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist

FIELDS = 4
"""Numbers of an order, which rank 0 passes on. Messages of 0 bytes end rank 1."""


def main(rank: int, rendezvous: str, window_bytes: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    window, back = (
        torch.full((window_bytes,), rank + 1, dtype=torch.uint8) for _ in range(2)
    )  # has pages now
    if rank == 0:
        print("ready", flush=True)
        _drive(window, back)
    else:
        _serve(window, back)
    dist.destroy_process_group()


def _drive(window: torch.Tensor, back: torch.Tensor) -> None:
    for line in sys.stdin:
        order = [int(word) for word in line.split()]
        size_bytes, count, num_back, times = order
        answer_to = back[:num_back]
        dist.send(torch.tensor(order), 1)
        dist.recv(answer_to, 1)
        seconds = []
        for number in range(times):
            parts = _parts(window, number, size_bytes, count)
            begin = time.perf_counter()
            answer = dist.irecv(answer_to, 1)
            _wait([dist.isend(part, 1) for part in parts])
            _wait([answer])
            seconds.append(time.perf_counter() - begin)
        print(json.dumps(seconds), flush=True)
    dist.send(torch.zeros(FIELDS, dtype=torch.int64), 1)


def _serve(window: torch.Tensor, back: torch.Tensor) -> None:
    order = torch.zeros(FIELDS, dtype=torch.int64)
    while True:
        dist.recv(order, 0)
        size_bytes, count, num_back, times = order.tolist()
        if not size_bytes:
            return
        answer = back[:num_back]
        posted = [dist.irecv(part, 0) for part in _parts(window, 0, size_bytes, count)]
        dist.send(answer, 0)
        for number in range(1, times + 1):
            _wait(posted)
            if number < times:
                posted = [dist.irecv(part, 0) for part in _parts(window, number, size_bytes, count)]
            dist.send(answer, 0)


def _parts(window: torch.Tensor, number: int, size_bytes: int, count: int) -> list[torch.Tensor]:
    """Buffers of one time: it cycles through the window, as the paths do."""
    step = size_bytes * count
    at = number % max(1, len(window) // step) * step
    return [window[at + i * size_bytes : at + (i + 1) * size_bytes] for i in range(count)]


def _wait(works: list[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()
