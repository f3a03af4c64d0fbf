# SPDX-License-Identifier: Apache-2.0
"""Which replies a leader sends, and after whose acknowledgement; a standby's state equals the leader's."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from mooncake.rpc.wire import HEADER_BYTES, decoder_for, encode
from mooncake.security.principal import EVERYBODY, NODES
from mooncake.store import messages as m
from mooncake.store.ha import leader_search, standby_replication
from mooncake.store.ha.election import Standby
from mooncake.store.ha.leader_search import Leads, WhoLeads
from mooncake.store.ha.standby_replication import IDLE_S, Follow, Followed, StandbyReplicator
from mooncake.store.master.effects import AppendRecords, Received, Reply
from mooncake.store.master.log_records import ObjectGone, ObjectReadable, QuotaSet, Record
from mooncake.store.master.master import Master
from mooncake.store.master.snapshot import Snapshot
from tests.store.conftest import SETTINGS

ACK_S = 1.0
B, C = Standby("b", "b:1"), Standby("c", "c:1")


class Scene:
    """A leader of which only the replication is real, and the replies it sent."""

    def __init__(self, *inherited: Standby) -> None:
        self.master = Master(SETTINGS)
        self.eligible: dict[str, None] = {one.id: None for one in inherited}
        self.followers = StandbyReplicator(
            self.master.catalog, list(inherited), lambda: self.eligible, ACK_S, first_session=70
        )
        self.sent: list[Any] = []
        self.answers: dict[str, Followed] = {}
        self.now = 0.0

    def _send(self, replies: list[Reply]) -> None:
        for reply in replies:
            if isinstance(reply.message, Followed):
                self.answers[reply.origin] = reply.message
            else:
                self.sent.append(reply.origin)

    def do(self, what: str) -> None:
        """Write a record and answer it."""
        self._send(self.followers.keep([ObjectGone(what, 1)], self.now))
        self._send(self.followers.say(Reply(what, m.Outcomes([True])), self.now))
        self.followers.check()

    def follow(
        self, who: Standby = B, session: int = 0, have: int = 0, connection: str = ""
    ) -> Followed | None:
        self.answers.pop(who.id, None)
        question = Follow(who.id, who.address, 1, session, have)
        self._send(self.followers.follow(question, who.id, connection or who.id, self.now))
        self._send(self.followers.let_go())
        self.followers.check()
        return self.answers.get(who.id)

    def join(self, who: Standby = B) -> int:
        """Follow until it is listed, without other events; returns the session."""
        first = self.follow(who)
        assert first is not None and first.is_complete
        assert self.follow(who, first.session, first.number) is None, "it waits"
        assert who.id in self.followers.listed
        self.eligible[who.id] = None
        return first.session

    def unlist(self) -> None:
        """The leader record lists no standby."""
        self.eligible.clear()
        self._send(self.followers.let_go())

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while (deadline := self.followers.deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self._send(self.followers.expire(self.now))
            self._send(self.followers.let_go())
            self.followers.check()
        self.now = until


def test_without_standbys_every_reply_is_sent_at_once() -> None:
    scene = Scene()
    scene.do("a")
    assert scene.sent == ["a"] and scene.followers.deadline() is None


def test_what_follows_records_waits_for_the_standby() -> None:
    scene = Scene()
    session = scene.join()
    scene.do("a")
    assert scene.sent == [] and scene.answers["b"].records == [ObjectGone("a", 1)]
    scene.do("b")
    assert scene.follow(B, session, scene.answers["b"].number) is not None
    assert scene.sent == ["a"], "of the second it knows nothing yet"
    scene.follow(B, session, scene.answers["b"].number)
    assert scene.sent == ["a", "b"] and scene.followers.lag == 0


def test_a_standby_that_joins_under_load_is_listed_only_with_all_records() -> None:
    scene = Scene()
    scene.do("a")
    first = scene.follow()
    assert first is not None and first.number == 1
    scene.do("b")
    assert scene.sent == ["a", "b"] and not scene.followers.listed
    second = scene.follow(B, first.session, first.number)
    assert second is not None and second.records == [ObjectGone("b", 1)]
    scene.do("c")
    assert scene.sent == ["a", "b"], "from now on it is waited for"
    assert not scene.followers.listed
    third = scene.follow(B, first.session, second.number)
    assert third is not None and scene.followers.listed == {"b": B}
    scene.follow(B, first.session, third.number)
    assert scene.sent == ["a", "b", "c"]


def test_a_slow_standby_is_removed_and_counts_until_the_leader_record_shows_it() -> None:
    scene = Scene()
    scene.join()
    scene.do("a")
    scene.wait(ACK_S - 0.01)
    assert "b" in scene.followers.listed
    scene.wait(0.02)
    assert "b" not in scene.followers.listed and scene.sent == []
    scene.wait(10.0)
    assert scene.sent == []
    scene.unlist()
    assert scene.sent == ["a"]


def test_a_lost_connection_strikes_at_once() -> None:
    scene = Scene()
    scene.join(B)
    scene.join(C)
    scene.followers.lost("b")
    assert scene.followers.listed == {"c": C}


def test_a_standby_inherited_from_the_last_term_counts_until_it_is_struck() -> None:
    scene = Scene(B)
    scene.do("a")
    assert scene.sent == []
    scene.wait(ACK_S + 0.01)
    assert not scene.followers.listed
    scene.unlist()
    assert scene.sent == ["a"]


def test_no_reply_rests_on_records_that_an_inherited_standby_may_lack() -> None:
    """The last leader may have died with a record sent only to this master. If that were read or confirmed
    here at once, and this master died too, the other standby would lead without it."""
    scene = Scene(B)
    scene._send(scene.followers.say(Reply("read", m.Keys([])), 0.0))
    assert scene.sent == [], "it rests on what this master had when the term began"
    first = scene.follow(B)
    assert first is not None and first.is_complete and scene.sent == []
    scene.follow(B, first.session, first.number)
    assert scene.sent == ["read"]


def test_a_returning_standby_begins_anew_and_is_not_listed_meanwhile() -> None:
    scene = Scene()
    session = scene.join()
    again = scene.follow(B, session, 0, connection="another")
    assert again is not None and again.session != session and not scene.followers.listed


def test_a_waiting_standby_is_answered_after_a_while() -> None:
    scene = Scene()
    session = scene.join()
    scene.answers.clear()
    scene.wait(IDLE_S + 0.01)
    assert scene.answers["b"] == Followed(session, 0, [], is_complete=True)
    scene.wait(2 * IDLE_S + 0.01)
    assert not scene.followers.listed, "it did not ask again"


def test_answers_are_small_enough_to_be_sent() -> None:
    scene = Scene()
    session = scene.join()
    first = scene.answers["b"].number if "b" in scene.answers else 0
    large: list[Record] = [
        ObjectReadable(f"k{number}", number, 1 << 40, 1 << 20, bytes(4 << 20), [("a", 0)])
        for number in range(5)
    ]
    scene._send(scene.followers.keep(large, 0.0))
    got: list[Record] = []
    numbers: list[int] = []
    while len(got) < 5:
        answer = scene.answers["b"]
        got += answer.records
        numbers.append(answer.number)
        assert sum(len(one.checksums) for one in answer.records if isinstance(one, ObjectReadable)) <= 8 << 20
        scene.follow(B, session, answer.number)
    assert got == large and numbers == [first, first, first + 1], "no part of it counts before all of it"


def test_a_withdrawn_reply_is_never_sent() -> None:
    scene = Scene()
    scene.join()
    scene.do("a")
    assert [reply.origin for reply in scene.followers.withdraw()] == ["a"]
    scene.wait(10 * ACK_S)
    assert scene.sent == []


# Copies


def held_by(master: Master) -> set[tuple[str, int]]:
    """Ranges where no new object may be put."""
    return {(one.name, offset) for one in master.segments.mounted.values() for offset in one.holders}


def state_of(master: Master) -> dict[str, Any]:
    return {
        key: (one.object_id, one.size_bytes, sorted((e.segment.name, e.offset) for e in one.extents))
        for key, one in master.objects.readable.items()
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_copy_made_while_the_master_works_is_what_the_master_knows(seed: int) -> None:
    """Puts, removals and lost nodes, interleaved with the pieces of a snapshot."""
    random = Random(seed)
    master, follower = Master(SETTINGS), Master(SETTINGS)
    now, put_ids, copy = 0.0, 0, None
    records: list[Record] = []

    def say(message: Any, connection: str = "client") -> Any:
        reply = None
        for effect in master.handle(Received("origin", connection, message), now):
            if isinstance(effect, AppendRecords):
                records.extend(effect.records if copy is None else copy.between(effect.records))
            elif isinstance(effect, Reply):
                reply = effect.message
        return reply

    def something() -> None:
        nonlocal put_ids
        key, node = f"k{random.randrange(40)}", random.choice("xyz")
        kind = random.random()
        if kind < 0.6:
            put_ids += 1
            started = say(m.PutStart(put_ids, node, [key], [random.randrange(1, 2000)], [4096]))
            if started.reserved[0] is not None:
                say(m.PutEnd([key], [started.reserved[0].object_id], [b"crc!"]))
        elif kind < 0.8:
            say(m.Remove([key], force=True))
        elif kind < 0.82 and node != "x" and node in master.segments.mounted:
            say(m.Unmount(node, master.segments.mounted[node].epoch))
        elif node not in master.segments.mounted:
            mount = m.Mount(node, random.randrange(1 << 30), node, 0, 20_000, b"", 0.0)
            say(mount, node)
            say(m.Heartbeat(node, mount.epoch), node)

    for _ in range(300):
        now += 0.005
        something()
    records.clear()
    copy = Snapshot(master.catalog)
    while not copy.is_over:
        records.extend(copy.piece(3))
        for _ in range(random.randrange(4)):
            now += 0.005
            something()
        for record in records:
            follower.apply([record], now)
        records.clear()
    for _ in range(50):
        now += 0.005
        something()
    for record in records:
        follower.apply([record], now)
    assert state_of(follower) == state_of(master) and len(state_of(master)) > 5, seed
    assert held_by(follower) >= held_by(master), "what is promised rests there, too"
    assert follower.segments.line == master.segments.line
    follower.settle(now)
    follower.check()


@pytest.mark.parametrize(
    "message",
    [
        Follow("b", "b:1", 3, 70, 5),
        Followed(70, 6, [ObjectGone("k", 9), QuotaSet("red", None)], True),
        WhoLeads(),
        Leads("a:1", 3, False),
    ],
)
def test_a_message_is_decoded_as_it_was_encoded(message: msgspec.Struct) -> None:
    """Also beside all messages of the store, which share the connection: no two have the same tag."""
    everything = decoder_for((*m.REQUESTS, *m.REPLIES, Follow, Followed, WhoLeads, Leads))
    assert everything.decode(bytes(encode(1, message))[HEADER_BYTES:]) == message


def test_only_nodes_may_copy_the_state_and_every_client_may_ask_for_the_leader() -> None:
    assert standby_replication.ACCESS[Follow] == NODES and leader_search.ACCESS[WhoLeads] == EVERYBODY
    assert not {Follow, WhoLeads} & m.ACCESS.keys()
