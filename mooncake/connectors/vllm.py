"""The connectors by which vLLM finds us: what ``kv_connector_module_path`` may name.

``MooncakeStoreConnector`` (``vllm_store.py``) shares prefixes through the pool. vLLM has a connector of
that name in its own tree, for the existing package; ours is taken when this module is named, or where our
package is installed and vLLM computes on a CPU (``plugin.py``).
"""

from __future__ import annotations

from mooncake.connectors.vllm_store import MooncakeStoreConnector

__all__ = ["MooncakeStoreConnector"]
