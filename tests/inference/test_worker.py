# SPDX-License-Identifier: Apache-2.0
"""A worker's settings, as far as they follow from its device."""

from __future__ import annotations

import pytest

from mooncake.errors import InvalidArgument
from mooncake.inference.worker import WorkerSettings, _check_device


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


@pytest.mark.parametrize("device", ["foo", "cuda:", "cuda:x", "mps", "CPU", ""])
def test_a_device_that_is_none_is_refused(device: str) -> None:
    with pytest.raises(InvalidArgument, match=r"device is .*cuda:N"):
        WorkerSettings(device=device)


def test_a_gpu_that_is_not_there_is_refused_before_the_model_is_loaded() -> None:
    _check_device("cpu")
    _check_device("auto")
    with pytest.raises(InvalidArgument, match=r"device is 'cuda:999'.*torch finds \d+ GPUs here"):
        _check_device("cuda:999")
