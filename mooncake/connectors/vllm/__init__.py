# SPDX-License-Identifier: Apache-2.0
"""Our connectors for vLLM, for ``kv_connector_module_path``.

``MooncakeStoreConnector`` (``store_connector.py``) shares prefixes through the pool; ``MooncakeConnector``
(``push_connector.py``) moves a prompt's KV from the engine that prefills to the one that decodes;
``MooncakeECConnector`` (``encoder_connector.py``) shares outputs of multimodal encoders. vLLM has connectors
of the first two names in its own tree, for the existing package; ours are used when this module is named, or
where our package is installed and vLLM computes on a CPU or on CUDA (``plugin.py``).

Names load on first use, because the plugin runs in each of vLLM's processes before vLLM is set up.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mooncake.connectors.vllm.encoder_connector import MooncakeECConnector
    from mooncake.connectors.vllm.push_connector import MooncakeConnector
    from mooncake.connectors.vllm.store_connector import MooncakeStoreConnector

__all__ = ["MooncakeConnector", "MooncakeECConnector", "MooncakeStoreConnector"]

_OWNERS = {
    "MooncakeConnector": "mooncake.connectors.vllm.push_connector",
    "MooncakeECConnector": "mooncake.connectors.vllm.encoder_connector",
    "MooncakeStoreConnector": "mooncake.connectors.vllm.store_connector",
}


def __getattr__(name: str) -> Any:
    if name not in _OWNERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_OWNERS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OWNERS})
