# SPDX-License-Identifier: Apache-2.0
"""Upstream's ``mooncake.mooncake_config``, by its name; see ``compat/config_file.py``."""

from mooncake.compat.config_file import (
    DEFAULT_GLOBAL_SEGMENT_SIZE,
    DEFAULT_LOCAL_BUFFER_SIZE,
    MooncakeConfig,
    logger,
)
from mooncake.compat.config_file import _parse_bool as _parse_bool
from mooncake.compat.config_file import _parse_segment_size as _parse_segment_size

__all__ = ["DEFAULT_GLOBAL_SEGMENT_SIZE", "DEFAULT_LOCAL_BUFFER_SIZE", "MooncakeConfig", "logger"]
