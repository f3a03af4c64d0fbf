# SPDX-License-Identifier: Apache-2.0
"""The store as SGLang's third level of KV cache.

``mooncake.connectors.sglang`` is the module that SGLang loads by name; the class is in ``hicache.py`` and
loads on first use, because LMCache's connector needs ``cache_identity`` where there may be no SGLang.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake.connectors.sglang.hicache import MooncakeHiCache

__all__ = ["MooncakeHiCache"]

_OWNERS = {"MooncakeHiCache": "mooncake.connectors.sglang.hicache"}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OWNERS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWNERS})
