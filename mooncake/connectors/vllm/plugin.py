"""vLLM's entry point (``vllm.general_plugins``): makes our connectors known in each of its processes.

vLLM's own tree has connectors of these names, for the existing package. Where we can do what they do, ours
take their place, so that a command line that names one works as soon as this package is installed. They
stay within reach by ``kv_connector_module_path``, and ``VLLM_PLUGINS`` turns this off. On a device that our
connectors do not reach yet, the tree's stay.
"""

from __future__ import annotations

MODULE = "mooncake.connectors.vllm"
NAMES = ("MooncakeStoreConnector", "MooncakeConnector")


def register() -> None:
    """Called by vLLM."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for name in NAMES:
        take_name(name)


def take_name(name: str) -> None:
    """In this process ``name`` is our connector's."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory._registry.pop(name, None)
    KVConnectorFactory.register_connector(name, MODULE, name)
