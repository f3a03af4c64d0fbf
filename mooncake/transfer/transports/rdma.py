# SPDX-License-Identifier: Apache-2.0
"""The rdma transport: verbs, with which devices move the bytes without a processor of the peer.

A thin layer: ``native/rdma.h`` describes lanes, grants and retired lanes; here both engines negotiate
them through the handshake. That happens when the first slices need it and again after a failure: every
operation first checks whether its peer is ready, which costs one lock. Several devices are
several rails: devices of the same name are paired, others in order.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from mooncake import _native
from mooncake._native import Completion, Op, Queue, Status
from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    MooncakeError,
    OutOfMemory,
    PeerLost,
    ProtocolError,
    Unavailable,
)
from mooncake.log import get_logger
from mooncake.transfer.descriptor import Column, RegionInfo
from mooncake.transfer.transports import PeerConnection, TransportContext, region_rows

log = get_logger(__name__)

SET_UP_TIMEOUT_S = 10.0
"""Longest time that an operation waits for its connection to be set up."""

CLOSE_TIMEOUT_S = 1.0
"""Longest time that closing takes when the peer does not answer; it then notices by itself."""

MAX_KEYS = 4096
"""Regions requested in one step."""

MAX_LANES = 256
"""Lanes that a peer may request in one step."""
MAX_SERVED = 16_384
"""Limit of lanes per device, for all peers together."""

Address = tuple[bytes, int, int, int]


class DeviceInfo(msgspec.Struct, frozen=True):
    """One device, as listed in the endpoint."""

    name: str
    gid: str
    lid: int


class SetupRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to end some lanes of the sender, serve new ones, and return the device's keys of regions."""

    device: str
    "Name of the receiver's device."
    owner: int
    "Random and secret: only the process that set a lane up may end it."
    address: Address
    lanes: list[tuple[int, int]]
    retired: list[tuple[str, int]]
    keys: list[int]


class SetupReply(msgspec.Struct, frozen=True, array_like=True):
    """Answer with the receiver's ends of the lanes, and the keys."""

    address: Address
    lanes: list[tuple[int, int]]
    grants: list[tuple[int, int, int, int, bool]]


class RdmaConnection:
    is_lost = False  # a peer that does not answer a handshake now may do so later

    def __init__(
        self,
        peer: _native.RdmaPeer,
        rail: str,
        ask: Callable[[SetupRequest, float], SetupReply],
        first: SetupRequest,
    ):
        self._peer = peer
        self._rail = rail
        self._ask = ask
        self._empty = first
        self._setting_up = threading.Lock()
        self.cancel = peer.cancel

    def run(
        self, op: Op, local: Column, remote: Column, lengths: Column, timeout_s: float, checksum: bool
    ) -> Completion:
        if not self._peer.is_ready:
            deadline = time.monotonic() + timeout_s
            status = self.set_up(deadline)
            if status != Status.OK:
                return Completion(status=status)
            timeout_s = max(0.0, deadline - time.monotonic())
        return self._peer.run(op, local, remote, lengths, timeout_s, checksum)

    def run_slice(
        self, op: Op, local: int, remote: int, length: int, timeout_s: float, checksum: bool
    ) -> int | Completion:
        if not self._peer.is_ready:
            deadline = time.monotonic() + timeout_s
            status = self.set_up(deadline)
            if status != Status.OK:
                return Completion(status=status)
            timeout_s = max(0.0, deadline - time.monotonic())
        return self._peer.run_slice(op, local, remote, length, timeout_s, checksum)

    def submit(
        self,
        queue: Queue,
        token: int,
        op: Op,
        local: Column,
        remote: Column,
        lengths: Column,
        timeout_s: float,
        checksum: bool,
        *,
        priority: int = 0,
        reports: bool = False,
    ) -> int:
        """Submit, after setting the connection up in the caller if needed."""
        if not self._peer.is_ready:
            deadline = time.monotonic() + timeout_s
            status = self.set_up(deadline)
            if status != Status.OK:
                queue.push(Completion(token, status))
                return -1
            timeout_s = max(0.0, deadline - time.monotonic())
        return self._peer.submit(
            queue, token, op, local, remote, lengths, timeout_s, checksum, priority=priority, reports=reports
        )

    def view(self, address: int, size_bytes: int, timeout_s: float) -> None:
        return None

    def set_regions(self, regions: Sequence[RegionInfo]) -> None:
        self._peer.set_remote(region_rows(regions))

    def close(self) -> None:
        self._peer.close()
        with contextlib.suppress(MooncakeError):  # a peer that misses the message notices by itself
            retired = self._peer.retired()
            if retired:
                self._ask(msgspec.structs.replace(self._empty, retired=retired), CLOSE_TIMEOUT_S)
                self._peer.forget_retired(retired)

    def set_up(self, deadline: float) -> Status:
        """Negotiate lanes and grants with the peer, where not done yet."""
        if not self._setting_up.acquire(timeout=max(0.0, deadline - time.monotonic())):
            return Status.TIMED_OUT
        try:
            while not self._peer.is_ready:
                self._step(deadline)
            return Status.OK
        except (MooncakeError, OSError) as error:
            if self._peer.is_able:
                return Status.OK  # fewer lanes than requested
            log.info("rdma_setup_failed", rail=self._rail, reason=str(error))
            if isinstance(error, DeadlineExceeded) and time.monotonic() >= deadline:
                return Status.TIMED_OUT
            return _STATUS.get(type(error), Status.PEER_LOST)
        finally:
            self._setting_up.release()

    def _step(self, deadline: float) -> None:
        """Send one request to the peer and apply its answer."""
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded(f"rdma {self._rail}: no time left to set the connection up")
        request = msgspec.structs.replace(
            self._empty,
            lanes=self._peer.offer(),
            retired=self._peer.retired(),
            keys=self._peer.unknown_keys(MAX_KEYS),
        )
        ready = self._ask(request, min(left_s, SET_UP_TIMEOUT_S))
        if len(ready.lanes) != len(request.lanes) or [grant[0] for grant in ready.grants] != request.keys:
            raise ProtocolError(f"rdma {self._rail}: the peer's answer belongs to another request")
        self._peer.forget_retired(request.retired)
        self._peer.learn(ready.grants)
        self._peer.join(ready.address, ready.lanes)


_STATUS: dict[type[BaseException], Status] = {
    AccessDenied: Status.ACCESS_DENIED,
    ProtocolError: Status.PROTOCOL_ERROR,
}


class VerbsTransport:
    needs_handshake = True

    def __init__(self, site: TransportContext) -> None:
        settings = site.settings
        self._exchange = site.exchange
        self._num_lanes = site.num_streams + 1  # so that a small transfer does not wait for a big one
        self._owner = secrets.randbits(63)
        self._names = usable_devices(settings.rdma_devices, settings.rdma_port)
        try:
            self._native = _native.RdmaTransport(
                site.regions,
                self._names,
                settings.rdma_port,
                settings.rdma_gid_index,
                settings.rdma_traffic_class,
            )
        except OSError as error:
            raise InvalidArgument(
                "rdma_devices", self._names, f"devices that can be used ({error})"
            ) from error
        infos = [
            DeviceInfo(name, self._address(name)[0].hex(), self._address(name)[1]) for name in self._names
        ]
        self.endpoint = msgspec.json.encode(infos).decode()

    def _address(self, device: str) -> Address:
        address = self._native.address(device)
        if address is None:
            raise InvalidArgument("device", device, "one of " + ", ".join(self._names))
        return address

    def rails(self, endpoint: str) -> list[str]:
        pairs = self._pairs(endpoint)
        return [] if len(pairs) == 1 else [f"{ours}>{theirs}" for ours, theirs in pairs]

    def _pairs(self, endpoint: str) -> list[tuple[str, str]]:
        try:
            theirs = [info.name for info in msgspec.json.decode(endpoint, type=list[DeviceInfo])]
        except msgspec.MsgspecError as error:
            raise PeerLost(
                f"rdma peer {endpoint!r} is no list of devices; its descriptor is damaged"
            ) from error
        return pairs_of(self._names, theirs)

    def connect(
        self,
        endpoint: str,
        epoch: int,
        regions: Sequence[RegionInfo],
        timeout_s: float,
        *,
        handshake: str = "",
        rail: str = "",
    ) -> PeerConnection:
        pairs = self._pairs(endpoint)
        if not pairs or not handshake:
            raise PeerLost(f"rdma peer {endpoint!r} has no device or no handshake address")
        ours, theirs = next((pair for pair in pairs if f"{pair[0]}>{pair[1]}" == rail), pairs[0])
        peer = self._native.connect(ours, theirs, epoch, region_rows(regions), self._num_lanes)
        assert peer is not None

        exchange = self._exchange

        def ask(question: SetupRequest, patience_s: float) -> SetupReply:
            payload = msgspec.msgpack.encode(question)
            answer = exchange(handshake, "rdma", payload, patience_s, epoch=epoch)
            try:
                return msgspec.msgpack.decode(answer, type=SetupReply)
            except msgspec.MsgspecError as error:
                raise ProtocolError(f"rdma peer at {handshake}: {error}") from error

        first = SetupRequest(theirs, self._owner, self._address(ours), [], [], [])
        return RdmaConnection(peer, f"{ours}>{theirs} of {handshake}", ask, first)

    def accept(self, payload: bytes) -> bytes:
        """Serve a peer's set-up. Lanes that it has dropped end before new ones begin."""
        try:
            request = msgspec.msgpack.decode(payload, type=SetupRequest)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"rdma set-up: {error}; is it of another release?") from error
        if len(request.lanes) > MAX_LANES or len(request.keys) > MAX_KEYS:
            raise InvalidArgument(
                "lanes, keys", (len(request.lanes), len(request.keys)), f"{MAX_LANES}, {MAX_KEYS}"
            )
        for device, pair in request.retired:
            self._native.retire(device, request.owner, pair)
        num_served = self._native.num_served(request.device)
        if num_served + len(request.lanes) > MAX_SERVED:
            raise OutOfMemory(
                f"rdma device {request.device} serves {num_served} lanes; at most {MAX_SERVED} are allowed"
            )
        address = self._address(request.device)
        try:
            grants = self._native.grant(request.device, request.keys)
            lanes = self._native.serve(request.device, request.owner, request.address, request.lanes)
        except OSError as error:
            hint = "; raise its limit of locked memory (ulimit -l)" if error.errno == errno.ENOMEM else ""
            raise OutOfMemory(f"rdma peer's device {request.device}: {error}{hint}") from error
        return msgspec.msgpack.encode(SetupReply(address, lanes, grants))

    def close(self) -> None:
        self._native.close()


def pairs_of(ours: Sequence[str], theirs: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of local and remote devices that form rails."""
    if set(theirs) == set(ours):
        return [(name, name) for name in ours]
    count = max(len(ours), len(theirs)) if theirs else 0
    return [(ours[i % len(ours)], theirs[i % len(theirs)]) for i in range(count)]


def usable_devices(wished: Sequence[str], port: int) -> list[str]:
    """The devices to use: those requested, or all whose port is active.

    Raises:
        InvalidArgument: a device that does not exist.
        Unavailable: no active device, or no library to reach it.
    """
    try:
        present = _native.rdma_devices()
    except OSError as error:
        advice = (
            "install libibverbs (Debian: apt-get install libibverbs1 ibverbs-providers) or leave rdma out"
        )
        raise Unavailable(f"rdma transport: {error}; {advice}") from error
    for name in wished:
        if name not in present:
            seen = f"some of {', '.join(present)}" if present else "nothing: this machine has no RDMA device"
            raise InvalidArgument("rdma_devices", name, seen)
    if wished:
        return list(wished)
    active = [name for name in present if "ACTIVE" in _port_state(name, port)]
    if not active:
        seen = f"port {port} of {', '.join(present)} is not active" if present else "none is here"
        raise Unavailable(
            f"rdma transport needs an active RDMA device, and {seen}; leave rdma out or set one up"
        )
    return active


def _port_state(device: str, port: int) -> str:
    try:
        return Path(f"/sys/class/infiniband/{device}/ports/{port}/state").read_text()
    except OSError:
        return ""
