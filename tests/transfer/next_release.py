# SPDX-License-Identifier: Apache-2.0
"""Handshake clients of another release: their requests name the next version."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mooncake.transfer.descriptor import VERSION
from mooncake.transfer.handshake import HandshakeClient, HandshakeRequest


def use_next_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every client of this process send the next version; listeners keep theirs."""
    ask = HandshakeClient._ask

    def newer(self: HandshakeClient, address: str, message: HandshakeRequest, *more: Any) -> Any:
        return ask(self, address, msgspec.structs.replace(message, version=VERSION + 1), *more)

    monkeypatch.setattr(HandshakeClient, "_ask", newer)
