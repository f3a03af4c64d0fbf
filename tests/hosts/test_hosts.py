# SPDX-License-Identifier: Apache-2.0
"""A cluster over four hosts, each with its own addresses and shared memory, while links and hosts fail.

``scripts/test-hosts`` plays more rounds, prints what they took and compares it with bounds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.cluster import play
from tests.hosts.network import why_impossible

WHY_NOT = why_impossible()


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(WHY_NOT), reason=f"NOT RUN: no hosts can be made here: {WHY_NOT}")
def test_nothing_is_lost_or_wrong_when_links_and_hosts_fail(tmp_path: Path) -> None:
    figures = play(tmp_path)
    assert not figures.broken
    assert figures.num_carried >= figures.num_bytes > 0, "bytes between hosts pass the networks"
    assert figures.num_acknowledged and figures.num_checked and figures.num_answers
    assert figures.false_hits_s and figures.after_cut_s
