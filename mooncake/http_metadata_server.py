# SPDX-License-Identifier: Apache-2.0
"""Upstream's ``mooncake.http_metadata_server``, also for ``-m``; see ``compat/metadata_server.py``."""

from mooncake.compat.metadata_server import KVBootstrapServer, KVPoll, main

__all__ = ["KVBootstrapServer", "KVPoll", "main"]

if __name__ == "__main__":
    main()
