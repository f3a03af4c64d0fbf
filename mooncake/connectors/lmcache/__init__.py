# SPDX-License-Identifier: Apache-2.0
"""The store as a storage backend of LMCache.

``mooncake.connectors.lmcache`` is the module that LMCache loads by name; the class is in ``backend.py`` and
loads on first use, because tests and tools need ``cache_identity`` where there is no LMCache.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake.connectors.lmcache.backend import MooncakeBackend

__all__ = ["MooncakeBackend"]

_OWNERS = {"MooncakeBackend": "mooncake.connectors.lmcache.backend"}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OWNERS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWNERS})
