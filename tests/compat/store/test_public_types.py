# SPDX-License-Identifier: Apache-2.0
"""Value types behave as the existing package's bindings do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mooncake.store as store
from mooncake.compat.store.public_types import (
    Descriptor,
    DiskDescriptor,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
)
from mooncake.compat.transfer.public_types import BoundEnum


def test_enumerations() -> None:
    assert int(ObjectDataType.KVCACHE) == ObjectDataType.KVCACHE.value == 1 == ObjectDataType(1)
    assert ObjectDataType.TENSOR.name == "TENSOR" and str(ObjectDataType.TENSOR) == "ObjectDataType.TENSOR"
    assert list(SoftPinAction.__members__) == ["PRESERVE", "ENABLE", "DISABLE"]
    assert (int(TaskStatus.FAILED), int(TaskStatus.SUCCESS)) == (2, 3)
    assert store.TENSOR is ObjectDataType.TENSOR and store.COMPLETE is ReplicaStatus.COMPLETE
    assert type(store.FAILED) is type(store.PROCESSING) is TaskStatus
    with pytest.raises(ValueError):
        ObjectDataType(99)


@pytest.mark.parametrize(
    "kind",
    [ObjectDataType, SoftPinAction, ReplicaStatus, TaskType, TaskStatus],
    ids=lambda kind: kind.__name__,
)
def test_every_member_is_true(kind: type[BoundEnum]) -> None:
    """Else ``config.data_type or ObjectDataType.KVCACHE`` replaces a member that was chosen."""
    assert kind(0) == 0 and all(kind)


def test_attributes_of_a_configuration() -> None:
    config = ReplicateConfig()
    config.replica_num = 2
    config.with_hard_pin = True
    config.data_type = ObjectDataType.WEIGHT
    config.preferred_segments = ("a", "b")
    config.group_ids = ["g"]
    config.group_ids = None
    assert config.preferred_segments == ["a", "b"]
    for probe in ("group_ids", "session_ids", "with_soft_pin", "preferred_segment"):
        assert hasattr(config, probe)
    shown = str(config)
    for field in (
        "replica_num: 2",
        "data_type: WEIGHT",
        "soft_pin_ttl_ms: default",
        "[a, b]",
        "with_hard_pin: 1",
    ):
        assert field in shown
    with pytest.raises(TypeError):
        ReplicateConfig(replica_num=2)  # type: ignore[call-arg]


def test_unknown_attributes_and_wrong_types() -> None:
    config = ReplicateConfig()
    with pytest.raises(AttributeError, match="colour"):
        config.colour = "red"
    with pytest.raises(AttributeError, match="colour"):
        _ = config.colour
    for name, value in (("replica_num", "two"), ("with_hard_pin", "yes"), ("preferred_segments", "a")):
        with pytest.raises(TypeError, match=name):
            setattr(config, name, value)
    with pytest.raises(TypeError, match="data_type"):
        config.data_type = 99


def test_values_of_other_types_that_mean_the_same() -> None:
    """Attributes take what has an integer or a truth value of its own, and become plain Python values."""

    class Word(str):
        def __str__(self) -> str:
            return "another text"

    config = ReplicateConfig()
    given: dict[str, tuple[Any, Any]] = {
        "replica_num": (np.int64(2), 2),
        "dfs_replica_num": (True, 1),
        "soft_pin_ttl_ms": (np.int32(5), 5),
        "with_hard_pin": (1, True),
        "prefer_alloc_in_same_node": (np.bool_(True), True),
        "preferred_segment": (b"s", "s"),
        "preferred_segments": (np.array(["a", "b"]), ["a", "b"]),
        "group_ids": ([Word("g"), b"h"], ["g", "h"]),
    }
    for name, (value, expected) in given.items():
        setattr(config, name, value)
        found = getattr(config, name)
        assert found == expected and type(found) is type(expected), name
        if isinstance(found, list):
            assert {type(item) for item in found} == {str}
    for value in (None, 0, 0.0, np.bool_(False)):
        config.with_hard_pin = value
        assert config.with_hard_pin is False
    for name, value in (("replica_num", np.float64(1)), ("replica_num", -1), ("with_hard_pin", [])):
        with pytest.raises(TypeError, match=name):
            setattr(config, name, value)


def test_the_older_soft_pin() -> None:
    config = ReplicateConfig()
    config.with_soft_pin = True
    assert config.soft_pin_action is SoftPinAction.ENABLE and config.with_soft_pin
    config.with_soft_pin = False
    assert not config.with_soft_pin and "soft_pin_action: PRESERVE" in str(config)


def test_a_replica_on_ssd() -> None:
    copy = ReplicaDescriptor(ReplicaStatus.COMPLETE, DiskDescriptor("n/ssd", 7))
    assert copy.is_local_disk_replica() and not copy.is_memory_replica()
    assert copy.get_disk_descriptor().object_size == 7
    with pytest.raises(RuntimeError, match="memory"):
        copy.get_memory_descriptor()
    with pytest.raises(AttributeError):
        Descriptor().colour = 1  # type: ignore[attr-defined]
