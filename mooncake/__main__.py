# SPDX-License-Identifier: Apache-2.0
"""``python -m mooncake``: the command ``mooncake`` without its console script."""

from mooncake.cli import main

if __name__ == "__main__":
    main()
