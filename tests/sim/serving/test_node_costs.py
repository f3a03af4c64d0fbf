# SPDX-License-Identifier: Apache-2.0
"""Cost files: all that are shipped can be read, and match the paper; fits give back the model that made the
samples.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from random import Random

import msgspec
import pytest

from mooncake.conductor.prediction import DecodeModel, PrefillModel
from mooncake.errors import InvalidArgument
from mooncake.sim.serving.node_costs import (
    PrefillSample,
    StepSample,
    builtin_costs,
    fit_costs,
    fit_decode,
    fit_prefill,
    load_costs,
)


def test_every_shipped_file_is_whole() -> None:
    assert {"llama2-70b-8xA800", "llama3-70b-8xA800", "llama3-70b-8xH100", "llama3-70b-8xH200"} <= set(
        builtin_costs()
    )
    for name in builtin_costs():
        costs = load_costs(name)
        assert costs.source and costs.models.prefill is costs.prefill


@pytest.mark.parametrize(
    ("num_tokens", "seconds"), [(8192, 1.00), (16384, 2.05), (32768, 4.48), (65536, 10.58), (131072, 27.52)]
)
def test_prefill_is_that_of_the_paper(num_tokens: int, seconds: float) -> None:
    assert load_costs("llama3-70b-8xA800").prefill_s(0, num_tokens) == pytest.approx(seconds, rel=0.026)


@pytest.mark.parametrize(("num_tokens", "seconds"), [(8192, 0.13), (32768, 0.41), (131072, 2.33)])
def test_so_is_prefill_behind_a_cached_prefix(num_tokens: int, seconds: float) -> None:
    num_cached = int(num_tokens * 0.95)
    assert load_costs("llama3-70b-8xA800").prefill_s(num_cached, num_tokens) == pytest.approx(
        seconds, abs=0.3
    )


def test_a_file_of_your_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("title = 'mine'")
    with pytest.raises(InvalidArgument, match=r"costs is .*mine\.toml.*missing required field"):
        load_costs(str(path))
    with pytest.raises(InvalidArgument, match="llama3-70b-8xA800"):
        load_costs("llama4")


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("c1 = ", "c1 = -", r"prefill\.c1 is -.*from 0 on"),
        ("base_s = ", "base_s = nan # ", r"decode\.base_s is nan"),
        ("nic_bytes_per_s = ", "nic_bytes_per_s = inf # ", "nic_bytes_per_s is inf"),
    ],
)
def test_a_cost_that_is_no_time_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    text = (resources.files("mooncake.sim") / "data" / "llama3-70b-8xH100.toml").read_text()
    assert f"\n{old}" in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(f"\n{old}", f"\n{new}"))
    with pytest.raises(InvalidArgument, match=rf"costs is .*mine\.toml.*{named}"):
        load_costs(str(path))


def test_steps_take_time() -> None:
    with pytest.raises(InvalidArgument, match=r"decode is DecodeModel.*takes time"):
        msgspec.structs.replace(load_costs("llama3-70b-8xH100"), decode=DecodeModel(0.0, 0.0, 0.0))


def test_prefill_is_found_again() -> None:
    model = PrefillModel(0.02, 1.5e-4, 3e-9)
    spans = [(0, 100), (0, 1000), (500, 4000), (0, 16000), (8000, 9000)]
    samples = [PrefillSample(first, end, model.seconds(first, end)) for first, end in spans]
    found, error = fit_prefill(samples)
    assert error < 1e-9
    assert (found.c0, found.c1, found.c2) == pytest.approx((model.c0, model.c1, model.c2), rel=1e-6)


def test_decode_is_found_again() -> None:
    model = DecodeModel(0.026, 1.4e-4, 3.5e-8)
    samples = [
        StepSample(size, size * length, model.seconds(size, size * length))
        for size in (1, 4, 16)
        for length in (500, 8000)
    ]
    found, error = fit_decode(samples)
    assert error < 1e-9
    assert found.per_token_s == pytest.approx(model.per_token_s, rel=1e-6)


def test_noise_never_makes_a_cost_negative() -> None:
    random = Random(3)
    for _ in range(50):
        samples = [
            PrefillSample(0, end, 1e-4 * end * random.uniform(0.5, 1.5)) for end in (64, 128, 512, 2048)
        ]
        found, error = fit_prefill(samples)
        assert min(found.c0, found.c1, found.c2) >= 0 < found.seconds(0, 512)
        assert error < 0.6


@pytest.mark.parametrize("samples", [[], [PrefillSample(0, 64, 1.0)] * 5])
def test_too_few_lengths_are_refused(samples: list[PrefillSample]) -> None:
    with pytest.raises(InvalidArgument, match="three different"):
        fit_prefill(samples)


def test_times_must_have_passed() -> None:
    with pytest.raises(InvalidArgument, match="seconds is 0"):
        fit_decode([StepSample(1, 1, 0.1), StepSample(2, 1, 0.0), StepSample(3, 1, 0.1)])


def test_no_coefficient_is_below_the_least_it_can_be() -> None:
    """The others are fitted to what remains, with errors relative to the whole."""
    rows = [(1.0, float(size), float(size * context)) for size in (1, 4, 16) for context in (500, 2000)]
    seconds = [0.01 + 2e-4 * size for _, size, _ in rows]
    assert fit_costs(rows, seconds).coefficients[2] == pytest.approx(0.0, abs=1e-12)
    base_s, per_request_s, per_token_s = fit_costs(rows, seconds, (0.0, 0.0, 5e-8)).coefficients
    assert per_token_s == 5e-8 and base_s == pytest.approx(0.01, rel=0.1)
    assert 0 < per_request_s < 2e-4
    seconds = [one + 9e-8 * context for one, (_, _, context) in zip(seconds, rows, strict=True)]
    assert fit_costs(rows, seconds, (0.0, 0.0, 5e-8)).coefficients == pytest.approx((0.01, 2e-4, 9e-8))
