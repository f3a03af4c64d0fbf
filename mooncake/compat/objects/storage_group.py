# SPDX-License-Identifier: Apache-2.0
"""The storage group of a bundle: all its objects are in one group and evicted together.

Owns how a caller's configuration, which names one group, becomes the configuration of a call with several
keys. A configuration is copied before it is changed: it belongs to the caller.
"""

from __future__ import annotations

import copy
import uuid
from typing import Any

from mooncake.compat.store.public_types import ReplicateConfig


def new_group() -> str:
    return f"structured-{uuid.uuid4().hex}"


def group_of(config: Any) -> str | None:
    """Group that a configuration names: None if it names none, "" if it asks for no group.

    Raises:
        ValueError: several groups, or one that is not a string.
    """
    ids = getattr(config, "group_ids", None)
    if ids is None or isinstance(ids, str):
        return ids
    ids = list(ids)
    if not all(isinstance(group, str) for group in ids):
        raise ValueError("config.group_ids must contain strings")
    if len(ids) > 1:
        raise ValueError(f"config.group_ids names {len(ids)} groups; a structured object has one")
    return ids[0] if ids else None


def in_group(config: Any, group: str | None) -> Any:
    """``config`` with this group; without one, ``config`` itself."""
    if group is None:
        return config
    changed = ReplicateConfig() if config is None else copy.copy(config)
    changed.group_ids = [group]
    return changed


def for_keys(config: Any, num_keys: int) -> Any:
    """Configuration of a call with ``num_keys`` keys, which has a group for each of them."""
    if config is None or not hasattr(config, "group_ids"):
        return config
    group = group_of(config)
    wanted = None if group is None else [group] * num_keys
    if config.group_ids == wanted:
        return config
    changed = copy.copy(config)
    changed.group_ids = wanted
    return changed
