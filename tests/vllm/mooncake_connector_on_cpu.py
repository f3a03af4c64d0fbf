# SPDX-License-Identifier: Apache-2.0
"""vLLM's own MooncakeConnector where there is no accelerator.

Its worker reads the number of the current device and nothing else of it; a CPU has none. Loaded by
``kv_connector_module_path``; everything else is the connector as vLLM ships it.
"""

import torch

torch.accelerator.current_device_index = lambda: 0

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (  # noqa: E402
    MooncakeConnector,
)

__all__ = ["MooncakeConnector"]
