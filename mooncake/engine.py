# SPDX-License-Identifier: Apache-2.0
"""Upstream's ``mooncake.engine``, by its name; see ``compat/transfer/engine_module.py``."""

from mooncake.compat.transfer.engine_module import *  # noqa: F403
