# SPDX-License-Identifier: Apache-2.0
"""The existing package's ``mooncake.vllm_v1_proxy_server``: its flags in front of our gateway."""

from __future__ import annotations

from mooncake.compat.programs.proxy import main

if __name__ == "__main__":
    main()
