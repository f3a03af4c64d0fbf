# SPDX-License-Identifier: Apache-2.0
"""``TransferEngine`` as programs written for the existing package know it: addresses in, numbers out.

No call raises when the environment fails: the number says that it failed and the log says why. All methods
may be called from any thread; the interpreter lock is not held while bytes move.
"""

from __future__ import annotations

from mooncake.compat import name_methods, public_in
from mooncake.compat.transfer.memory_calls import MemoryCalls
from mooncake.compat.transfer.public_types import TransferOpcode
from mooncake.compat.transfer.transfer_calls import TransferCalls


class DropInEngine(MemoryCalls, TransferCalls):
    """One engine of this process. Does nothing until ``initialize``."""

    TransferOpcode = TransferOpcode


DropInEngine.__name__ = DropInEngine.__qualname__ = "TransferEngine"
public_in("mooncake.engine", DropInEngine)
name_methods(DropInEngine)
TransferEngine = DropInEngine
"""Upstream's name, also in ``repr``, ``help`` and errors; distinct from our own class of that name."""
