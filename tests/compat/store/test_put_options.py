# SPDX-License-Identifier: Apache-2.0
"""Translation of configurations, and refusal of invalid ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mooncake.compat.store.public_types import ObjectDataType, ReplicateConfig, SoftPinAction
from mooncake.compat.store.put_options import SOFT_PIN_S, put_options
from mooncake.errors import InvalidArgument
from mooncake.store import MooncakeDistributedStore
from mooncake.store.messages import PutPolicy


def config(**fields: Any) -> ReplicateConfig:
    made = ReplicateConfig()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_the_default_configuration() -> None:
    assert put_options(ReplicateConfig(), 3).policy == PutPolicy()


def test_every_option() -> None:
    options = put_options(
        config(
            replica_num=2,
            preferred_segments=["a", "b"],
            preferred_segment="c",
            soft_pin_action=SoftPinAction.ENABLE,
            soft_pin_ttl_ms=1500,
            with_hard_pin=True,
            dfs_replica_num=1,
            data_type=ObjectDataType.TENSOR,
            group_ids=["g", "h"],
            session_ids=["s", "t"],
        ),
        2,
    )
    assert options.policy == PutPolicy(2, ["a", "b", "c"], 1.5, True, True, False, 2)
    assert options.groups == ("g", "h") and options.at([1]).groups == ("h",)


def test_soft_pins() -> None:
    assert put_options(config(with_soft_pin=True), 1).policy.soft_pin_ttl_s == SOFT_PIN_S
    for ttl_ms, seconds in ((0, None), (1, 0.001), (86_400_000, 86_400.0)):
        options = put_options(config(soft_pin_action=SoftPinAction.ENABLE, soft_pin_ttl_ms=ttl_ms), 1)
        assert options.policy.soft_pin_ttl_s == seconds


BAD: list[dict[str, Any]] = [
    {"replica_num": 0},
    {"nof_replica_num": 1},
    {"dfs_replica_num": 2},
    {"replica_num": 2, "prefer_alloc_in_same_node": True},
    {"soft_pin_ttl_ms": 1000},
    {"soft_pin_action": SoftPinAction.ENABLE, "soft_pin_ttl_ms": 86_400_001},
    {"group_ids": ["one", "too many"]},
    {"session_ids": []},
]


@pytest.mark.parametrize("fields", BAD)
def test_invalid_configurations(store: MooncakeDistributedStore, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=list(fields)[-1] if len(fields) == 1 else None):
        put_options(config(**fields), 1)
    assert store.put("bad", b"v", config(**fields)) == -600
    assert store.batch_put_from_multi_buffers(["bad"], [[1]], [[1]], config(**fields)) == [-600]
    assert store.is_exist("bad") == 0


@pytest.mark.parametrize("field", ["soft_pin_ttl_ms", "replica_num", "nof_replica_num"])
@pytest.mark.parametrize("value", [-1, 1 << 64, "1", 1.0])
def test_counts_are_unsigned_numbers(field: str, value: Any) -> None:
    with pytest.raises(TypeError, match=field):
        config(**{field: value})


def test_an_upsert_inherits_pins_and_groups(store: MooncakeDistributedStore) -> None:
    hard, soft = config(with_hard_pin=True, group_ids=["g"]), config(with_soft_pin=True)
    assert store.put("hard", b"1", hard) == store.put("soft", b"1", soft) == store.put("plain", b"1") == 0
    keys = ["hard", "soft", "plain", "new"]
    assert store.upsert_batch(keys, [b"two"] * 4) == 0
    assert store.get_batch(keys) == [b"two"] * 4
    assert store._store is not None
    found = [status for status in store._store.inspect(keys) if status is not None]
    assert [status.pinned_s is None for status in found] == [True, False, False, False]
    assert found[0].group == "g"
    assert found[1].pinned_s and found[1].pinned_s > SOFT_PIN_S - 100 and found[2].pinned_s == 0
    assert store.upsert("soft", b"3", config(soft_pin_action=SoftPinAction.DISABLE)) == 0
    (status,) = store._store.inspect(["soft"])
    assert status is not None and status.pinned_s == 0
    assert store.remove("hard", force=True) == 0


@pytest.mark.parametrize("action", list(SoftPinAction))
def test_an_action_on_soft_pins_leaves_a_hard_pin(store: MooncakeDistributedStore, action: Any) -> None:
    key = f"hard/{action.name}"
    assert store.put(key, b"one", config(with_hard_pin=True)) == 0
    assert store.upsert(key, b"two", config(soft_pin_action=action)) == 0
    assert store._store is not None
    (status,) = store._store.inspect([key])
    assert status is not None and status.pinned_s is None and store.get(key) == b"two"


def test_an_upsert_changes_no_group(store: MooncakeDistributedStore) -> None:
    keys = ["in g", "in none", "new in g"]
    assert store.put(keys[0], b"1", config(group_ids=["g"])) == store.put(keys[1], b"1") == 0
    assert store.upsert(keys[0], b"other", config(group_ids=["h"])) == -600
    assert store.upsert(keys[0], b"none", config(group_ids=[""])) == -600
    assert store.upsert(keys[1], b"some", config(group_ids=["g"])) == -600
    assert store.get_batch(keys) == [b"1", b"1", b""]
    memory = np.frombuffer(b"two", np.uint8)
    codes = store.batch_upsert_from(
        keys, [memory.ctypes.data] * 3, [memory.nbytes] * 3, config(group_ids=["g", "h", "g"])
    )
    assert codes == [0, -600, 0] and store.get_batch(keys) == [b"two", b"1", b"two"]
    assert store.upsert(keys[1], b"empty", config(group_ids=[""])) == 0
    assert store.upsert(keys[0], b"not given") == 0
    assert store._store is not None
    (status,) = store._store.inspect([keys[0]])
    assert status is not None and status.group == "g"
