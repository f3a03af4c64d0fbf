from __future__ import annotations

import pytest

from mooncake.errors import Refusal
from mooncake.store.objects import Objects, State, check_put


def test_the_life_of_an_object() -> None:
    objects = Objects(0)
    stored = objects.begin("k", 9, 250, 100, [], write_until=30.0)
    assert stored.state is State.WRITING and stored.num_chunks == 3
    assert objects.writing == {"k": stored} and not objects.readable
    assert objects.finish("k", stored.object_id, b"abcdefghijkl", 29.9) is True
    assert objects.readable == {"k": stored} and not objects.writing
    assert stored.stored is not None and stored.stored.checksums == b"abcdefghijkl"
    objects.unlink(stored)
    assert not objects.readable and not stored.is_readable


def test_finishing_too_late_or_something_else_is_refused() -> None:
    objects = Objects(0)
    stored = objects.begin("k", 9, 10, 10, [], write_until=30.0)
    for key, object_id, now in (("k", stored.object_id, 30.0), ("k", 99, 0.0), ("l", 1, 0.0)):
        outcome = objects.finish(key, object_id, b"crc!", now)
        assert isinstance(outcome, Refusal) and outcome.code == "expired"


def test_ids_are_never_used_again() -> None:
    objects = Objects(0)
    first = objects.begin("k", 1, 1, 1, [], 1.0)
    objects.unlink(first)
    assert objects.begin("k", 1, 1, 1, [], 1.0).object_id > first.object_id


@pytest.mark.parametrize("key", ["k", "x" * 1024, "ключ", "kv/0123/abcd"])
def test_good_keys(key: str) -> None:
    assert check_put(key, 1, 1) is None


@pytest.mark.parametrize("key", ["", "x" * 1025, "ö" * 513, "a\0"])
def test_bad_keys(key: str) -> None:
    refusal = check_put(key, 1, 1)
    assert refusal is not None and refusal.code == "invalid_key"


def test_too_many_chunks() -> None:
    assert check_put("k", 1 << 20, 1) is None
    refusal = check_put("k", (1 << 20) + 1, 1)
    assert refusal is not None and refusal.code == "invalid_size"
