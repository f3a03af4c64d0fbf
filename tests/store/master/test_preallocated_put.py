"""Small puts in one step, with the checks of PutStart and PutEnd."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.log_records import ObjectReadable
from mooncake.store.master.master import Master
from tests.store.conftest import GRACE_S, LEASE_S, PUT_S, SETTINGS, Voice
from tests.store.master.test_preallocation import places, preallocated

POOL = 65536
SIZE = 100


class Writer:
    """A client that has pieces and reports what it has written into them."""

    def __init__(self, voice: Voice, num_pieces: int = 4) -> None:
        self.voice = voice
        voice.mount("a", POOL)
        given = preallocated(voice, num_pieces)
        assert given is not None
        self.given = given
        voice.keep_alive(0.0)

    def put(self, key: str, number: int = 0, put_id: int = 5000, **more: Any) -> bool | Refusal:
        return self.say(key, number, put_id, **more).outcomes[0]

    def say(self, key: str, number: int = 0, put_id: int = 5000, **more: Any) -> m.PutsWritten:
        piece = more.pop("piece", (self.given.advance_id, number))
        size, crc = more.pop("size_bytes", SIZE), more.pop("checksums", b"crc!")
        reply = self.voice.say(
            m.PutWritten(put_id + ord(key[0]) if key else put_id, "h", [key], [size], [crc], [piece], **more)
        )
        assert isinstance(reply, m.PutsWritten)
        return reply


@pytest.fixture
def writer(voice: Voice) -> Writer:
    return Writer(voice)


def test_it_is_readable_where_it_was_written_and_takes_its_own_size(writer: Writer, voice: Voice) -> None:
    before = voice.allocated_bytes
    assert writer.put("k", 2, size_bytes=64) is True
    found = voice.find("k")
    assert found is not None and found.replicas == [writer.given.replicas[2]]
    assert (found.size_bytes, found.chunk_bytes, found.checksums) == (64, 64, b"crc!")
    assert voice.allocated_bytes == before - 64, "the rest of the piece is free"
    assert any("put as #" in line for line in voice.master.story("k"))


def test_its_space_is_free_again_when_it_goes(writer: Writer, voice: Voice) -> None:
    assert [writer.put(key, number) for number, key in enumerate("wxyz")] == [True] * 4
    assert [voice.remove(key) for key in "wxyz"] == [True] * 4
    voice.keep_alive(PUT_S + GRACE_S + 1)
    assert voice.allocated_bytes == 0


def test_a_taken_key_leaves_the_piece_to_its_writer(writer: Writer, voice: Voice) -> None:
    voice.put("k")
    assert writer.put("k") is False
    voice.start("l")
    assert writer.put("l") is False, "another writer is at it"
    assert writer.put("m") is True


def test_the_same_request_again_changes_nothing(writer: Writer, voice: Voice) -> None:
    assert [writer.put("k"), writer.put("k")] == [True, True]
    assert voice.remove("k") is True
    assert writer.put("k") is True, "it was put, whatever became of it"
    assert voice.inspect("k") is None


def test_a_piece_becomes_one_object(writer: Writer) -> None:
    assert writer.put("k", 0) is True
    outcome = writer.put("l", 0)
    assert isinstance(outcome, Refusal) and outcome.code == "expired"


def test_refusals_are_those_of_a_start(writer: Writer, voice: Voice) -> None:
    voice.say(m.SetQuota("small", 10))
    long_key = "k" * (m.MAX_KEY_BYTES + 1)
    for key, more, code in (
        ("", {}, "invalid_key"),
        (long_key, {}, "invalid_key"),
        ("k", {"size_bytes": 0}, "invalid_size"),
        ("k", {"checksums": b"long checksum"}, "invalid_checksums"),
        ("k", {"tenant": "small"}, "quota_exceeded"),
        ("k", {"tenant": "x" * 2000}, "unknown_tenant"),
        ("k", {"policy": m.PutPolicy(num_replicas=0)}, "invalid_policy"),
        ("k", {"policy": m.PutPolicy(num_replicas=2)}, "invalid_policy"),
        ("k", {"policy": m.PutPolicy(is_durable=True)}, "invalid_policy"),
        ("k", {"policy": m.PutPolicy(preferred_segments=["a"])}, "invalid_policy"),
    ):
        outcome = writer.put(key, **more)
        assert isinstance(outcome, Refusal) and outcome.code == code, (key[:10], more)
    assert writer.put("k") is True


def test_a_tenant_pays_for_what_it_put_and_not_for_what_it_may_put(writer: Writer, voice: Voice) -> None:
    voice.say(m.SetQuota("red", 250))
    assert writer.put("k", 0, tenant="red") is True
    assert writer.put("l", 1, tenant="red") is True
    quotas = {one.tenant: one for one in voice.say(m.AskQuotas()).quotas}
    assert quotas["red"].used_bytes == 200
    assert writer.put("m", 2, tenant="red") is True, "in the place of its oldest"
    assert voice.inspect("k", "red") is None and voice.inspect("m", "red") is not None


@pytest.mark.parametrize("piece", [(12345, 0), (None, 4), (None, -1)])
def test_space_that_was_not_given_is_refused(writer: Writer, piece: tuple[int | None, int]) -> None:
    name = (writer.given.advance_id if piece[0] is None else piece[0], piece[1])
    outcome = writer.put("k", piece=name)
    assert isinstance(outcome, Refusal) and outcome.code == "expired"


def test_more_than_fits_the_piece_is_refused(writer: Writer) -> None:
    outcome = writer.put("k", size_bytes=129)
    assert isinstance(outcome, Refusal) and outcome.code == "expired"


def test_who_comes_too_late_is_refused(writer: Writer, voice: Voice) -> None:
    voice.keep_alive(PUT_S - 1)
    assert writer.put("k") is True
    voice.keep_alive(1)
    outcome = writer.put("l", 1)
    assert isinstance(outcome, Refusal) and outcome.code == "expired"
    assert voice.master.counts.refused_puts == 0, "it is put anew"


def test_nothing_is_put_where_nothing_may_be_put_now(writer: Writer, voice: Voice) -> None:
    voice.lose("node a")
    outcome = writer.put("k")
    assert isinstance(outcome, Refusal) and outcome.code == "expired"


def test_groups_parents_and_pins_are_kept(voice: Voice) -> None:
    writer = Writer(voice)
    policy = m.PutPolicy(is_hard_pinned=True, data_type=3)
    assert writer.put("k", policy=policy, groups=["g"], parents=["above"], tenant="red") is True
    found = voice.inspect("k", "red")
    assert found is not None and (found.group, found.parent, found.data_type) == ("g", "above", 3)
    assert found.pinned_s is None
    record = [one for one in voice.records if isinstance(one, ObjectReadable)][-1]
    assert (record.is_hard_pinned, record.data_type) == (True, 3)


def test_the_answer_may_bring_the_next_pieces(writer: Writer) -> None:
    reply = writer.say("k", num_pieces=3, piece_bytes=256)
    assert reply.outcomes == [True] and reply.advance is not None
    assert len(set(places(reply.advance))) == 3 and reply.advance.size_bytes == 256
    taken = writer.say("k", 1, put_id=1, num_pieces=3, piece_bytes=256)
    assert taken.outcomes == [False] and taken.advance is not None, "also when the key is taken"


def test_columns_fit_together(voice: Voice) -> None:
    for message in (
        m.PutWritten(1, "h", ["k"], [], [], []),
        m.PutWritten(1, "h", ["k"], [1], [b"crc!"], [(1, 1)], groups=["a", "b"]),
    ):
        assert isinstance(voice.say(message), Failure)


def test_a_lease_protects_it_like_any_other(writer: Writer, voice: Voice) -> None:
    assert writer.put("k") is True
    assert voice.find("k") is not None
    assert isinstance(voice.remove("k"), Refusal)
    voice.keep_alive(LEASE_S)
    assert voice.remove("k") is True


def test_a_successor_has_it_and_refuses_the_pieces_that_are_left(writer: Writer, voice: Voice) -> None:
    assert writer.put("k", 1) is True
    follower = Master(SETTINGS)
    for record in voice.records:
        follower.apply([record], voice.now)
        follower.check()
    follower.settle(voice.now)
    stored = follower.objects.readable["k"]
    assert stored.extents[0].offset == writer.given.replicas[1].address - (1 << 20)
    voice.master = follower
    voice.mount("a", POOL)
    outcome = writer.put("l", 2)
    assert isinstance(outcome, Refusal) and outcome.code == "expired"
    follower.check()


def test_it_counts_as_a_start_and_an_end(writer: Writer, voice: Voice) -> None:
    counts = voice.master.request_counters.counts
    before = {name: counts[name] for name in ("put_start_requests", "put_end_requests", "put_start_failures")}
    assert writer.put("k") is True
    writer.put("", 1)
    writer.put("l", piece=(1, 1))
    after = {name: counts[name] - number for name, number in before.items()}
    assert after == {"put_start_requests": 2, "put_end_requests": 1, "put_start_failures": 1}
