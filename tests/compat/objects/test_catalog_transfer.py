# SPDX-License-Identifier: Apache-2.0
"""A worker and a catalog that fails at any call: what was stored is published once, or removed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mooncake.compat.objects.catalog import DataProtoCatalog
from mooncake.compat.objects.catalog_transfer import DataProtoCatalogTransfer
from mooncake.compat.objects.transfer import MooncakeBundleTransfer
from tests.compat.objects.plain_store import PlainStore


class Rows(dict[str, Any]):
    """A DataProto with a length."""

    def __len__(self) -> int:
        return len(next(iter(self["batch"].values())))


class Host:
    """The catalog's host: calls in ``fails`` have their effect, and their answer is lost.

    Calls in ``refuses`` have none.
    """

    def __init__(self) -> None:
        self.catalog = DataProtoCatalog()
        self.fails: dict[str, int] = {}
        self.refuses: dict[str, Exception] = {}

    def call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in self.refuses:
            raise self.refuses[name]
        answer = getattr(self.catalog, name)(*args, **kwargs)
        if self.fails.get(name, 0):
            self.fails[name] -= 1
            raise ConnectionError(name)
        return answer


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def worker(plain: PlainStore, host: Host) -> DataProtoCatalogTransfer:
    return DataProtoCatalogTransfer(MooncakeBundleTransfer(plain, "rl"), host.call)


def rows(start: int, name: str = "ids") -> Rows:
    return Rows(batch={name: np.arange(start, start + 2)}, meta_info={})


def test_a_fragment_lives_as_long_as_its_keys_and_readers(
    worker: DataProtoCatalogTransfer, plain: PlainStore
) -> None:
    worker.put(rows(0), partition="p", keys=["a", "b"], stage="s")
    plan = worker.resolve("p", ["b"])
    (group,) = plan["field_groups"]
    ((fragment, row),) = group["locations"]
    handle = plan["handles"][fragment]
    worker.remove("p", ["a", "b"])
    assert worker.transfer.get_dataproto(handle, rows=[row])["batch"]["ids"].tolist() == [1]
    worker.release_read(plan["read_token"])
    assert plain.objects == {} and worker.list() == {}


def test_an_append_that_lost_leaves_nothing(worker: DataProtoCatalogTransfer, plain: PlainStore) -> None:
    worker.put(rows(0), partition="p", keys=["a", "b"], stage="s")
    plan = worker.resolve("p", ["a", "b"])
    ((fragment, handle),) = plan["handles"].items()
    where = {"partition": "p", "keys": ["a", "b"], "stage": "s"}
    answer = worker.append(fragment, handle, rows(5, "more"), **where)  # type: ignore[arg-type]
    assert answer["fields"] == ["ids", "more"]
    objects = dict(plain.objects)
    with pytest.raises(ValueError, match="stale"):
        worker.append(fragment, handle, rows(7, "other"), **where)  # type: ignore[arg-type]
    assert plain.objects == objects
    worker.release_read(plan["read_token"])
    worker.drain()
    assert plain.objects == {}


@pytest.mark.parametrize("name", ["publish", "ack_publication", "ack_retired"])
def test_a_lost_answer_is_made_up_for(
    worker: DataProtoCatalogTransfer, host: Host, plain: PlainStore, name: str
) -> None:
    host.fails = {name: 1}
    worker.put(rows(0), partition="p", keys=["a", "b"])
    worker.put(rows(2), partition="p", keys=["a", "b"])
    assert worker.resolve("p", ["a", "b"])["tags"] == [{}, {}]
    worker.release_read(1)
    host.fails = {}
    worker.drain()
    assert plain.objects == {}
    assert host.catalog.drain() == {"retired_handles": []}


def test_a_publication_is_kept_until_it_succeeds(worker: DataProtoCatalogTransfer, host: Host) -> None:
    host.fails = {"publish": 3}
    with pytest.raises(ConnectionError):
        worker.put(rows(0), partition="p", keys=["a", "b"])
    with pytest.raises(RuntimeError, match=r"pending .* 1 item"):
        worker.put(rows(2), partition="p", keys=["c", "d"])
    worker.put(rows(2), partition="p", keys=["c", "d"])
    assert worker.list()["p"].keys() == {"a", "b", "c", "d"}


def test_a_refused_publication_leaves_nothing_and_blocks_nothing(
    worker: DataProtoCatalogTransfer, host: Host, plain: PlainStore
) -> None:
    host.refuses = {"publish": ValueError("no room for more keys")}
    with pytest.raises(ValueError, match="no room"):
        worker.put(rows(0), partition="p", keys=["a", "b"])
    assert plain.objects == {}
    host.refuses = {}
    worker.put(rows(2), partition="p", keys=["c", "d"])
    assert worker.list()["p"].keys() == {"c", "d"}


def test_a_publication_that_is_refused_later_is_given_up(
    worker: DataProtoCatalogTransfer, host: Host, plain: PlainStore
) -> None:
    host.refuses = {"publish": ConnectionError("gone"), "publication": ConnectionError("gone")}
    with pytest.raises(ConnectionError):
        worker.put(rows(0), partition="p", keys=["a", "b"])
    with pytest.raises(RuntimeError, match=r"pending .* 1 item"):
        worker.put(rows(2), partition="p", keys=["c", "d"])
    assert plain.objects
    host.refuses = {"publish": TypeError("no such tags")}
    with pytest.raises(TypeError):
        worker.put(rows(2), partition="p", keys=["c", "d"])
    assert plain.objects == {}


def test_an_error_is_no_refusal_of_what_was_recorded(
    worker: DataProtoCatalogTransfer, host: Host, plain: PlainStore
) -> None:
    def call(name: str, *args: Any, **kwargs: Any) -> Any:
        answer = host.call(name, *args, **kwargs)
        if name == "publish":
            raise ValueError("the answer is not JSON")
        return answer

    damaged = DataProtoCatalogTransfer(worker.transfer, call)
    with pytest.raises(ValueError, match="not JSON"):
        damaged.put(rows(0), partition="p", keys=["a", "b"])
    handle = next(iter(worker.resolve("p", ["a"])["handles"].values()))
    assert worker.transfer.get_dataproto(handle)["batch"]["ids"].tolist() == [0, 1]


def test_a_drained_catalog_blocks_no_worker(
    worker: DataProtoCatalogTransfer, host: Host, plain: PlainStore
) -> None:
    host.refuses = {"publish": ConnectionError("gone"), "publication": ConnectionError("gone")}
    with pytest.raises(ConnectionError):
        worker.put(rows(0), partition="p", keys=["a", "b"])
    host.refuses = {}
    host.catalog.drain()
    with pytest.raises(RuntimeError, match="drained"):
        worker.put(rows(2), partition="p", keys=["c", "d"])
    worker.drain()
    assert plain.objects == {}


def test_objects_of_a_refused_publication_are_removed_later(
    worker: DataProtoCatalogTransfer, host: Host, plain: PlainStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.refuses = {"publish": ValueError("no")}
    with monkeypatch.context() as patched:
        patched.setattr(plain, "remove", lambda key, force=False: -900)
        with pytest.raises(ValueError, match="no"):
            worker.put(rows(0), partition="p", keys=["a", "b"])
        with pytest.raises(RuntimeError, match="clean up 1"):
            worker.drain()
    worker.drain()
    assert plain.objects == {}


def test_what_cannot_be_published_is_removed(worker: DataProtoCatalogTransfer, plain: PlainStore) -> None:
    class Unknown:
        pass

    data = rows(0)
    data["meta_info"] = {"x": Unknown()}
    with pytest.raises(TypeError, match="JSON-safe"):
        worker.put(data, partition="p", keys=["a", "b"])
    assert plain.objects == {}
    worker.put(rows(0), partition="p", keys=["a", "b"], stage="s")
    ((fragment, handle),) = worker.resolve("p", ["a", "b"])["handles"].items()
    before = dict(plain.objects)
    more = rows(5, "more")
    more["meta_info"] = {"x": Unknown()}
    with pytest.raises(TypeError, match="JSON-safe"):
        worker.append(fragment, handle, more, partition="p", keys=["a", "b"], stage="s")
    assert plain.objects == before


def test_an_append_does_not_overwrite(worker: DataProtoCatalogTransfer, plain: PlainStore) -> None:
    worker.put(rows(0), partition="p", keys=["a", "b"], stage="s")
    ((fragment, handle),) = worker.resolve("p", ["a", "b"])["handles"].items()
    before = dict(plain.objects)
    both = rows(5)
    both["batch"]["more"] = np.arange(2)
    where: dict[str, Any] = {"partition": "p", "keys": ["a", "b"], "stage": "s"}
    with pytest.raises(ValueError, match="cannot overwrite"):
        worker.append(fragment, handle, both, overwrite=True, **where)
    assert plain.objects == before
    assert worker.append(fragment, handle, rows(5, "more"), overwrite=False, **where)["fields"] == [
        "ids",
        "more",
    ]


def test_objects_that_cannot_be_removed_are_tried_again(
    worker: DataProtoCatalogTransfer, plain: PlainStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.put(rows(0), partition="p", keys=["a", "b"])
    with monkeypatch.context() as patched:
        patched.setattr(plain, "remove", lambda key, force=False: -900)
        worker.remove("p", ["a", "b"])
        with pytest.raises(RuntimeError, match="clean up 1"):
            worker.drain()
    worker.drain()
    assert plain.objects == {}


def test_a_fragment_that_another_removed_is_acknowledged(
    worker: DataProtoCatalogTransfer, host: Host, plain: PlainStore
) -> None:
    worker.put(rows(0), partition="p", keys=["a", "b"])
    handle = next(iter(worker.resolve("p", ["a"])["handles"].values()))
    worker.transfer.cleanup_dataproto(handle)
    assert plain.objects == {}
    worker.release_read(1)
    worker.drain()
    assert host.catalog.drain() == {"retired_handles": []}


def test_results_are_released_with_their_output(worker: DataProtoCatalogTransfer) -> None:
    released: list[Any] = []

    class Output:
        pass

    worker.transfer = type("Transfer", (), {"release_result": staticmethod(released.append)})()
    output = Output()
    worker.attach_results(output, [1, 2])
    worker.release_result(output)
    worker.release_result(output)
    assert released == [1, 2]

    def refuse(result: Any) -> None:
        raise RuntimeError("busy")

    worker.transfer = type("Transfer", (), {"release_result": staticmethod(refuse)})()
    worker.discard_results([3])
    with pytest.raises(RuntimeError, match="1 result"):
        worker.close()
    worker.transfer = type("Transfer", (), {"release_result": staticmethod(released.append)})()
    worker.close()
    assert released == [1, 2, 3]


def test_arguments_are_checked_before_anything_is_stored(
    worker: DataProtoCatalogTransfer, plain: PlainStore
) -> None:
    for arguments in ({"keys": ["a"]}, {"keys": "ab"}, {"keys": ["a", "b"], "tags": [{}]}):
        with pytest.raises(ValueError, match=r"."):
            worker.put(rows(0), partition="p", **arguments)
    with pytest.raises(ValueError, match="tags or DataProto data"):
        worker.put(None, partition="p", keys=["a"])
    assert plain.objects == {}
