"""When a descriptor is put, and how often; over a backend that counts and fails on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from mooncake.errors import PeerLost, ProtocolError
from mooncake.transfer import name_service
from mooncake.transfer.descriptor import SegmentDescriptor
from mooncake.transfer.name_service import NameService, metadata_key


class Shelf:
    """A metadata backend in a dictionary."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.num_puts = 0
        self.num_attempts = 0
        self.is_away = False
        self.changed = threading.Condition()

    def get(self, key: str) -> bytes | None:
        if self.is_away:
            raise PeerLost("away")
        return self.entries.get(key)

    def put(self, key: str, value: bytes, ttl_s: float | None = None) -> None:
        with self.changed:
            self.num_attempts += 1
            self.changed.notify_all()
            if self.is_away:
                raise PeerLost("away")
            self.entries[key] = value
            self.num_puts += 1

    def remove(self, key: str) -> bool:
        return self.entries.pop(key, None) is not None

    def list(self, prefix: str) -> list[str]:
        return sorted(key for key in self.entries if key.startswith(prefix))

    def close(self) -> None: ...

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 30), "it did not happen within 30 s"


DESCRIPTOR = SegmentDescriptor("one", "host", 7, {}, [])


def directory_in(shelf: Shelf, epoch: int = 7) -> NameService:
    return NameService(shelf, "", "one", epoch, lambda: DESCRIPTOR)


def keepers() -> int:
    return sum(thread.name == "mooncake-name-service" for thread in threading.enumerate())


def test_put_again_and_again_until_closed() -> None:
    shelf = Shelf()
    ours = directory_in(shelf)
    ours.publish(0.03, is_patient=False)
    assert shelf.num_puts == 1 and ours.find("one") == DESCRIPTOR
    shelf.entries.clear()
    shelf.until(lambda: shelf.num_puts >= 4)
    assert ours.find("one") == DESCRIPTOR
    ours.close()
    ours.close()
    puts = shelf.num_puts
    assert shelf.entries == {} and not keepers()
    ours.renew()
    assert shelf.num_puts == puts, "a closed one puts no more"


def test_changes_are_put_before_the_call_returns() -> None:
    shelf = Shelf()
    ours = directory_in(shelf)
    ours.renew()
    assert shelf.num_puts == 0, "not published, nothing to renew"
    ours.publish(3600, is_patient=False)
    ours.renew()
    assert shelf.num_puts == 2
    with ours.deferred_publication():
        for _ in range(10):
            ours.renew()
        with ours.deferred_publication():
            ours.renew()
        other = threading.Thread(target=ours.renew)
        other.start()
        other.join()
        assert shelf.num_puts == 3, "another thread's change does not wait for ours"
    assert shelf.num_puts == 4
    ours.close()


def test_a_service_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = Shelf()
    shelf.is_away = True
    ours = directory_in(shelf)
    with pytest.raises(PeerLost):
        ours.publish(3600, is_patient=False)
    assert not keepers()
    monkeypatch.setattr(name_service, "RETRY_S", 0.02)
    ours.publish(3600, is_patient=True)
    shelf.until(lambda: shelf.num_attempts >= 4)
    shelf.is_away = False
    shelf.until(lambda: shelf.num_puts == 1)
    monkeypatch.setattr(name_service, "RETRY_S", 3600)
    shelf.is_away = True
    since = time.monotonic()
    ours.renew()
    attempts = shelf.num_attempts
    for _ in range(1000):
        ours.renew()
    assert shelf.num_attempts == attempts, "while it is away only the keeper thread tries"
    ours.close()
    assert not keepers() and time.monotonic() - since < 60
    assert shelf.entries, "closing does not wait for a service that is away"


def test_only_its_own_entry_is_withdrawn() -> None:
    shelf = Shelf()
    ours = directory_in(shelf, epoch=6)  # the entry is that of epoch 7
    ours.publish(3600, is_patient=False)
    ours.close()
    assert list(shelf.entries) == [metadata_key("one")]


def test_names() -> None:
    assert metadata_key("a", "blue") == "mooncake/blue/ram/a"
    shelf = Shelf()
    ours = directory_in(shelf)
    assert ours.find("missing") is None
    shelf.entries[metadata_key("odd")] = b"[]"
    with pytest.raises(ProtocolError, match=r"the entry of odd is .*another service"):
        ours.find("odd")


def test_an_engine_that_is_no_more() -> None:
    shelf = Shelf()
    ours = NameService(shelf, "", "one", 7, lambda: None)
    ours.publish(3600, is_patient=False)
    assert shelf.num_puts == 0
    ours.close()
