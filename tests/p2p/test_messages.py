# SPDX-License-Identifier: Apache-2.0
"""Messages between peers: bits, and who may send what."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake.errors import ProtocolError
from mooncake.p2p import messages as m
from mooncake.rpc.wire import decoder_for
from mooncake.security import Principal, Role


@pytest.mark.parametrize("number", [0, 1, 7, 8, 9, 1000])
def test_bits_are_read_as_they_were_written(number: int) -> None:
    bits = np.random.default_rng(number).random(number) < 0.5
    assert np.array_equal(m.unpack_bits(m.pack_bits(bits), number), bits)


@pytest.mark.parametrize(("packed", "number"), [(b"", 1), (b"xx", 8), (b"x", 0), (b"", 1 << 40)])
def test_bits_of_another_length_are_refused(packed: bytes, number: int) -> None:
    with pytest.raises(ProtocolError):
        m.unpack_bits(packed, number)


def test_who_may_send_what() -> None:
    node, client, admin = (Principal(role) for role in (Role.NODE, Role.CLIENT, Role.ADMIN))
    tenant = Principal(Role.CLIENT, "t")
    for kind in m.PEER_REQUESTS:
        assert m.ACCESS.table[kind] == {"node", "admin"}
    command = m.CommandDrop("m", "", True)
    assert not m.ACCESS.refusal(command, admin)
    assert all(m.ACCESS.refusal(command, one) for one in (node, client, tenant))
    assert all(m.ACCESS.refusal(m.AskSegment(), one) for one in (client, tenant))


def test_every_message_can_be_decoded_among_the_others() -> None:
    assert decoder_for([*m.PEER_REQUESTS, *m.COMMANDS]) and decoder_for(m.REPLIES)


def test_what_a_peer_says_of_versions_is_checked() -> None:
    good = m.VersionInfo("m", 1, "a" * 64, 10, 2, 1)
    assert list(m.valid_versions([good])) == [good]
    for name, number, digest, size, chunks, have in (
        ("\x1b[2J", 1, "a" * 64, 10, 2, 1),
        ("m", 0, "a" * 64, 10, 2, 1),
        ("m", 1, "A" * 64, 10, 2, 1),
        ("m", 1, "../x", 10, 2, 1),
        ("m", 1, "a" * 64, -1, 2, 1),
        ("m", 1, "a" * 64, 10, 1 << 40, 1),
        ("m", 1, "a" * 64, 10, 2, 3),
    ):
        assert not list(m.valid_versions([m.VersionInfo(name, number, digest, size, chunks, have)]))


def test_what_a_peer_says_of_deltas_is_checked() -> None:
    """It is announced to others, so that no peer lets another one announce text without limit."""
    good = m.DeltaInfo("b" * 64, "c" * 64, 5)
    wrong = [
        m.DeltaInfo("\x1b[31m" + "x" * 59, "c" * 64, 5),
        m.DeltaInfo("b" * 64, "c" * (1 << 20), 5),
        m.DeltaInfo("b" * 64, "c" * 64, -1),
    ]
    [info] = m.valid_versions([m.VersionInfo("m", 1, "a" * 64, 10, 2, 1, [*wrong, *[good] * 100])])
    assert info.deltas == [good] * m.MAX_DELTAS
