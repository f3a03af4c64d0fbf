"""The connectors by which vLLM finds us: what ``kv_connector_module_path`` may name.

``MooncakeStoreConnector`` (``vllm_store.py``) shares prefixes through the pool; ``MooncakeConnector``
(``vllm_direct.py``) hands a prompt's KV from the engine that prefills to the one that decodes. vLLM has
connectors of these names in its own tree, for the existing package; ours are taken when this module is
named, or where our package is installed and vLLM computes on a CPU (``plugin.py``).
"""

from __future__ import annotations

from mooncake.connectors.vllm_direct import MooncakeConnector
from mooncake.connectors.vllm_store import MooncakeStoreConnector

__all__ = ["MooncakeConnector", "MooncakeStoreConnector"]
