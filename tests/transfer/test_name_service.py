# SPDX-License-Identifier: Apache-2.0
"""When a descriptor is put, and how often; over a backend that counts and fails on demand."""

from __future__ import annotations

import threading
import time

import pytest

from mooncake.errors import PeerLost, ProtocolError
from mooncake.transfer import name_service
from mooncake.transfer.descriptor import SegmentDescriptor
from mooncake.transfer.name_service import NameService, metadata_key
from tests.transfer.dict_backend import DictBackend

DESCRIPTOR = SegmentDescriptor("one", "host", 7, {}, [])


def name_service_on(backend: DictBackend, epoch: int = 7) -> NameService:
    return NameService(backend, "", "one", epoch, lambda: DESCRIPTOR)


def keepers() -> int:
    return sum(thread.name == "mooncake-name-service" for thread in threading.enumerate())


def test_put_again_and_again_until_closed() -> None:
    backend = DictBackend()
    ours = name_service_on(backend)
    ours.publish(0.03, is_patient=False)
    assert backend.num_puts == 1 and ours.find("one") == DESCRIPTOR
    backend.entries.clear()
    backend.until(lambda: backend.num_puts >= 4)
    assert ours.find("one") == DESCRIPTOR
    ours.close()
    ours.close()
    puts = backend.num_puts
    assert backend.entries == {} and not keepers()
    ours.renew()
    assert backend.num_puts == puts, "a closed one puts no more"


def test_changes_are_put_before_the_call_returns() -> None:
    backend = DictBackend()
    ours = name_service_on(backend)
    ours.renew()
    assert backend.num_puts == 0, "not published, nothing to renew"
    ours.publish(3600, is_patient=False)
    ours.renew()
    assert backend.num_puts == 2
    with ours.deferred_publication():
        for _ in range(10):
            ours.renew()
        with ours.deferred_publication():
            ours.renew()
        other = threading.Thread(target=ours.renew)
        other.start()
        other.join()
        assert backend.num_puts == 3, "another thread's change does not wait for ours"
    assert backend.num_puts == 4
    ours.close()


def test_a_service_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = DictBackend()
    backend.is_away = True
    ours = name_service_on(backend)
    with pytest.raises(PeerLost):
        ours.publish(3600, is_patient=False)
    assert not keepers()
    monkeypatch.setattr(name_service, "RETRY_S", 0.02)
    ours.publish(3600, is_patient=True)
    backend.until(lambda: backend.num_attempts >= 4)
    backend.is_away = False
    backend.until(lambda: backend.num_puts == 1)
    monkeypatch.setattr(name_service, "RETRY_S", 3600)
    backend.is_away = True
    since = time.monotonic()
    ours.renew()
    attempts = backend.num_attempts
    for _ in range(1000):
        ours.renew()
    assert backend.num_attempts == attempts, "while it is away only the keeper thread tries"
    ours.close()
    assert not keepers() and time.monotonic() - since < 60
    assert backend.entries, "closing does not wait for a service that is away"


def test_only_its_own_entry_is_withdrawn() -> None:
    backend = DictBackend()
    ours = name_service_on(backend, epoch=6)  # the entry is that of epoch 7
    ours.publish(3600, is_patient=False)
    ours.close()
    assert list(backend.entries) == [metadata_key("one")]


def test_names() -> None:
    assert metadata_key("a", "blue") == "mooncake/blue/ram/a"
    backend = DictBackend()
    ours = name_service_on(backend)
    assert ours.find("missing") is None
    backend.entries[metadata_key("odd")] = b"[]"
    with pytest.raises(ProtocolError, match=r"the entry of odd is .*another service"):
        ours.find("odd")


def test_an_engine_that_is_no_more() -> None:
    backend = DictBackend()
    ours = NameService(backend, "", "one", 7, lambda: None)
    ours.publish(3600, is_patient=False)
    assert backend.num_puts == 0
    ours.close()
