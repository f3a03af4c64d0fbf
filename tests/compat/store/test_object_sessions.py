# SPDX-License-Identifier: Apache-2.0
"""Any ranges, in any order, of objects that were found or reserved once."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake import clock
from mooncake.compat.store import object_sessions
from mooncake.compat.store.object_sessions import SESSION_CHUNK_BYTES
from mooncake.compat.store.range_reads import read_parts
from mooncake.compat.store.store import MooncakeDistributedStore
from mooncake.store.settings import MasterSettings
from tests.compat.store.servers import RunningMaster, a_store

MASTER = MasterSettings(port=0, lease_s=2.0, grace_s=0.0)  # a busy machine stops for a second
_numbers = itertools.count()
CONTENT = np.random.default_rng(3).integers(0, 256, 200_000, dtype=np.uint8)


def new_key() -> str:
    return f"session/{next(_numbers)}"


@st.composite
def ranges(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    found = []
    for _ in range(draw(st.integers(0, 5))):
        offset = draw(st.integers(0, size))
        found.append((offset, draw(st.integers(0, min(size - offset, 90_000)))))
    return found


def read(store: MooncakeDistributedStore, key: str, wanted: list[tuple[int, int]]) -> tuple[int, bytes]:
    target = np.zeros(max(1, sum(length for _, length in wanted)), dtype=np.uint8)
    pointers, at = [], target.ctypes.data
    for _, length in wanted:
        pointers.append(at)
        at += length
    lengths, offsets = [length for _, length in wanted], [offset for offset, _ in wanted]
    (num_bytes,) = store.batch_get_into_multi_buffer_ranges([key], [pointers], [lengths], [offsets])
    return num_bytes, target[: sum(lengths)].tobytes()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, CONTENT.size), st.data())
def test_any_ranges_of_any_object(store: MooncakeDistributedStore, size: int, data: st.DataObject) -> None:
    key, content = new_key(), CONTENT[:size]
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    pieces = [(a, b - a) for a, b in itertools.pairwise([0, *cuts, size]) if b > a]
    pieces = data.draw(st.permutations(pieces))
    split = data.draw(st.integers(0, len(pieces)))
    assert store.batch_put_session_start([key], [size]) == [0]
    for some in (pieces[:split], pieces[split:]):
        pointers = [content.ctypes.data + offset for offset, _ in some]
        lengths, offsets = [n for _, n in some], [offset for offset, _ in some]
        assert store.is_exist(key) == 0, "it is not visible before the end"
        assert store.batch_put_from_multi_buffer_ranges([key], [pointers], [lengths], [offsets]) == [
            sum(lengths)
        ]
    assert store.batch_put_session_end([key]) == [0]
    assert store.get(key) == content.tobytes()
    assert store.batch_get_session_start([key]) == [0]
    wanted = data.draw(ranges(size))
    num_bytes, found = read(store, key, wanted)
    assert num_bytes == sum(length for _, length in wanted) and type(num_bytes) is int
    assert found == b"".join(content[offset : offset + n].tobytes() for offset, n in wanted)
    assert store.batch_get_session_end([key]) == 0


def test_each_key_has_its_own_result(store: MooncakeDistributedStore) -> None:
    keys = [new_key() for _ in range(3)]
    assert store.put(keys[0], b"0123456789") == 0
    assert store.put(keys[2], b"abcdefghij") == 0
    assert store.batch_get_session_start(keys) == [0, -704, 0]
    target = np.zeros(64, dtype=np.uint8)
    at = target.ctypes.data
    results = store.batch_get_into_multi_buffer_ranges(
        keys, [[at, at + 8], [at + 16], [at + 32]], [[2, 3], [4], [11]], [[8, 0], [0], [0]]
    )
    assert results == [5, -600, -600], "one without a session, one longer than its object"
    assert bytes(target[:2]) + bytes(target[8:11]) == b"89012"
    assert store.batch_get_into_multi_buffer_ranges(keys[:1], [[at]], [[1, 2]], [[0]]) == [-600]
    assert store.batch_get_into_multi_buffer_ranges(keys[:1], [], [], []) == [-600]
    assert store.batch_get_into_multi_buffer_ranges(keys[:1], [[at]], [[1]], [[-1]]) == [-600]
    assert store.batch_get_into_multi_buffer_ranges(keys[:1], [[]], [[]], [[]]) == [0]
    assert store.batch_get_session_end(keys) == 0
    assert store.batch_get_into_multi_buffer_ranges(keys[:1], [[at]], [[1]], [[0]]) == [-600]
    assert store.batch_get_session_end(keys) == 0


def test_a_session_outlasts_the_lease(store: MooncakeDistributedStore) -> None:
    key = new_key()
    assert store.put(key, b"kept") == 0
    assert store.batch_get_session_start([key]) == [0]
    until = clock.monotonic() + 1.5 * MASTER.lease_s
    while clock.monotonic() < until:
        assert store.remove(key) == -706, "a reader holds it"
        time.sleep(0.02)  # the master and the thread that renews are in this process, too
    assert read(store, key, [(1, 2)]) == (2, b"ep")
    assert store.batch_get_session_end([key]) == 0
    while (code := store.remove(key)) != 0:
        assert code == -706


def test_a_session_that_ends_during_a_read_is_kept_alive_no_longer(
    store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, session = new_key(), store._session
    assert session is not None
    assert store.put(key, CONTENT.tobytes()) == 0
    kept = len(session.store._keeper._grants)  # sessions that earlier tests have left open
    for is_good in (True, False):

        def end_and_read(*args: Any, is_good: bool = is_good) -> list[bool]:
            assert store.batch_get_session_end([key]) == 0
            return [good and is_good for good in read_parts(*args)]

        assert store.batch_get_session_start([key]) == [0]
        monkeypatch.setattr(object_sessions, "read_parts", end_and_read)
        assert read(store, key, [(0, 9)])[0] == (9 if is_good else -704)
        monkeypatch.undo()
        assert key not in store._gets and len(session.store._keeper._grants) <= kept


def test_an_object_removed_by_force_is_a_miss(store: MooncakeDistributedStore) -> None:
    key = new_key()
    assert store.put(key, b"gone") == 0
    assert store.batch_get_session_start([key]) == [0]
    assert store.remove(key, force=True) == 0
    num_bytes = 4
    while num_bytes == 4:  # until the old lease ends its bytes may be read
        num_bytes, found = read(store, key, [(0, 4)])
        assert found == b"gone" or num_bytes != 4
    assert num_bytes == -704
    assert store.put(key, b"newer") == 0
    assert read(store, key, [(0, 4)])[0] == -704, "the session does not cover the new object"
    assert store.batch_get_session_end([key]) == 0


def test_refused_and_incomplete_puts(store: MooncakeDistributedStore) -> None:
    key = new_key()
    assert store.put(key, b"there") == 0
    assert store.batch_put_session_start([key], [5]) == [-705]
    other = new_key()
    assert store.batch_put_session_start([other, other + "b"], [8, 0]) == [0, -600]
    assert store.batch_put_session_start([other], [8]) == [-705], "it is being written"
    source = np.arange(8, dtype=np.uint8)
    at = source.ctypes.data
    assert store.batch_put_from_multi_buffer_ranges([other], [[at]], [[9]], [[0]]) == [-600]
    assert store.batch_put_from_multi_buffer_ranges([other], [[at]], [[4]], [[0]]) == [4]
    (code,) = store.batch_put_session_end([other])
    assert code < 0, "half of it is missing"
    assert store.is_exist(other) == 0
    assert store.batch_put_session_end([other]) == [-600]
    assert store.batch_put_from_multi_buffer_ranges([other], [[at]], [[4]], [[0]]) == [-600]
    assert store.batch_put_session_revoke([other]) == [-600]
    third = new_key()
    assert store.batch_put_session_start([third], [8]) == [0]
    assert store.batch_put_session_revoke([third]) == [0]
    assert store.batch_put_session_start([third], [8, 9]) == [-600]


def test_pages_of_a_put_session_are_read_one_by_one(store: MooncakeDistributedStore) -> None:
    key, page = new_key(), SESSION_CHUNK_BYTES
    content = np.random.default_rng(5).integers(0, 256, 3 * page, dtype=np.uint8)
    assert store.batch_put_session_start([key], [content.size]) == [0]
    pointers = [content.ctypes.data + n * page for n in range(3)]
    offsets = [[n * page for n in range(3)]]
    assert store.batch_put_from_multi_buffer_ranges([key], [pointers], [[page] * 3], offsets) == [3 * page]
    assert store.batch_put_session_end([key]) == [0]
    assert store.batch_get_session_start([key]) == [0]
    assert read(store, key, [(page, page)]) == (page, content[page : 2 * page].tobytes())
    assert store.batch_get_session_end([key]) == 0


def test_sessions_before_setup_and_after_close(master: RunningMaster) -> None:
    store = MooncakeDistributedStore()
    assert store.batch_get_session_start(["k"]) == []
    assert store.batch_get_session_end(["k"]) == -1
    assert store.batch_put_session_start(["k"], [1]) == []
    assert store.batch_put_session_end(["k"]) == []
    assert store.batch_put_session_revoke(["k"]) == []
    assert store.batch_get_into_multi_buffer_ranges(["k"], [[1]], [[1]], [[0]]) == []
    with a_store(master) as store:
        key = new_key()
        assert store.put(key, b"value") == 0
        assert store.batch_get_session_start([key]) == [0]
        assert store.batch_put_session_start([new_key()], [1]) == [0]
        assert store.close() == 0
        assert not store._gets and not store._puts, "they would keep the client that is closed"
        arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master.address)
        assert store.setup(*arguments) == 0
        assert read(store, key, [(0, 1)])[0] == -600, "that session ended with its store"


def test_invalid_pointers_fail_their_own_key(store: MooncakeDistributedStore) -> None:
    keys = [new_key(), new_key()]
    assert store.put_batch(keys, [bytes(1000)] * 2) == 0
    target = np.zeros(1000, dtype=np.uint8)
    at = target.ctypes.data
    assert store.batch_get_session_start(keys) == [0, 0]
    for nothing in (0, 8, 1 << 50, -5, 1 << 70):
        got = store.batch_get_into_multi_buffer_ranges(keys, [[nothing], [at]], [[100]] * 2, [[7]] * 2)
        assert got == [-600, 100]
    assert store.batch_get_session_end(keys) == 0
    other = new_key()
    assert store.batch_put_session_start([other], [100]) == [0]
    assert store.batch_put_from_multi_buffer_ranges([other], [[1 << 50]], [[100]], [[0]]) == [-600]
    assert store.batch_put_session_revoke([other]) == [0]


def test_wrong_types_are_type_errors(store: MooncakeDistributedStore) -> None:
    for wrong in ("key", None, [1]):
        with pytest.raises(TypeError):
            store.batch_get_session_start(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        store.batch_put_session_start(["a"], ["b"])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        store.batch_get_into_multi_buffer_ranges(["a"], [1], [[1]], [[0]])  # type: ignore[list-item]
