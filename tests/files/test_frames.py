# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake.files.frames import PLAIN, BoundFraming, Damage, Framing, framed, unframed

bodies = st.lists(st.binary(min_size=1, max_size=50), max_size=10)
framings = st.one_of(st.just(PLAIN), st.integers(0, (1 << 32) - 1).map(BoundFraming))
HEAD = b"what the file begins with"
TEN = [bytes([number]) * (20 + number) for number in range(1, 11)]


def written(framing: Framing, parts: list[bytes]) -> tuple[bytes, list[int]]:
    """Content of the file, and the offset of each record and of the end."""
    content, begins = HEAD, [len(HEAD)]
    for part in parts:
        content += framing.frame([part], len(content))
        begins.append(len(content))
    return content, begins


@given(bodies)
def test_framed_records_are_read_back(parts: list[bytes]) -> None:
    content = framed(parts)
    found, num_bytes = unframed(content)
    assert [bytes(body) for body in found] == parts and num_bytes == len(content)


@given(bodies.filter(len), st.data())
def test_a_torn_tail_is_dropped(parts: list[bytes], data: st.DataObject) -> None:
    """A write truncated anywhere leaves exactly the records before it."""
    content = framed(parts)
    cut = data.draw(st.integers(0, len(content) - 1))
    found, num_bytes = unframed(content[:cut])
    assert len(found) < len(parts) and [bytes(body) for body in found] == parts[: len(found)]
    assert framed(parts[: len(found)]) == content[:num_bytes]


@given(framings, bodies, st.data())
def test_a_truncated_write_is_a_torn_tail_with_or_without_zeros_behind_it(
    framing: Framing, parts: list[bytes], data: st.DataObject
) -> None:
    content, begins = written(framing, parts)
    cut = data.draw(st.integers(len(HEAD), len(content)))
    zeros = data.draw(st.sampled_from([0, 1, len(content) - cut, 5000]))
    found = framing.scan(content[:cut] + bytes(zeros), len(HEAD))
    assert not found.damages
    assert [bytes(body) for body in found.bodies] == parts[: len(found.bodies)]
    assert found.num_bytes == begins[len(found.bodies)] and found.num_before == len(found.bodies)
    # A record whose last bytes are zeros is whole even if these zeros were not written.
    assert begins[len(found.bodies)] <= cut or content[cut : begins[len(found.bodies)]].count(0)
    assert (found.torn is not None) == (found.num_bytes < cut + zeros)


@pytest.mark.parametrize("framing", [PLAIN, BoundFraming(7)])
def test_a_flipped_bit_before_the_last_record_is_damage_and_costs_one_record(framing: Framing) -> None:
    content, begins = written(framing, TEN)
    for at in range(len(HEAD), begins[-2]):
        for bit in range(8):
            wrong = bytearray(content)
            wrong[at] ^= 1 << bit
            found = framing.scan(bytes(wrong), len(HEAD))
            place = next(number for number in range(10) if at < begins[number + 1])
            assert found.damages == [Damage(begins[place], begins[place + 1] - begins[place])], (at, bit)
            assert [bytes(body) for body in found.bodies] == TEN[:place] + TEN[place + 1 :]
            assert (found.num_before, found.num_bytes, found.torn) == (place, begins[place], None)


def test_a_flipped_bit_in_the_last_record_is_not_a_torn_tail() -> None:
    """The record is complete and does not end in zeros, so nothing indicates a truncated write."""
    framing = BoundFraming(7)
    content, begins = written(framing, TEN)
    for at in range(begins[-2], len(content)):
        wrong = bytearray(content)
        wrong[at] ^= 1
        found = framing.scan(bytes(wrong), len(HEAD))
        assert found.damages == [Damage(begins[-2], begins[-1] - begins[-2])], at
        assert len(found.bodies) == 9 and found.torn is None


def test_a_duplicated_block_restores_no_records() -> None:
    """A disk or a copy may duplicate a block: the overwritten records are lost, the duplicates invalid."""
    framing = BoundFraming(7)
    parts = [bytes([number]) * 10 for number in range(1, 101)]
    content, begins = written(framing, parts)
    wrong = bytearray(content)
    wrong[begins[50] : begins[70]] = content[begins[10] : begins[30]]
    found = framing.scan(bytes(wrong), len(HEAD))
    assert [bytes(body) for body in found.bodies] == parts[:50] + parts[70:]
    assert found.damages == [Damage(begins[50], begins[70] - begins[50])]


def test_a_record_inside_a_record_is_ignored() -> None:
    """A value crafted by a client, or another file's content, does not count as a record behind damage."""
    framing = BoundFraming(7)
    forged = [b"forged " * 3]
    inner = b"".join([framed(forged), BoundFraming(8).frame(forged, 60), framing.frame(forged, 60)])
    content, begins = written(framing, [b"first", inner, b"last"])
    wrong = bytearray(content)
    wrong[begins[1]] ^= 255
    found = framing.scan(bytes(wrong), len(HEAD))
    assert [bytes(body) for body in found.bodies] == [b"first", b"last"]


def test_in_plain_frames_only_records_up_to_the_end_are_recovered() -> None:
    parts = [b"first", framed([b"forged"]) + b"rest", b"last"]
    content, begins = written(PLAIN, parts)
    wrong = bytearray(content)
    wrong[begins[1]] ^= 255
    found = PLAIN.scan(bytes(wrong), len(HEAD))
    assert [bytes(body) for body in found.bodies] == [b"first", b"last"]


def test_several_damages_are_each_reported() -> None:
    framing = BoundFraming(7)
    content, begins = written(framing, TEN)
    wrong = bytearray(content[:-3])
    for place in (2, 6):
        wrong[begins[place] + 14] ^= 255
    found = framing.scan(bytes(wrong), len(HEAD))
    assert [one.offset for one in found.damages] == [begins[2], begins[6]]
    assert found.torn == Damage(begins[9], len(wrong) - begins[9]) and len(found.bodies) == 7


@pytest.mark.parametrize("framing", [PLAIN, BoundFraming(7)])
def test_zeros_are_not_records(framing: Framing) -> None:
    for count in (1, 8, 12, 100, 8192):
        found = framing.scan(HEAD + bytes(count), len(HEAD))
        assert (found.bodies, found.damages, found.torn) == ([], [], Damage(len(HEAD), count))


def test_framed_bodies_are_split_again() -> None:
    for framing in (PLAIN, BoundFraming(7)):
        assert framing.bodies(framing.frame(TEN, 1234)) == TEN
