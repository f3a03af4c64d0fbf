# SPDX-License-Identifier: Apache-2.0
"""Scans of all keys run in slices: other requests are served between them. Counts slices, not seconds."""

from __future__ import annotations

import builtins
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.machine import Wake
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.key_scans import (
    MAX_PATTERN,
    MAX_PROGRAM,
    MAX_SCANS,
    MAX_SCANS_PER_CONNECTION,
    PAUSE_S,
    SLICE_COST,
    LiteralPattern,
    RegexPattern,
    compiled,
)
from mooncake.store.master.log_records import AllRemoved, ObjectReadable
from mooncake.types import Tier
from tests.store.conftest import SETTINGS
from tests.store.nodes import Nodes, Place

NUM_KEYS = 5 * SLICE_COST
KEYS = ["kv/1", "kv/2", "KV/1", "a.b", "axb", "x", "", "^x$", "a\nb", "käse", "kv/11"]


class Scene:
    """Many keys, and scan requests with delayed answers."""

    def __init__(self) -> None:
        self.nodes = Nodes(SETTINGS)
        self.place = Place(self.nodes, "a", 16 << 20, polls=False)
        names = [f"k{number:05}" for number in range(NUM_KEYS)]
        for start in range(0, NUM_KEYS, 2000):
            self.put(*names[start : start + 2000])

    def put(self, *keys: str) -> None:
        # Without the checks after each request, which look at all keys.
        master, now = self.nodes.master, self.nodes.now
        offset = sum(len(segment.holders) for segment in master.segments.mounted.values()) * 64
        records = [
            ObjectReadable(key, master.objects.last_id + 1 + at, 64, 64, b"crc!", [("a", offset + 64 * at)])
            for at, key in enumerate(keys)
        ]
        for record in records:
            master._replay._object_readable(record, now)  # as a report of the node would do it
            master.objects.readable[record.key].lease_until = 0.0

    def ask(self, message: Any, origin: str = "scan", connection: str = "client") -> None:
        self.nodes.post(message, connection, origin)

    def answer(self, origin: str = "scan") -> Any:
        (reply,) = self.nodes.late.pop(origin)
        return reply

    def turn(self) -> None:
        """Go to the master's next deadline."""
        deadline = self.nodes.master.deadline()
        assert deadline is not None
        self.nodes.now = max(self.nodes.now, deadline)
        self.nodes._take(self.nodes.master.handle(Wake(), self.nodes.now))
        self.nodes.master.check()

    def turns(self, origin: str = "scan") -> int:
        """Number of slices until the answer; other requests are served at once in each."""
        count = 0
        while origin not in self.nodes.late:
            count += 1
            assert self.nodes.say(m.Exists(["none"]), "another").flags == b"\0"
            self.place.beat()
            self.turn()
        return count


@pytest.fixture(scope="module")
def many() -> Scene:
    return Scene()


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_listing_lets_others_in_between(many: Scene) -> None:
    many.ask(m.ListKeys("k", 1 << 30))
    assert many.turns() == NUM_KEYS // SLICE_COST - 1, "the first slice is part of the request"
    assert many.answer().keys == [f"k{number:05}" for number in range(NUM_KEYS)]
    many.ask(m.ListKeys("k", 3))
    assert many.answer().keys == ["k00000", "k00001", "k00002"], "no more than is wanted"


def test_a_hostile_expression_costs_slices_and_other_clients_nothing(many: Scene) -> None:
    many.ask(m.RemoveMatching("^(k+0*)+$", False))
    assert many.turns() >= NUM_KEYS // SLICE_COST - 1
    assert many.answer() == m.Removed(1, 0)
    counts = many.nodes.master.request_counters.counts
    assert counts["remove_by_regex_requests"] == 1, "what is answered later is counted, too"


def test_an_object_put_during_a_removal_stays_and_older_ones_go(scene: Scene) -> None:
    scene.ask(m.RemoveMatching("", True))
    assert "scan" not in scene.nodes.late
    last = f"k{NUM_KEYS - 1:05}"
    scene.nodes.put("new", host="a")
    scene.nodes.say(m.Remove([last], True))
    scene.nodes.put(last, host="a")
    scene.turns()
    assert scene.answer() == m.Removed(NUM_KEYS - 1, 0)
    assert sorted(scene.nodes.master.objects.readable) == sorted(["new", last])
    (cleared,) = [record for record in scene.nodes.records if isinstance(record, AllRemoved)]
    readable = scene.nodes.master.objects.readable.values()
    assert all(stored.object_id >= cleared.before for stored in readable), "they may come back"


def test_a_slice_writes_down_only_its_own_removals(scene: Scene) -> None:
    """So that a standby, too, gets it in pieces."""
    before = len(scene.nodes.records)
    scene.ask(m.RemoveMatching("", True))
    assert 0 < len(scene.nodes.records) - before < NUM_KEYS / 10


def test_concurrent_scans_are_limited_in_all_and_per_connection(many: Scene) -> None:
    for number in range(MAX_SCANS_PER_CONNECTION):
        many.ask(m.ListKeys("", 1 << 30), f"one {number}", "one")
    many.ask(m.ListKeys("", 1 << 30), "too many", "one")
    refused = many.answer("too many")
    assert isinstance(refused, Failure) and refused.code == "unavailable"
    for number in range(MAX_SCANS - MAX_SCANS_PER_CONNECTION):
        many.ask(m.ListKeys("", 1 << 30), f"other {number}", f"other {number}")
    many.ask(m.ListKeys("", 1 << 30), "none left", "last")
    assert isinstance(many.answer("none left"), Failure)
    num_turns = many.turns(f"other {MAX_SCANS - MAX_SCANS_PER_CONNECTION - 1}")
    assert num_turns == MAX_SCANS * (NUM_KEYS // SLICE_COST - 1), "they take turns"
    for origin in [name for name in many.nodes.late if name.startswith(("one", "other"))]:
        assert len(many.answer(origin).keys) == len(many.nodes.master.objects.readable)
    many.ask(m.ListKeys("zz", 1))
    many.turns()
    assert many.answer().keys == []


def test_requests_do_not_make_slices_follow_each_other(many: Scene) -> None:
    """A client that sends requests all the time must not make slices follow each other."""
    many.ask(m.ListKeys("", 1 << 30))
    for _ in range(50):
        many.nodes.say(m.Exists(["k00001"]), "another")
    assert "scan" not in many.nodes.late
    num_turns = 0
    for _ in range(NUM_KEYS // SLICE_COST - 1):
        many.nodes.now += PAUSE_S
        many.nodes.say(m.Exists(["k00001"]), "another")
        num_turns += 1
    assert num_turns == NUM_KEYS // SLICE_COST - 1
    many.answer()


def test_a_nul_names_no_other_tenants_keys(scene: Scene) -> None:
    scene.nodes.put("secret", host="a", tenant="bank")
    for message in (m.ListKeys("bank\0", 10), m.ListKeys("", 10, "bank\0s")):
        scene.ask(message, connection="stranger")
        assert scene.answer().keys == []


def test_what_its_node_brings_back_while_all_is_removed_is_removed_too(scene: Scene) -> None:
    old = scene.nodes.master.objects.last_id
    scene.put("later")
    scene.ask(m.RemoveMatching("", True))
    assert "scan" not in scene.nodes.late
    back = m.SegmentEntry("away", old, 1000, 1000, b"crc!", 0)
    ssd = Place(scene.nodes, "b/ssd", 1 << 20, tier=Tier.SSD, content_id=5, entries=[back], polls=False)
    assert not ssd.held
    scene.turns()
    assert list(scene.nodes.master.objects.readable) == []


def test_of_two_removals_of_everything_the_later_one_holds_whichever_ends_first(scene: Scene) -> None:
    catalog = scene.nodes.master.catalog
    for before in (200, 100):
        catalog.clear_before("", before)
    assert catalog.cleared_of("k") == 200
    assert not catalog.is_news("k", 150)


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "^kv/[12]$",
        "v/",
        "^kv/",
        "1$",
        "^x$",
        r"a\.b",
        "a.b",
        r"\^x\$",
        "(?i)^kv",
        r"\d\d",
        "kä",
        "^$",
        "$",
    ],
)
def test_what_is_found_is_what_python_finds(pattern: str) -> None:
    found = compiled(pattern)
    assert not isinstance(found, Failure)
    assert [found.is_found_in(key) for key in KEYS] == [bool(re.search(pattern, key)) for key in KEYS]
    assert all(found.cost(key) >= 1 for key in KEYS)


@given(st.text(max_size=20).filter(lambda text: "\n" not in text), st.booleans(), st.booleans())
def test_text_needs_no_engine(text: str, is_from_start: bool, is_to_end: bool) -> None:
    pattern = "^" * is_from_start + re.escape(text) + "$" * is_to_end
    found = compiled(pattern)
    assert isinstance(found, LiteralPattern)
    for key in (text, "x" + text, text + "x", f"x{text}x", ""):
        assert found.is_found_in(key) is bool(re.search(pattern, key)), (pattern, key)


@pytest.mark.parametrize("pattern", [r"(?=x)", r"(?<!a)b", r"(a)\1", "(", "[", "*a", "x{1,", "a{0,2000}"])
def test_what_cannot_be_had_without_backtracking_is_refused_with_the_reason(pattern: str) -> None:
    found = compiled(pattern)
    if isinstance(found, Failure):
        assert found.code == "invalid_argument" and repr(pattern) in found.message
    else:
        assert pattern == "x{1,", "which is text"


def test_the_size_of_what_is_compiled_is_bounded() -> None:
    for pattern in ("(a?){600}a{600}b", "x" * MAX_PATTERN + "x"):
        found = compiled(pattern)
        assert isinstance(found, Failure) and found.code == "invalid_argument"
    found = compiled(".*(a?){300}b")
    assert isinstance(found, RegexPattern)
    assert 1 < found.cost("a" * 1024) <= 1 + 1024 * MAX_PROGRAM // 64


def test_an_expression_that_would_backtrack_endlessly_does_not() -> None:
    found = compiled("^(a+)+$")
    assert isinstance(found, RegexPattern)
    assert not found.is_found_in("a" * 1000 + "b") and found.is_found_in("a" * 1000)


def test_without_the_engine_text_works_and_the_rest_names_the_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "re2":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    assert isinstance(compiled("^kv/"), LiteralPattern)
    found = compiled("a+")
    assert isinstance(found, Failure) and "google-re2" in found.message
