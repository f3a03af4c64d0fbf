# SPDX-License-Identifier: Apache-2.0
"""Keys and values of encoder outputs: what differs has another key, and what does not fit is not used."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from mooncake.compat.store.tensor_format import HEADER_BYTES, decode
from mooncake.connectors.encoder_output import (
    DAMAGES,
    TRAILER_BYTES,
    ContentPart,
    EncoderIdentity,
    EncoderOutput,
    Expectation,
    content_digest,
    pack,
    unpack,
)
from mooncake.errors import Refusal

KEY = EncoderIdentity.of(weights="w").key(b"\x01" * 32)
EXPECTED = Expectation("float32", 3, 4)


def output(dtype: str = "float32", shape: tuple[int, ...] = (3, 4)) -> EncoderOutput:
    size = int(np.prod(shape)) * {"float32": 4, "bfloat16": 2}[dtype]
    return EncoderOutput(dtype, shape, np.arange(size, dtype=np.uint8))


def test_an_output_is_what_was_packed() -> None:
    found = unpack(KEY, pack(KEY, output()).tobytes(), EXPECTED)
    assert isinstance(found, EncoderOutput)
    assert (found.dtype, found.shape, found.data.tobytes()) == ("float32", (3, 4), output().data.tobytes())


def test_the_value_begins_as_the_drop_in_stores_tensors_do() -> None:
    value = pack(KEY, output()).tobytes()
    header = decode(value[:HEADER_BYTES], len(value))
    assert (header.dtype, header.shape) == ("float32", (3, 4))
    assert value[HEADER_BYTES:-TRAILER_BYTES] == output().data.tobytes()


@pytest.mark.parametrize(
    ("expected", "code"),
    [
        (Expectation("bfloat16", 3, 4), "dtype"),
        (Expectation("float32", 4, 4), "shape"),
        (Expectation("float32", 3, 2), "shape"),
        (Expectation("float32", 4, 4, is_least=True), "shape"),
        (Expectation("float32", 3, 5, is_least=True), "shape"),
    ],
)
def test_another_dtype_or_shape_is_refused(expected: Expectation, code: str) -> None:
    found = unpack(KEY, pack(KEY, output()).tobytes(), expected)
    assert isinstance(found, Refusal) and found.code == code


@pytest.mark.parametrize("least", [2, 3, 4])
def test_an_embedding_may_be_wider_where_its_width_is_not_measured(least: int) -> None:
    value = pack(KEY, output()).tobytes()
    assert isinstance(unpack(KEY, value, Expectation("float32", 3, least, is_least=True)), EncoderOutput)


@pytest.mark.parametrize(
    "expected",
    [Expectation("bfloat16", 3, 4), Expectation("float32", 3, 5)],
    ids=["another dtype", "another shape"],
)
def test_what_is_damaged_is_called_so_whatever_was_expected(expected: Expectation) -> None:
    value = pack(KEY, output()).tobytes()
    intact = unpack(KEY, value, expected)
    assert isinstance(intact, Refusal) and intact.code not in DAMAGES
    for damaged in (value[:-1], value[:HEADER_BYTES] + b"\xff" + value[HEADER_BYTES + 1 :]):
        found = unpack(KEY, damaged, expected)
        assert isinstance(found, Refusal) and found.code in DAMAGES


def test_a_tensor_of_one_dimension_is_no_output() -> None:
    found = unpack(KEY, pack(KEY, output(shape=(3,))).tobytes(), EXPECTED)
    assert isinstance(found, Refusal) and found.code == "shape"


def test_every_changed_bit_is_refused() -> None:
    value, random = pack(KEY, output()).tobytes(), Random(1)
    for at in [*range(0, len(value), 7), *range(len(value) - TRAILER_BYTES, len(value))]:
        changed = bytearray(value)
        changed[at] ^= 1 << random.randrange(8)
        assert isinstance(unpack(KEY, bytes(changed), EXPECTED), Refusal), at


@pytest.mark.parametrize("length", [0, 1, 39, 40, HEADER_BYTES, HEADER_BYTES + TRAILER_BYTES - 1, -1, -41])
def test_a_cut_value_is_refused(length: int) -> None:
    value = pack(KEY, output()).tobytes()
    assert isinstance(unpack(KEY, value[:length], EXPECTED), Refusal)
    assert isinstance(unpack(KEY, value + b"\0" * 8, EXPECTED), Refusal)


def test_an_output_under_another_key_is_refused() -> None:
    other = EncoderIdentity.of(weights="v").key(b"\x01" * 32)
    found = unpack(other, pack(KEY, output()).tobytes(), EXPECTED)
    assert isinstance(found, Refusal) and found.code == "digest"


def test_bytes_that_are_no_such_tensor_are_not_packed() -> None:
    with pytest.raises(ValueError, match="48 bytes are no bfloat16"):
        pack(KEY, EncoderOutput("bfloat16", (3, 4), output().data))
    with pytest.raises(ValueError, match="cannot be stored"):
        pack(KEY, EncoderOutput("complex64", (3, 4), output().data))


def test_every_fact_is_in_the_key() -> None:
    facts = {"weights": "w", "processor": "p", "dtype": "float32"}
    keys = {EncoderIdentity.of(**facts).key(b"c" * 32)}
    for name in facts:
        keys.add(EncoderIdentity.of(**{**facts, name: "other"}).key(b"c" * 32))
    keys.add(EncoderIdentity.of(**facts, more="x").key(b"c" * 32))
    assert len(keys) == 5
    assert EncoderIdentity.of(b=1, a=2) == EncoderIdentity.of(a=2, b=1)


def test_contents_that_differ_have_other_digests() -> None:
    base = [ContentPart("pixels", "float32", (2, 2), b"0123"), ContentPart("grid", "int64", (1,), b"9")]
    others = [
        [ContentPart("pixels", "float32", (2, 2), b"0124"), base[1]],
        [ContentPart("pixels", "float32", (4, 1), b"0123"), base[1]],
        [ContentPart("pixels", "int32", (2, 2), b"0123"), base[1]],
        [ContentPart("values", "float32", (2, 2), b"0123"), base[1]],
        base[:1],
        # the same bytes, divided in another way
        [ContentPart("pixels", "float32", (2, 2), b"01"), ContentPart("grid", "int64", (1,), b"239")],
    ]
    digests = [content_digest(one) for one in [base, *others]]
    assert len(set(digests)) == len(digests)
    assert content_digest(reversed(base)) == digests[0], "the order of arguments says nothing"
    assert len(digests[0]) == 32
