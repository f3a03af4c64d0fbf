"""Pages of any number of pieces, in one object each."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest

from mooncake.connectors.blocks import LinkSettings
from mooncake.connectors.pages import CHUNK_BYTES, Page, Pages, leading
from mooncake.connectors.session import PoolSettings
from tests.contract.connectors import StoreConnector

pytestmark = pytest.mark.processes

Bytes = npt.NDArray[np.uint8]


@pytest.fixture
def pages(daemon: StoreConnector, request: pytest.FixtureRequest) -> Iterator[Pages]:
    pool = PoolSettings(daemon.address, tenant=str(request.node.name))
    client = Pages(pool, LinkSettings(lookup_timeout_s=20.0, load_timeout_s=20.0))
    yield client
    client.close()


def page(key: str, pieces: list[Bytes]) -> Page:
    return Page(key, [(piece.ctypes.data, piece.nbytes) for piece in pieces])


def noise(sizes: list[int], seed: int) -> list[Bytes]:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, size, dtype=np.uint8) for size in sizes]


@pytest.mark.parametrize(
    "sizes",
    [[1], [4096] * 7, [3000, 2000], [5 * CHUNK_BYTES + 1], [CHUNK_BYTES - 1, 2 * CHUNK_BYTES], [10, 1, 100]],
    ids=str,
)
def test_pieces_of_any_size(pages: Pages, sizes: list[int]) -> None:
    written, read = noise(sizes, 1), [np.zeros(size, dtype=np.uint8) for size in sizes]
    assert pages.save([page("a", written)]) == [True]
    assert pages.load([page("a", read)]) == [True]
    assert all(np.array_equal(one, other) for one, other in zip(written, read, strict=True))


def test_a_page_of_another_size_is_a_miss(pages: Pages) -> None:
    assert pages.save([page("a", noise([100, 50], 1)), page("b", noise([100, 20], 2))]) == [True, True]
    short = [np.zeros(100, dtype=np.uint8), np.zeros(20, dtype=np.uint8)]
    assert pages.load([page("a", short), page("b", short)]) == [False, True]
    assert np.array_equal(short[0], noise([100, 20], 2)[0])


def test_what_there_is_no_room_for_is_not_saved(pages: Pages) -> None:
    large, small = np.zeros(96 << 20, dtype=np.uint8), noise([1000], 1)
    assert pages.save([page("large", [large]), page("small", small)]) == [False, True]
    assert pages.find(["large", "small"]) == [False, True]


def test_it_is_called_from_many_threads(pages: Pages) -> None:
    def turn(number: int) -> bool:
        pieces = [noise([512] * 3, number * 10 + index) for index in range(4)]
        keys = [f"{number} {index}" for index in range(4)]
        into = [[np.zeros(512, dtype=np.uint8) for _ in range(3)] for _ in keys]
        is_saved = pages.save([page(key, one) for key, one in zip(keys, pieces, strict=True)])
        is_loaded = pages.load([page(key, one) for key, one in zip(keys, into, strict=True)])
        return all(is_saved + is_loaded) and bool(np.array_equal(pieces, into))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(turn, range(24)))


def test_what_is_removed_or_forgotten_is_gone(pages: Pages) -> None:
    keys = ["kv/a/1", "kv/a/2", "kv/b/1"]
    assert all(pages.save([page(key, noise([100], 1)) for key in keys]))
    assert pages.remove(["kv/a/1", "none"]) == [True, False]
    assert pages.forget("kv/a/") == 1
    assert pages.find(keys) == [False, False, True]


def test_nothing_is_asked_of_nothing(pages: Pages) -> None:
    assert (pages.find([]), pages.load([]), pages.save([])) == ([], [], [])
    assert [leading(flags) for flags in ([], [True], [False, True], [True, False])] == [0, 1, 0, 1]
