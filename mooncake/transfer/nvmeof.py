# SPDX-License-Identifier: Apache-2.0
"""NVMe over Fabrics: another host's namespace as a block device of this one, to be opened as a file segment.

Uses only the kernel (``/dev/nvme-fabrics`` and sysfs), so no tool must be installed; root and the
module ``nvme-tcp`` or ``nvme-rdma`` are needed. Independent of engines: ``attach`` returns a device, and
``engine.open_file(namespace.device)`` makes a region of it.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from mooncake.errors import (
    AccessDenied,
    DeadlineExceeded,
    InvalidArgument,
    MooncakeError,
    PeerLost,
    Unavailable,
)
from mooncake.log import get_logger

log = get_logger(__name__)

FABRICS = Path("/dev/nvme-fabrics")
CONTROLLERS = Path("/sys/class/nvme")
TRANSPORTS = ("tcp", "rdma")


@dataclass(frozen=True)
class Namespace:
    """Attached namespace."""

    device: str
    "The block device, for ``TransferEngine.open_file``."
    controller: str
    "The kernel's name of the connection, as in ``/sys/class/nvme``."
    nqn: str
    "The subsystem's qualified name."


def attach(
    transport: str,
    address: str,
    nqn: str,
    *,
    port: int = 4420,
    namespace: int = 1,
    host_nqn: str = "",
    lost_after_s: int = 60,
    timeout_s: float = 10.0,
) -> Namespace:
    """Connect to the subsystem ``nqn`` at ``address`` and wait for its namespace's device.

    ``host_nqn`` is this host's name for the target; empty uses the kernel's own. While the target is
    unreachable, I/O waits; after ``lost_after_s`` seconds it fails.

    Raises:
        InvalidArgument: an unknown transport, or an argument that the kernel rejects.
        AccessDenied: not root, or the target does not admit this host.
        PeerLost, DeadlineExceeded: no target answers there.
        Unavailable: the kernel has no NVMe over Fabrics, or there is no such namespace.
    """
    if transport not in TRANSPORTS:
        raise InvalidArgument("transport", transport, " or ".join(TRANSPORTS))
    deadline = time.monotonic() + timeout_s
    target = f"nvme-{transport} target {nqn} at {address}:{port}"
    if transport == "tcp":
        _check_reachable(address, port, target, timeout_s)  # the kernel would retry for minutes
    parameters = options(transport, address, nqn, port, host_nqn, lost_after_s)
    try:
        with open(FABRICS, "r+b", buffering=0) as fabrics:
            fabrics.write(parameters.encode())
            controller = controller_in(fabrics.read(4096).decode())
    except OSError as error:
        raise _refused(target, transport, error) from error
    try:
        device = _wait_for_device(controller, namespace, deadline, target)
    except MooncakeError:
        _delete(controller)
        raise
    log.info("namespace_attached", target=target, device=device, controller=controller)
    return Namespace(device, controller, nqn)


def detach(namespace: Namespace, timeout_s: float = 10.0) -> None:
    """Detach a namespace; close its regions before. Harmless when it is already detached.

    Raises:
        AccessDenied: not root.
        DeadlineExceeded: the device is still present after ``timeout_s``.
    """
    _delete(namespace.controller)
    deadline = time.monotonic() + timeout_s
    while (CONTROLLERS / namespace.controller).exists():
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"detach {namespace.device}: still there after {timeout_s:g} s; is it in use?"
            )
        time.sleep(0.02)
    log.info("namespace_detached", device=namespace.device, controller=namespace.controller)


def options(transport: str, address: str, nqn: str, port: int, host_nqn: str, lost_after_s: int) -> str:
    """Option string for the kernel."""
    parameters = {"transport": transport, "traddr": address, "trsvcid": str(port), "nqn": nqn}
    parameters["ctrl_loss_tmo"] = str(lost_after_s)
    parameters["reconnect_delay"] = str(max(1, min(10, lost_after_s // 4)))
    if host_nqn:
        parameters["hostnqn"] = host_nqn
    for name, value in parameters.items():
        if not value or "," in value or "\n" in value:
            raise InvalidArgument(name, value, "a word without commas")
    return ",".join(f"{name}={value}" for name, value in parameters.items())


def controller_in(answer: str) -> str:
    """The controller's name in the kernel's answer (``instance=0,cntlid=1``).

    Raises:
        Unavailable: the answer has another form.
    """
    found = re.search(r"\binstance=(\d+)", answer)
    if not found:
        raise Unavailable(f"{FABRICS} answered {answer!r}; this kernel is not supported")
    return f"nvme{found[1]}"


def device_of(controller: str, namespace: int) -> str | None:
    """The block device of a namespace, or None while it does not exist.

    With several paths to a subsystem the controller lists ``nvme0c1n1`` and the device is ``nvme0n1``.
    """
    for entry in sorted((CONTROLLERS / controller).glob("nvme*n*")):
        found = re.fullmatch(r"(nvme\d+)(?:c\d+)?(n\d+)", entry.name)
        try:
            is_it = found is not None and int((entry / "nsid").read_text()) == namespace
        except (OSError, ValueError):
            is_it = found is not None and found[2] == f"n{namespace}"
        if found and is_it:
            return f"/dev/{found[1]}{found[2]}"
    return None


def _check_reachable(address: str, port: int, target: str, timeout_s: float) -> None:
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except TimeoutError as error:
        raise DeadlineExceeded(f"{target}: no answer within {timeout_s:g} s; is it up?") from error
    except (OSError, ValueError) as error:  # ValueError: no host can have this name
        reason = error.strerror if isinstance(error, OSError) else error
        raise PeerLost(f"{target}: {reason}; does it export the subsystem there?") from error


def _wait_for_device(controller: str, namespace: int, deadline: float, target: str) -> str:
    while True:
        device = device_of(controller, namespace)
        if device is not None and os.path.exists(device):
            return device
        if time.monotonic() > deadline:
            raise Unavailable(
                f"{target}: connected, but there is no namespace {namespace}; see what it exports"
            )
        time.sleep(0.02)


def _delete(controller: str) -> None:
    try:
        (CONTROLLERS / controller / "delete_controller").write_text("1")
    except FileNotFoundError:
        return
    except PermissionError as error:
        raise AccessDenied(f"detach {controller}: {error.strerror}; run as root") from error


def _refused(target: str, transport: str, error: OSError) -> MooncakeError:
    match error.errno:
        case errno.ENOENT | errno.ENODEV | errno.ENXIO:
            return Unavailable(f"{FABRICS} is not there; load the kernel's module: modprobe nvme-{transport}")
        case errno.EACCES | errno.EPERM:
            return AccessDenied(
                f"{target}: {error.strerror}; run as root, and let the target admit this host"
            )
        case errno.EALREADY:
            return InvalidArgument("nqn", target, "a subsystem that is not attached yet")
        case errno.ETIMEDOUT:
            return DeadlineExceeded(f"{target}: no answer; is it up?")
        case errno.EINVAL:
            return InvalidArgument("target", target, "what this kernel supports; see its log (dmesg)")
        case _:
            return PeerLost(f"{target}: {error.strerror}; see the kernel's log (dmesg)")
