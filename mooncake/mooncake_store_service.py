# SPDX-License-Identifier: Apache-2.0
"""Upstream's ``mooncake.mooncake_store_service``, also with ``python -m``; see ``compat/rest_service.py``."""

from mooncake.compat.rest_service import MooncakeStoreService, _shm_name_to_path, main

__all__ = ["MooncakeStoreService", "_shm_name_to_path", "main"]

if __name__ == "__main__":
    main()
