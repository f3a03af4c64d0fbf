# SPDX-License-Identifier: Apache-2.0
"""A worker's settings, as far as they follow from its device."""

from __future__ import annotations

import pytest

from mooncake.inference.worker import WorkerSettings


@pytest.mark.parametrize(
    ("device", "expected"),
    [("cpu", (512, 64, "float32", True)), ("cuda:1", (2048, 0, "bfloat16", False))],
)
def test_defaults_follow_the_device(device: str, expected: tuple[int, int, str, bool]) -> None:
    settings = WorkerSettings(device=device, master="127.0.0.1:1")
    limits = settings.engine_settings()
    found = (limits.max_batch_tokens, limits.saturating_tokens, settings.torch_dtype, settings.may_push)
    assert found == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_given_is_taken(device: str) -> None:
    settings = WorkerSettings(device=device, max_batch_tokens=100, saturating_tokens=0, max_running=7)
    limits = settings.engine_settings()
    assert (limits.max_batch_tokens, limits.saturating_tokens, limits.max_running) == (100, 0, 7)
