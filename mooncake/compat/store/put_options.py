# SPDX-License-Identifier: Apache-2.0
"""Translation of a ``ReplicateConfig`` to the store's own options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from mooncake.compat.store.public_types import ReplicateConfig, SoftPinAction
from mooncake.errors import InvalidArgument
from mooncake.store.messages import ObjectStatus, PutPolicy

SOFT_PIN_S = 1800.0
"""Lifetime of a soft pin when the writer gives none."""
MAX_SOFT_PIN_MS = 86_400_000


@dataclass(frozen=True)
class PutOptions:
    """Policy and names of groups of a put; ``keeps_pin``: a replaced object's soft pin is inherited."""

    policy: PutPolicy
    groups: tuple[str, ...]
    keeps_pin: bool

    def at(self, places: Sequence[int]) -> PutOptions:
        """Options for some of the keys only."""
        return replace(self, groups=tuple(self.groups[i] for i in places) if self.groups else ())

    def keeps_group(self, place: int, there: ObjectStatus) -> bool:
        """Whether the object of a key would stay in its group; it cannot be replaced in another one."""
        return not self.groups or self.groups[place] == there.group

    def inheriting(self, there: ObjectStatus) -> PutOptions:
        """Options for one key whose object is replaced; those that are not given are inherited from it."""
        policy = self.policy
        is_hard = policy.is_hard_pinned or there.pinned_s is None  # the action is one for soft pins
        soft_s = policy.soft_pin_ttl_s
        if self.keeps_pin and there.pinned_s:
            soft_s = there.pinned_s
        changed = msgspec.structs.replace(policy, is_hard_pinned=is_hard, soft_pin_ttl_s=soft_s)
        return replace(self, policy=changed, groups=self.groups or (there.group,))


def put_options(config: ReplicateConfig, num_keys: int) -> PutOptions:
    """Translate ``config``.

    Raises:
        InvalidArgument: a value is invalid, or contradicts another.
        TypeError: not a configuration.
    """
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config must be a ReplicateConfig, not {type(config).__name__}")
    if config.replica_num < 1:
        raise InvalidArgument("replica_num", config.replica_num, "1 or more")
    if config.nof_replica_num or config.preferred_nof_segments:
        raise InvalidArgument(
            "nof_replica_num",
            config.nof_replica_num,
            "0: there is no such tier, SSDs belong to nodes",
        )
    if config.dfs_replica_num not in (0, 1):
        raise InvalidArgument("dfs_replica_num", config.dfs_replica_num, "0 or 1")
    if config.prefer_alloc_in_same_node and config.replica_num != 1:
        raise InvalidArgument("replica_num", config.replica_num, "1 with prefer_alloc_in_same_node")
    for name in ("group_ids", "session_ids"):
        ids = getattr(config, name)
        if ids is not None and len(ids) != num_keys:
            raise InvalidArgument(name, len(ids), f"one for each of {num_keys} keys")
    preferred = list(config.preferred_segments)
    if config.preferred_segment:
        preferred.append(config.preferred_segment)
    policy = PutPolicy(
        num_replicas=config.replica_num,
        preferred_segments=preferred,
        soft_pin_ttl_s=_soft_pin_s(config),
        is_hard_pinned=config.with_hard_pin,
        is_durable=config.dfs_replica_num == 1,
        data_type=int(config.data_type),
    )
    keeps_pin = config.soft_pin_action is SoftPinAction.PRESERVE
    return PutOptions(policy, tuple(config.group_ids or ()), keeps_pin)


def _soft_pin_s(config: ReplicateConfig) -> float | None:
    ttl_ms = config.soft_pin_ttl_ms
    if config.soft_pin_action is not SoftPinAction.ENABLE:
        if ttl_ms is not None:
            raise InvalidArgument("soft_pin_ttl_ms", ttl_ms, "None unless soft_pin_action is ENABLE")
        return None
    if ttl_ms is None:
        return SOFT_PIN_S
    if not 0 <= ttl_ms <= MAX_SOFT_PIN_MS:
        raise InvalidArgument("soft_pin_ttl_ms", ttl_ms, f"0 to {MAX_SOFT_PIN_MS}")
    return ttl_ms / 1000 if ttl_ms else None
