# SPDX-License-Identifier: Apache-2.0
"""P2P store: checkpoints and weights between peers, without a master.

A folder or buffers are registered under a name at one peer; others load them from it and, chunk by chunk as
they have them, from each other::

    async with P2PStore(P2pSettings(port=7300)) as trainer:
        await trainer.register("model", Path("checkpoints/step-100"))

    async with P2PStore(P2pSettings(port=0, peers=("trainer:7300",))) as worker:
        await worker.get("model", Path("models/step-100"))
"""

from mooncake.p2p.messages import LoadProgress, VersionInfo
from mooncake.p2p.settings import P2pSettings
from mooncake.p2p.store import P2PStore

__all__ = ["LoadProgress", "P2PStore", "P2pSettings", "VersionInfo"]
