"""Framing: bytes in, frames out; and the one message that every peer understands, ``Failure``.

A client opens with ``PREFACE``, so that a port scanner or an HTTP client is told apart from a peer
of another version. Then both sides send frames::

    u32 body bytes | u32 request id | u32 CRC-32 of these two | u32 CRC-32 of the body | body

The body is one msgpack array: the message's name, then its fields. TCP's own checksum has 16 bits, and a
bit that changed in a key on its way would be an answer about another object, with checksums that fit its
bytes; one that changed in a length would swallow every frame after it.
A reply carries the id of its request, so requests may be pipelined and answered in any order. This
module opens no socket and knows no message of any room. Sizes are bounded before anything is
allocated: a length beyond ``MAX_BODY_BYTES`` ends the connection.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from mooncake import errors
from mooncake.errors import InvalidArgument, MooncakeError, NotLeader, ProtocolError

PREFACE = b"mooncake-rpc-2\r\n"
MAX_BODY_BYTES = 64 << 20
_FIRST = struct.Struct("<II")
_CHECKS = struct.Struct("<II")
HEADER_BYTES = _FIRST.size + _CHECKS.size

Message: TypeAlias = msgspec.Struct
"""A tagged, array-like struct. Its tag is its name on the wire."""

_encoder = msgspec.msgpack.Encoder()


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The answer to a request that could not be handled: a broken world, not a refusal."""

    code: str
    message: str


def encode(request_id: int, message: Message) -> bytearray:
    """One frame.

    Raises:
        InvalidArgument: the message is larger than a peer would accept.
    """
    frame = bytearray(HEADER_BYTES)
    _encoder.encode_into(message, frame, HEADER_BYTES)
    body_bytes = len(frame) - HEADER_BYTES
    if body_bytes > MAX_BODY_BYTES:
        raise InvalidArgument(f"size of {type(message).__name__}", body_bytes, f"at most {MAX_BODY_BYTES}")
    checksum = zlib.crc32(memoryview(frame)[HEADER_BYTES:])
    frame[:HEADER_BYTES] = header(body_bytes, request_id, checksum)
    return frame


def header(body_bytes: int, request_id: int, checksum: int) -> bytes:
    """The first bytes of a frame."""
    first = _FIRST.pack(body_bytes, request_id)
    return first + _CHECKS.pack(zlib.crc32(first), checksum)


def decoder_for(messages: Iterable[type[Message]]) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of any of ``messages`` (and of ``Failure``); raises ``msgspec.ValidationError``."""
    union: Any = Failure
    for message in messages:
        union = union | message
    return msgspec.msgpack.Decoder(union)


class FrameDecoder:
    """Cuts a stream of bytes into frames. Feed it whatever arrives."""

    def __init__(self, expects_preface: bool, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._expects_preface = expects_preface
        self._max_body_bytes = max_body_bytes
        self._pieces: list[bytes] = []
        self._missing_bytes = 0
        """How much more must arrive before looking again is worth it: keeps large frames linear."""

    def feed(self, data: bytes) -> list[tuple[int, memoryview]]:
        """The (request id, body) of each frame that ``data`` completes.

        Raises:
            ProtocolError: the peer speaks another protocol or exceeds the size limit, or the network
                changed what it said.
        """
        if self._pieces:
            self._pieces.append(data)
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                return []
            data = b"".join(self._pieces)
            self._pieces.clear()
        start, end = 0, len(data)
        if self._expects_preface:
            self._check_preface(data)
            if end < len(PREFACE):
                return self._wait(data, len(PREFACE) - end)
            self._expects_preface = False
            start = len(PREFACE)
        frames: list[tuple[int, memoryview]] = []
        view, missing_bytes = memoryview(data), 0
        while start < end:
            missing_bytes = start + HEADER_BYTES - end
            if missing_bytes > 0:
                break
            body_bytes, request_id = _FIRST.unpack_from(view, start)
            header_checksum, checksum = _CHECKS.unpack_from(view, start + _FIRST.size)
            if zlib.crc32(view[start : start + _FIRST.size]) != header_checksum:
                raise ProtocolError("the header of a frame was damaged on its way")
            if body_bytes > self._max_body_bytes:
                raise ProtocolError(
                    f"a frame of {body_bytes} bytes; at most {self._max_body_bytes} are allowed"
                )
            stop = start + HEADER_BYTES + body_bytes
            missing_bytes = stop - end
            if missing_bytes > 0:
                break
            body = view[start + HEADER_BYTES : stop]
            if zlib.crc32(body) != checksum:
                raise ProtocolError(f"a frame of {body_bytes} bytes was damaged on its way")
            frames.append((request_id, body))
            start = stop
        if start < end:
            self._wait(data[start:], missing_bytes)
        return frames

    @property
    def is_greeted(self) -> bool:
        """The preface, if one is expected, has come."""
        return not self._expects_preface

    @property
    def missing_bytes(self) -> int:
        """Of the frame of which a part has come; 0 between frames."""
        return self._missing_bytes if self._pieces else 0

    def _wait(self, rest: bytes, missing_bytes: int) -> list[tuple[int, memoryview]]:
        self._pieces.append(rest)
        self._missing_bytes = missing_bytes
        return []

    def _check_preface(self, data: bytes) -> None:
        given = data[: len(PREFACE)]
        if given != PREFACE[: len(given)]:
            raise ProtocolError(f"the peer opened with {bytes(given)!r} instead of {PREFACE!r}")


@functools.cache
def _errors_by_code() -> dict[str, type[MooncakeError]]:
    found: dict[str, type[MooncakeError]] = {}
    waiting: list[type[MooncakeError]] = [errors.MooncakeError]
    while waiting:
        error = waiting.pop()
        found.setdefault(error.code, error)
        waiting.extend(error.__subclasses__())
    return found


def error_of(failure: Failure, peer: str) -> MooncakeError:
    """The exception that a ``Failure`` from ``peer`` stands for."""
    kind = _errors_by_code().get(failure.code, MooncakeError)
    error = kind.__new__(kind)
    if isinstance(error, NotLeader):
        error.leader = failure.message
        whose = f"{error.leader} does" if error.leader else "nobody does that it knows of"
        Exception.__init__(error, f"{peer} does not lead; {whose}")
    else:
        Exception.__init__(error, f"{failure.message} (from {peer})")
    return error
