"""The summary of a replay."""

from __future__ import annotations

import pytest

from mooncake.cli.replay.open_loop import token_intervals


def test_the_longest_tenth_of_intervals_counts() -> None:
    assert token_intervals([]) == (0.0, 0.0)
    assert token_intervals([0.2]) == (0.2, 0.2)
    longest, mean = token_intervals([0.1] * 18 + [0.5, 0.3])
    assert longest == pytest.approx(0.4)
    assert mean == pytest.approx(0.13)
