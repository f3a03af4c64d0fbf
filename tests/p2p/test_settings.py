# SPDX-License-Identifier: Apache-2.0
"""Settings of a peer, as flags and environment give them."""

from __future__ import annotations

import pytest

from mooncake import config
from mooncake.errors import InvalidArgument
from mooncake.p2p import P2pSettings


def test_rates_are_sizes_and_peers_a_list() -> None:
    environment = {"MOONCAKE_P2P_LIMIT_RATE": "5MB", "MOONCAKE_P2P_PEERS": "a:1,b:2"}
    settings, _ = config.load(P2pSettings, {"limit_receive_rate_bytes": "1MiB"}, environment, None)
    assert (settings.limit_rate_bytes, settings.limit_receive_rate_bytes) == (5_000_000, 1 << 20)
    assert settings.peers == ("a:1", "b:2") and settings.host == "127.0.0.1"


@pytest.mark.parametrize(
    "wrong", [{"port": "70000"}, {"num_slots": "1"}, {"chunk_s": "0"}, {"limit_rate_bytes": "-1"}]
)
def test_impossible_values_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument):
        config.load(P2pSettings, wrong, {}, None)
