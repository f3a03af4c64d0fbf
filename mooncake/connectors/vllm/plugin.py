# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point (``vllm.general_plugins``): registers our connectors in each of its processes.

vLLM's own tree has connectors of these names, for the existing package. Where ours have the same features,
they replace those, so that a command line that names one works as soon as this package is installed. The
tree's remain available by ``kv_connector_module_path``, and ``VLLM_PLUGINS`` turns this off. On a device that
our connectors do not support yet, the tree's stay.
"""

from __future__ import annotations

MODULE = "mooncake.connectors.vllm"
NAMES = ("MooncakeStoreConnector", "MooncakeConnector")


def register() -> None:
    """Register our connectors if vLLM computes on a CPU; called by vLLM."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for name in NAMES:
        take_name(name)


def take_name(name: str) -> None:
    """Register our connector under ``name`` in this process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory._registry.pop(name, None)
    KVConnectorFactory.register_connector(name, MODULE, name)
