# SPDX-License-Identifier: Apache-2.0
"""The existing package's module of this name, which vLLM up to 0.8.4 imports; see
``mooncake/compat/transfer/vllm_adaptor.py``."""

from mooncake.compat.transfer.vllm_adaptor import *  # noqa: F403
