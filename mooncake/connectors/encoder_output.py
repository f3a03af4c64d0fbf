# SPDX-License-Identifier: Apache-2.0
"""An output of a multimodal encoder (of an image, an audio clip) as an object of the store.

Owns its key and its format. The key has a digest of everything that makes the output valid
(``EncoderIdentity``) and a digest of what the encoder was given (``content_digest``), so that one of another
model, processor or dtype is not found. The name that an engine's client may choose for its image is no part
of it: under such a name one client could leave a wrong output for another.

The value is the drop-in store's tensor format, and after it a digest of the key and of all bytes::

    tensor's header, 304 bytes | elements, row by row | magic, 8 bytes | SHA-256, 32 bytes

so that ``get_tensor`` reads it too, and an object that was stored under a wrong key, cut or changed is
refused. Knows no engine, no torch and no store.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mooncake.compat.store.tensor_format import HEADER_BYTES, TensorHeader, decode, encode
from mooncake.errors import Refusal
from mooncake.types import ObjectKey

KEY_PREFIX = "encoder/"
"""Beginning of the store's key of every output; the digests of its identity and of its content follow."""

MAGIC = b"encout-1"
DIGEST_BYTES = 32
TRAILER_BYTES = len(MAGIC) + DIGEST_BYTES

DAMAGES = frozenset({"not_an_output", "digest"})
"""Codes of refusals of an object that no engine can use."""

Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True)
class EncoderIdentity:
    """Everything that must be equal for two engines to use each other's outputs."""

    facts: tuple[tuple[str, str], ...]
    """Pairs of name and value, sorted by name."""

    @classmethod
    def of(cls, **facts: object) -> EncoderIdentity:
        return cls(tuple(sorted((name, str(value)) for name, value in facts.items())))

    @cached_property
    def digest(self) -> str:
        """32 hex digits."""
        return hashlib.sha256(repr(("encoder-1", self.facts)).encode()).hexdigest()[:32]

    def key(self, content: bytes) -> ObjectKey:
        """The store's key for the output of what has this digest."""
        return f"{KEY_PREFIX}{self.digest}/{content.hex()}"


@dataclasses.dataclass(frozen=True)
class ContentPart:
    """One argument of an encoder: a tensor's bytes, or a value in writing."""

    name: str
    kind: str
    """The tensor's dtype, or the type of the value."""
    shape: tuple[int, ...]
    data: Any
    """Contiguous bytes (buffer protocol)."""


def content_digest(parts: Iterable[ContentPart]) -> bytes:
    """SHA-256 of all that an encoder is given, in any order of its arguments; 32 bytes.

    Each part counts with its name, kind, shape and length, so that different contents are different texts.
    """
    total = hashlib.sha256(b"mooncake-encoder-content-1\n")
    for part in sorted(parts, key=lambda one: one.name):
        view = memoryview(part.data)
        total.update(repr((part.name, part.kind, part.shape, view.nbytes)).encode() + b"\n")
        total.update(view)
    return total.digest()


@dataclasses.dataclass(frozen=True)
class Expectation:
    """What an engine expects of an output before it uses it."""

    dtype: str
    num_rows: int
    """Number of embeddings, one per placeholder in the prompt."""
    width: int
    """Elements of an embedding."""
    is_least: bool = False
    """Whether an embedding may be wider: some models append further layers (DeepStack) or positions to it."""

    def objection(self, dtype: str, shape: tuple[int, ...]) -> Refusal | None:
        """Why an output of this dtype and shape is not used; None if it is."""
        if dtype != self.dtype:
            return Refusal("dtype", f"{dtype} instead of {self.dtype}")
        fits = len(shape) == 2 and shape[0] == self.num_rows
        if not fits or shape[1] < self.width or (shape[1] > self.width and not self.is_least):
            wanted = f"[{self.num_rows}, {self.width}{' or more' if self.is_least else ''}]"
            return Refusal("shape", f"{list(shape)} instead of {wanted}")
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class EncoderOutput:
    """Embeddings of one item: ``shape`` is [embeddings, width], ``data`` their bytes, row by row."""

    dtype: str
    """torch's name, one of ``tensor_format.DTYPES``."""
    shape: tuple[int, ...]
    data: Bytes

    @property
    def size_bytes(self) -> int:
        return self.data.nbytes


def pack(key: ObjectKey, output: EncoderOutput) -> Bytes:
    """The object's bytes.

    Raises:
        ValueError: the format has no such dtype or shape.
    """
    header = TensorHeader(output.dtype, output.shape, output.shape)
    head = encode(header)
    if header.data_bytes != output.size_bytes:
        raise ValueError(f"{output.size_bytes} bytes are no {output.dtype} tensor of shape {output.shape}")
    value = np.empty(HEADER_BYTES + output.size_bytes + TRAILER_BYTES, dtype=np.uint8)
    value[:HEADER_BYTES] = np.frombuffer(head, dtype=np.uint8)
    value[HEADER_BYTES:-TRAILER_BYTES] = output.data.reshape(-1)
    trailer = MAGIC + _digest(key, value[:-TRAILER_BYTES])
    value[-TRAILER_BYTES:] = np.frombuffer(trailer, dtype=np.uint8)
    return value


def unpack(key: ObjectKey, value: bytes, expected: Expectation) -> EncoderOutput | Refusal:
    """The output in an object's bytes (not copied), or why it is not used.

    Refusals: those of ``DAMAGES``; and of an intact output ``dtype``, ``shape``.
    """
    array = np.frombuffer(value, dtype=np.uint8)
    trailer = bytes(array[-TRAILER_BYTES:])
    if len(array) < HEADER_BYTES + TRAILER_BYTES or not trailer.startswith(MAGIC):
        return Refusal("not_an_output", f"{len(array)} bytes without the format's trailer")
    try:
        header = decode(value[:HEADER_BYTES], len(array) - TRAILER_BYTES)
    except ValueError as error:
        return Refusal("not_an_output", str(error))
    if header.axes or header.size_bytes + TRAILER_BYTES != len(array):
        return Refusal("not_an_output", f"{len(array)} bytes for a tensor of shape {header.shape}")
    if trailer[len(MAGIC) :] != _digest(key, array[:-TRAILER_BYTES]):
        return Refusal("digest", "its bytes are not those that were stored under this key")
    refusal = expected.objection(header.dtype, header.shape)
    if refusal is not None:
        return refusal
    return EncoderOutput(header.dtype, header.shape, array[HEADER_BYTES:-TRAILER_BYTES])


def _digest(key: ObjectKey, body: Bytes) -> bytes:
    total = hashlib.sha256(key.encode() + b"\0")
    total.update(body.data)
    return total.digest()
