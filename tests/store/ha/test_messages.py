# SPDX-License-Identifier: Apache-2.0
"""Messages between masters: their encoding, and which clients may send them."""

from __future__ import annotations

import msgspec
import pytest

from mooncake.rpc.wire import HEADER_BYTES, decoder_for, encode
from mooncake.security.principal import EVERYBODY, NODES
from mooncake.store import messages as m
from mooncake.store.ha import messages as ha_messages
from mooncake.store.ha.messages import Follow, Followed, Leads, WhoLeads
from mooncake.store.master.log_records import ObjectGone, QuotaSet


@pytest.mark.parametrize(
    "message",
    [
        Follow("b", "b:1", 3, 70, 5),
        Followed(70, 6, [ObjectGone("k", 9), QuotaSet("red", None)], True),
        WhoLeads(),
        Leads("a:1", 3, False),
    ],
)
def test_a_message_is_decoded_as_it_was_encoded(message: msgspec.Struct) -> None:
    """Also beside all messages of the store, which share the connection: no two have the same tag."""
    everything = decoder_for((*m.REQUESTS, *m.REPLIES, Follow, Followed, WhoLeads, Leads))
    assert everything.decode(bytes(encode(1, message))[HEADER_BYTES:]) == message


def test_only_nodes_may_copy_the_state_and_every_client_may_ask_for_the_leader() -> None:
    assert ha_messages.ACCESS[Follow] == NODES and ha_messages.ACCESS[WhoLeads] == EVERYBODY
    assert not ha_messages.ACCESS.keys() & m.ACCESS.keys()
