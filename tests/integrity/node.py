# SPDX-License-Identifier: Apache-2.0
"""A node that publishes the address of a proxy, its first argument, instead of its own.

The other arguments are ``NodeSettings`` as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys

from mooncake.store.node import node
from tests.faults.peer import BehindProxy


def main() -> None:
    BehindProxy.proxy = sys.argv[1]
    node.TransferEngine = BehindProxy  # type: ignore[attr-defined]
    asyncio.run(node.serve(node.NodeSettings(**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    main()
