# SPDX-License-Identifier: Apache-2.0
"""Framing: bytes in, frames out; and the one message that every peer knows, ``Failure``.

A client opens with ``PREFACE``, which distinguishes a port scanner or an HTTP client from a peer
of another version, and a ``Hello`` (``mooncake.security.greeting``), to which a server that has a cluster key
answers with a challenge; frames of the greeting have the request id 0. Then both sides send frames::

    u32 body bytes | u32 request id | u32 CRC-32 of these two | u32 CRC-32 of the body | body

The body is one msgpack array: the message's name, then its fields. TCP's own checksum has 16 bits, and a
bit of a key that is corrupted in transit would result in an answer about another object, with checksums that
fit its bytes; one that is corrupted in a length would lose every frame after it.
A reply carries the id of its request, so requests may be pipelined and answered in any order. This
module opens no socket and knows no message of any other package. Sizes are bounded before anything is
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
from mooncake.errors import AccessDenied, InvalidArgument, MooncakeError, NotLeader, ProtocolError
from mooncake.security.greeting import MAX_GREETING_BYTES, VERSION, Challenge, ClientGreeting, Hello, Proof

PREFACE = VERSION + b"\r\n"
OLD_PREFACE = b"mooncake-rpc-2\r\n"
"""Opening of version 2, which is the same without a greeting: for upgrades one process at a time."""
MAX_BODY_BYTES = 64 << 20
_FIRST = struct.Struct("<II")
_CHECKS = struct.Struct("<II")
_SMALL_PIECE_BYTES = 4096
"""Smaller pieces of a frame are kept as one: each as an object would take many times its size."""
HEADER_BYTES = _FIRST.size + _CHECKS.size

Message: TypeAlias = msgspec.Struct
"""Tagged, array-like struct. Its tag is its name on the wire."""

_encoder = msgspec.msgpack.Encoder()


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """The answer to a request that failed with an error, as opposed to a refusal."""

    code: str
    message: str


def encode(request_id: int, message: Message) -> bytearray:
    """Encode one frame.

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


GREETING_ID = 0
"""Request id of the frames of a greeting, and of a server's refusal before it closes."""

_from_client = decoder_for([Hello, Proof])
_from_server = decoder_for([Challenge])

OPEN_GREETING = bytes(PREFACE + encode(GREETING_ID, Hello()))
"""Opening bytes of a client without a key."""


def client_opening(client_greeting: ClientGreeting, is_old: bool = False) -> bytes:
    """Opening of a client. ``is_old``: that of version 2, for a client that has no key to prove."""
    if is_old and client_greeting.is_over:
        return OLD_PREFACE
    return bytes(PREFACE + encode(GREETING_ID, client_greeting.hello()))


def client_greeting_reply(client_greeting: ClientGreeting, body: memoryview) -> bytes:
    """A client's answer to a frame of the greeting.

    Raises:
        AccessDenied: the server refused, or can't prove that it belongs to the cluster.
        ProtocolError: the frame is something else.
    """
    try:
        message = _from_server.decode(body)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"its greeting can't be decoded: {error}") from error
    if isinstance(message, Challenge):
        return bytes(encode(GREETING_ID, client_greeting.prove(message)))
    if message.code == AccessDenied.code:
        raise AccessDenied(message.message)
    raise ProtocolError(message.message)


class GreetingDecoder:
    """Decoder of the frames of a client's greeting; bytes that follow them are left in ``rest``.

    An unauthenticated client can occupy at most one frame of ``MAX_GREETING_BYTES`` here.
    """

    def __init__(self) -> None:
        self.rest = b""
        self._expects_preface = True

    @property
    def is_ours(self) -> bool:
        """Whether the client has opened with this protocol's preface."""
        return not self._expects_preface

    def take(self, data: bytes) -> Hello | Proof | None:
        """Return the next message of the greeting, if ``data`` completes one; raises ProtocolError."""
        self.rest += data
        if self._expects_preface:
            given = self.rest[: len(PREFACE)]
            if not PREFACE.startswith(given) and not OLD_PREFACE.startswith(given):
                raise ProtocolError(f"the peer opened with {given!r} instead of {PREFACE!r}")
            if len(given) < len(PREFACE):
                return None
            self._expects_preface = False
            self.rest = self.rest[len(PREFACE) :]
            if (
                given == OLD_PREFACE
            ):  # has no key, so a server that has one refuses it like any client without
                return Hello()
        if len(self.rest) < HEADER_BYTES:
            return None
        body_bytes, request_id = _FIRST.unpack_from(self.rest)
        header_checksum, checksum = _CHECKS.unpack_from(self.rest, _FIRST.size)
        if zlib.crc32(self.rest[: _FIRST.size]) != header_checksum:
            raise ProtocolError("the header of a frame was corrupted in transit")
        if body_bytes > MAX_GREETING_BYTES or request_id != GREETING_ID:
            raise ProtocolError(f"a frame of {body_bytes} bytes where a greeting was expected")
        end = HEADER_BYTES + body_bytes
        if len(self.rest) < end:
            return None
        body, self.rest = self.rest[HEADER_BYTES:end], self.rest[end:]
        if zlib.crc32(body) != checksum:
            raise ProtocolError("the greeting was corrupted in transit")
        try:
            message = _from_client.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the greeting can't be decoded: {error}") from error
        if isinstance(message, Hello | Proof):
            return message
        raise ProtocolError("the message is no greeting")


class FrameDecoder:
    """Decoder of a stream of bytes into frames. Feed it all received bytes."""

    def __init__(self, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_body_bytes = max_body_bytes
        self._pieces: list[bytes | bytearray] = []
        self.kept_bytes = 0
        """Bytes received of an unfinished frame."""
        self._missing_bytes = 0
        """Bytes that must arrive before the next check: keeps the cost of large frames linear."""

    def feed(self, data: bytes) -> list[tuple[int, memoryview]]:
        """Return (request id, body) of each frame that ``data`` completes.

        Raises:
            ProtocolError: the peer uses another protocol or exceeds the size limit, or the frame was
                corrupted in transit.
        """
        if self._pieces:
            last = self._pieces[-1]
            if len(data) >= _SMALL_PIECE_BYTES:
                self._pieces.append(data)
            elif isinstance(last, bytearray):
                last += data
            else:
                self._pieces.append(bytearray(data))
            self._missing_bytes -= len(data)
            self.kept_bytes += len(data)
            if self._missing_bytes > 0:
                return []
            data = b"".join(self._pieces)
            self._pieces.clear()
            self.kept_bytes = 0
        start, end = 0, len(data)
        frames: list[tuple[int, memoryview]] = []
        view, missing_bytes = memoryview(data), 0
        while start < end:
            missing_bytes = start + HEADER_BYTES - end
            if missing_bytes > 0:
                break
            body_bytes, request_id = _FIRST.unpack_from(view, start)
            header_checksum, checksum = _CHECKS.unpack_from(view, start + _FIRST.size)
            if zlib.crc32(view[start : start + _FIRST.size]) != header_checksum:
                raise ProtocolError("the header of a frame was corrupted in transit")
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
                raise ProtocolError(f"a frame of {body_bytes} bytes was corrupted in transit")
            frames.append((request_id, body))
            start = stop
        if start < end:
            rest = data[start:]
            self._pieces.append(rest)
            self._missing_bytes, self.kept_bytes = missing_bytes, len(rest)
        return frames

    @property
    def missing_bytes(self) -> int:
        """Missing bytes of a partly received frame; 0 between frames."""
        return self._missing_bytes if self._pieces else 0


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
        known = f"{error.leader} does" if error.leader else "it knows no leader"
        Exception.__init__(error, f"{peer} does not lead; {known}")
    else:
        Exception.__init__(error, f"{failure.message} (from {peer})")
    return error
