# SPDX-License-Identifier: Apache-2.0
"""vLLM's entry point (``vllm.general_plugins``): registers our connectors in each of its processes.

vLLM's own tree has connectors of these names, for the existing package. Ours move KV memory of CPUs and of
CUDA devices. There they replace those, so that a command line that names one works as soon as this package is
installed. The tree's remain available by ``kv_connector_module_path``, and ``VLLM_PLUGINS`` turns this off.
On another kind of device the tree's stay; the store's then takes the options of ours.
"""

from __future__ import annotations

MODULE = "mooncake.connectors.vllm"
NAMES = ("MooncakeStoreConnector", "MooncakeConnector")
ENCODER = "MooncakeECConnector"


def register() -> None:
    """Register our connectors for the device on which vLLM computes; called by vLLM."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.platforms import current_platform

    if ENCODER not in ECConnectorFactory._registry:  # a name of our own, on every device
        ECConnectorFactory.register_connector(ENCODER, MODULE, ENCODER)
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        module = "mooncake.connectors.vllm.device_store_connector"
        take_name("MooncakeStoreConnector", module, "DeviceStoreConnector")
        return
    for name in NAMES:
        take_name(name)


def take_name(name: str, module: str = MODULE, class_name: str = "") -> None:
    """Register a class of ``module``, by default that of the same name, under ``name`` in this process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory._registry.pop(name, None)
    KVConnectorFactory.register_connector(name, module, class_name or name)
