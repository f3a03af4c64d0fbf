# SPDX-License-Identifier: Apache-2.0
"""Options and plugins of the whole suite: which skips are accepted, and that random examples stay the same.

Tests with random examples draw the same ones in every run, so that a failure is caused by a change. New
examples are drawn by ``scripts/nightly``, which passes ``--hypothesis-profile random`` and prints the seed.
"""

from __future__ import annotations

import importlib.util

import pytest

from mooncake.state_table import Faults
from tests import skips

if importlib.util.find_spec("hypothesis") is not None:  # the environment of vLLM lacks it
    from hypothesis import HealthCheck, settings

    # An example's duration depends on other load on the machine; no test asserts a speed.
    UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("same", UNTIMED, derandomize=True)
    settings.register_profile("random", UNTIMED, derandomize=False, print_blob=True)
    settings.load_profile("same")  # --hypothesis-profile is read later and takes precedence


def pytest_addoption(parser: pytest.Parser) -> None:
    skips.add_option(parser)
    parser.addoption(
        "--rewrite",
        action="store_true",
        help="write what the cores decided into tests/scenarios/*.txt, for reading in the diff",
    )


def pytest_configure(config: pytest.Config) -> None:
    Faults.raises = True  # an unexpected event of a state machine fails the test
    skips.register(config)
