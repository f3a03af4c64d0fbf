# SPDX-License-Identifier: Apache-2.0
"""Encoder outputs to and from a real store; every failure is a miss."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from mooncake.compat.store.tensor_format import HEADER_BYTES
from mooncake.connectors import encoder_transfer as module
from mooncake.connectors.encoder_output import EncoderIdentity, EncoderOutput, Expectation, pack
from mooncake.connectors.encoder_transfer import EncoderLookup, EncoderSave, EncoderTransfer
from mooncake.connectors.session import PoolSession, PoolSettings
from mooncake.connectors.store_link import LinkSettings
from mooncake.metrics import registry
from tests.contract.connectors import StoreConnector

IDENTITY = EncoderIdentity.of(weights="w")
EXPECTED = Expectation("float32", 5, 16)
SETTINGS = LinkSettings(lookup_timeout_s=2.0, load_timeout_s=5.0, retry_after_s=60.0)


@pytest.fixture(scope="module")
def session(daemon: StoreConnector) -> Iterator[PoolSession]:
    running = PoolSession(PoolSettings(daemon.address), SETTINGS.load_timeout_s)
    yield running
    running.close()


@pytest.fixture
def transfer(session: PoolSession) -> EncoderTransfer:
    return EncoderTransfer(session, SETTINGS)


def output(seed: int = 0, rows: int = 5) -> EncoderOutput:
    values = np.random.default_rng(seed).random((rows, 16), dtype=np.float32)
    return EncoderOutput("float32", (rows, 16), values.reshape(-1).view(np.uint8))


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def look_up(
    transfer: EncoderTransfer,
    name: str,
    is_loaded: bool = True,
    expected: Expectation = EXPECTED,
    **more: Any,
) -> EncoderLookup:
    ended: SimpleQueue[EncoderLookup] = SimpleQueue()
    content = more.get("content", lambda: digest(name))
    transfer.look_up(content, more.get("identity", IDENTITY), expected, is_loaded, ended.put)
    return ended.get(timeout=30)


def save(transfer: EncoderTransfer, name: str, saved: EncoderOutput) -> EncoderSave:
    ended: SimpleQueue[EncoderSave] = SimpleQueue()
    transfer.save(IDENTITY.key(digest(name)), saved, ended.put)
    return ended.get(timeout=30)


def counted(name: str, **labels: str) -> float:
    return registry.get_sample_value(f"mooncake_connectors_encoder_{name}_total", labels) or 0.0


def test_an_output_that_was_saved_is_found(transfer: EncoderTransfer) -> None:
    before = counted("bytes", direction="loaded"), counted("lookups", outcome="hit")
    missing = look_up(transfer, "first")
    assert (missing.outcome, missing.key, missing.output) == ("miss", IDENTITY.key(digest("first")), None)
    assert save(transfer, "first", output()).outcome == "saved"
    found = look_up(transfer, "first")
    assert found.outcome == "hit" and found.output is not None
    assert found.output.data.tobytes() == output().data.tobytes()
    assert (found.output.dtype, found.output.shape) == ("float32", (5, 16))
    after = counted("bytes", direction="loaded"), counted("lookups", outcome="hit")
    assert (after[0] - before[0], after[1] - before[1]) == (5 * 16 * 4, 1)


def test_an_output_of_another_identity_is_not_found(transfer: EncoderTransfer) -> None:
    save(transfer, "identity", output())
    for facts in ({"weights": "v"}, {"weights": "w", "processor": "p"}):
        assert look_up(transfer, "identity", identity=EncoderIdentity.of(**facts)).outcome == "miss"


def test_a_producer_only_asks_whether_it_is_there(transfer: EncoderTransfer) -> None:
    assert look_up(transfer, "present", is_loaded=False).outcome == "miss"
    save(transfer, "present", output())
    found = look_up(transfer, "present", is_loaded=False)
    assert (found.outcome, found.output) == ("hit", None)


def test_an_intact_output_of_another_shape_is_refused_and_stays_for_those_that_expect_it(
    transfer: EncoderTransfer,
) -> None:
    save(transfer, "shape", output(rows=6))
    for expected, code in ((EXPECTED, "shape"), (Expectation("bfloat16", 6, 16), "dtype")):
        refused = look_up(transfer, "shape", expected=expected)
        assert refused.outcome == "refused" and refused.output is None and code in refused.reason
    found = look_up(transfer, "shape", expected=Expectation("float32", 6, 16)).output
    assert found is not None and found.data.tobytes() == output(rows=6).data.tobytes()


@pytest.mark.parametrize("expected", [EXPECTED, Expectation("float32", 6, 16)], ids=["expected", "other"])
def test_a_value_that_another_program_has_changed_is_refused_and_makes_room_for_the_right_one(
    transfer: EncoderTransfer, session: PoolSession, expected: Expectation
) -> None:
    name = f"changed {expected.num_rows}"
    key = IDENTITY.key(digest(name))
    value = pack(key, output())
    value[HEADER_BYTES + 10] ^= 4
    session.wait(session.store.put(key, value))
    refused = look_up(transfer, name, expected=expected)
    assert refused.outcome == "refused" and "digest" in refused.reason
    assert save(transfer, name, output(seed=3)).outcome == "saved"
    found = look_up(transfer, name).output
    assert found is not None and found.data.tobytes() == output(seed=3).data.tobytes()


def test_a_second_save_changes_nothing(transfer: EncoderTransfer) -> None:
    save(transfer, "twice", output(seed=1))
    assert save(transfer, "twice", output(seed=2)).outcome == "saved"
    found = look_up(transfer, "twice").output
    assert found is not None and found.data.tobytes() == output(seed=1).data.tobytes()


def test_an_output_that_has_no_format_is_not_saved(transfer: EncoderTransfer) -> None:
    strange = EncoderOutput("complex64", (5, 16), output().data)
    assert save(transfer, "strange", strange).outcome == "failed"


def test_saves_are_bounded(transfer: EncoderTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING_BYTES", output().size_bytes - 1)
    assert save(transfer, "bounded", output()).outcome == "refused"
    assert look_up(transfer, "bounded").outcome == "miss"
    monkeypatch.undo()
    assert save(transfer, "bounded", output()).outcome == "saved", "what was refused is not pending"


def test_content_that_cannot_be_hashed_has_no_key(transfer: EncoderTransfer) -> None:
    def content() -> bytes:
        raise TypeError("video is a generator, whose content can't be hashed")

    failed = look_up(transfer, "", content=content)
    assert (failed.outcome, failed.key) == ("failed", None) and "generator" in failed.reason


def test_a_store_that_is_gone_is_asked_once_and_then_not_at_all(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    running = StoreConnector()
    running.start(tmp_path_factory.mktemp("gone"))
    settings = LinkSettings(lookup_timeout_s=0.2, load_timeout_s=0.2, retry_after_s=60.0)
    session = PoolSession(PoolSettings(running.address), settings.load_timeout_s)
    try:
        transfer = EncoderTransfer(session, settings)
        assert save(transfer, "gone", output()).outcome == "saved"
        running.signal(signal.SIGKILL)
        first, second = look_up(transfer, "gone"), look_up(transfer, "gone")
        assert (first.outcome, second.outcome) == ("failed", "failed")
        assert second.key is not None and "a moment ago" in second.reason
        assert save(transfer, "gone", output()).outcome == "refused"
    finally:
        session.close()
        running.stop()
