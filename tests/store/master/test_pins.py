from __future__ import annotations

from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.settings import MasterSettings
from tests.store.conftest import Voice


def test_pinned_and_unpinned(voice: Voice) -> None:
    voice.mount(size_bytes=2048)
    voice.put("a", "b")
    assert voice.say(m.Pin(["a", "none"], None)).outcomes == [True, False]
    status = voice.inspect("a")
    assert status is not None and status.pinned_s is None
    voice.put("c")
    voice.put("d")
    assert voice.there("abcd") == "ad"
    assert voice.say(m.Pin(["a"], 0.0)).outcomes == [True]
    status = voice.inspect("a")
    assert status is not None and status.pinned_s == 0.0
    voice.put("e")
    assert voice.there("ade") == "de"


def test_a_soft_pin_takes_the_place_of_a_hard_one_and_is_cut() -> None:
    voice = Voice(MasterSettings(max_pin_s=60.0))
    voice.mount()
    voice.put("a")
    voice.say(m.Pin(["a"], None))
    voice.say(m.Pin(["a"], 1e9))
    status = voice.inspect("a")
    assert status is not None and status.pinned_s == 60.0


def test_hard_pins_are_written_down_and_soft_ones_not(voice: Voice) -> None:
    voice.mount()
    voice.put("a", "b", "c")
    voice.put("d", policy=m.PutPolicy(is_hard_pinned=True))
    voice.say(m.Pin(["a", "b"], None))
    voice.say(m.Pin(["b"], 0.0))
    voice.say(m.Pin(["c"], 10.0))
    other = Voice(voice.master.settings)
    other.master.restore(voice.records, 0.0)
    other.master.check()
    pinned = [key for key, stored in other.master.objects.readable.items() if stored.is_hard_pinned]
    assert pinned == ["a", "d"]


def test_one_pinned_member_protects_its_group(voice: Voice) -> None:
    voice.mount(size_bytes=3072)
    voice.put("a", "b", group="g")
    voice.put("c")
    voice.say(m.Pin(["b"], None))
    voice.put("d")
    assert voice.there("abcd") == "abd"
    assert voice.remove("b") is True
    voice.put("e")
    voice.put("f")
    assert voice.there("abdef") == "def"


def test_bad_pins(voice: Voice) -> None:
    assert isinstance(voice.say(m.Pin(["a"], -1.0)), Failure)
