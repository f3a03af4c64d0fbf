# SPDX-License-Identifier: Apache-2.0
"""Loading one model to several peers of the P2P store, over links of known speed.

Run ``python -m bench.p2p`` as root. Each peer is a process in a network namespace of its own, joined to the
others by a bridge through a link whose speed ``tc`` limits in both directions, so that the reference is
known: one copy takes as long as its bytes on one link. The model is a safetensors folder of 269 MB (the
tensors of SmolLM2-135M in bfloat16, with random bytes), in memory (``/dev/shm``), because seven copies on one
disk would measure the disk.

Measured: the time until the last of 1, 3 and 7 peers has the whole folder; the same with the source killed
when the peers together have received a share of one copy (``--kill``); the bytes that each peer receives for
a version of which 1 % of all elements differ, by the counters of its link. Folders are compared with the
source's by digest.

What it cannot show: links that lose packets, and hosts with a clock, a disk and cores of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import enum
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from bench.report import Result, Table, exit_on_sigterm, measured, not_run, options
from mooncake.p2p import P2pSettings, P2PStore
from mooncake.security import Identity, SecuritySettings

PORT = 7300
HUB = f"mc-p2p-hub-{os.getpid()}"
HIDDEN, INNER, LAYERS, VOCABULARY, KV = 576, 1536, 30, 49152, 192
GOAL = 1.3
PATIENCE_S = 600.0
KILL_SHARE, AWAY_S = 0.4, 3.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def namespace(number: int) -> str:
    return f"mc-p2p-{number}-{os.getpid()}"


def address(number: int) -> str:
    return f"10.78.0.{number + 1}"


@contextlib.contextmanager
def links(num_hosts: int, mbit: int) -> Iterator[None]:
    """Create a namespace for each host, joined by a bridge; each link has ``mbit`` in either direction."""
    try:
        ip("netns", "add", HUB)
        ip("-n", HUB, "link", "add", "hub", "type", "bridge")
        ip("-n", HUB, "link", "set", "hub", "up")
        for i in range(num_hosts):
            ip("netns", "add", namespace(i))
            end = "peer", "name", f"p{i}", "netns", HUB
            ip("link", "add", "up0", "netns", namespace(i), "type", "veth", *end)
            ip("-n", HUB, "link", "set", f"p{i}", "master", "hub")
            ip("-n", namespace(i), "addr", "add", f"{address(i)}/24", "dev", "up0")
            ip("-n", namespace(i), "link", "set", "lo", "up")
            for place, name in ((HUB, f"p{i}"), (namespace(i), "up0")):
                ip("-n", place, "link", "set", name, "up")
                limit = f"tc qdisc add dev {name} root tbf rate {mbit}mbit burst 256k latency 100ms"
                ip("netns", "exec", place, *limit.split())
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for host in Host.running:
            host.kill()
        Host.running.clear()
        for name in (*map(namespace, range(num_hosts)), HUB):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def received(number: int) -> int:
    """Bytes that a host's link has received."""
    words = ["ip", "netns", "exec", namespace(number), "cat", "/sys/class/net/up0/statistics/rx_bytes"]
    return int(subprocess.run(words, capture_output=True, check=True, text=True).stdout)


# The model


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        found[f"{at}input_layernorm.weight"] = (HIDDEN,)
        for name, size in (("q", HIDDEN), ("k", KV), ("v", KV), ("o", HIDDEN)):
            found[f"{at}self_attn.{name}_proj.weight"] = (size, HIDDEN)
        found[f"{at}post_attention_layernorm.weight"] = (HIDDEN,)
        for name, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            found[f"{at}mlp.{name}_proj.weight"] = (rows, columns)
    return found | {"model.norm.weight": (HIDDEN,)}


def write_model(folder: Path, layers: int) -> int:
    """Write a folder as Hugging Face has it; return the number of elements."""
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes(layers).items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    encoded = json.dumps(header).encode()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": HIDDEN, "num_hidden_layers": layers}))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.write(np.random.default_rng(1).bytes(at))
    return at // 2


def change_model(old: Path, new: Path, share: float) -> int:
    """Copy a model with ``share`` of all its elements changed; return how many."""
    shutil.copytree(old, new)
    content = np.fromfile(new / "model.safetensors", dtype=np.uint8)
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    elements = content[start:].view("<u2") if start % 2 == 0 else content[start:].copy().view("<u2")
    random = np.random.default_rng(2)
    places = np.flatnonzero(random.random(len(elements), dtype=np.float32) < share)
    elements[places] ^= random.integers(1, 1 << 16, len(places), dtype=np.uint16)
    with (new / "model.safetensors").open("wb") as file:
        file.write(content[:start].tobytes() + elements.tobytes())
    return len(places)


def digest_of(folder: Path) -> str:
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            total.update(name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


# A peer: a process that is commanded by lines of JSON


async def serve(number: int) -> None:
    peers = tuple(f"{address(0)}:{PORT}" for _ in range(number > 0))
    settings = P2pSettings(host=address(number), port=PORT, peers=peers, stall_s=60.0)
    identity = Identity(SecuritySettings(insecure=True))
    async with P2PStore(settings, identity=identity) as store:
        print(json.dumps({"ready": True}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            folder = Path(command["folder"])
            began = time.perf_counter()
            reply: dict[str, Any]
            if command["do"] == "register":
                info = await store.register("model", folder, number=command["number"])
                reply = {"deltas": [one.size_bytes for one in info.deltas]}
            elif command["do"] == "spread":
                while not store.num_copies_sent(store.held[0].manifest.digest):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                reply = {}
            else:
                found = await store.get("model", folder, number=command["number"])
                reply = {"missing": found is None}
            print(json.dumps({"seconds": time.perf_counter() - began, **reply}), flush=True)


class Case(enum.Enum):
    """What happens to the source meanwhile."""

    STAYS = "the source stays"
    SPREAD = "the source is killed when it has sent one copy"
    RESTART = "the source is killed at 40 % of a copy, and started again 3 s later"


class Host:
    """A peer's process in its namespace; ``running`` has all that were started."""

    running: ClassVar[list[Host]] = []

    def __init__(self, number: int) -> None:
        self.running.append(self)
        self.number = number
        words = ["ip", "netns", "exec", namespace(number), sys.executable, "-m", "bench.p2p"]
        self.process = subprocess.Popen(
            [*words, "--peer", str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.wait()

    def tell(self, do: str, folder: Path, number: int = 0) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, "folder": str(folder), "number": number}) + "\n")
        self.process.stdin.flush()

    def wait(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"peer {self.number} ended with {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.communicate(timeout=60)


def load(
    hosts: list[Host], folders: list[Path], number: int, case: Case, model: Path, size: int
) -> list[float]:
    """Let all but the first host load a version; return the seconds of each."""
    began = time.perf_counter()
    for host, folder in zip(hosts[1:], folders, strict=True):
        host.tell("get", folder, number)
    if case is Case.SPREAD:
        hosts[0].tell("spread", model)
        hosts[0].wait()
        hosts[0].kill()
    elif case is Case.RESTART:
        while sent_by(0) < KILL_SHARE * size:
            time.sleep(0.02)
            assert time.perf_counter() - began < PATIENCE_S
        hosts[0].kill()
        time.sleep(AWAY_S)  # not a wait for anything: the source is away for that long
        hosts[0] = Host(0)
        hosts[0].tell("register", model, 1)
        hosts[0].wait()
    return [float(host.wait()["seconds"]) for host in hosts[1:]]


def run(
    table: Table, root: Path, num_peers: int, mbit: int, model: Path, case: Case, single_s: float
) -> tuple[float, list[Host], list[Path]]:
    """Load the model to ``num_peers``; return the time of the last, and the hosts, which still run."""
    size = size_of(model)
    hosts = [Host(i) for i in range(num_peers + 1)]
    hosts[0].tell("register", model)
    hosts[0].wait()
    folders = [root / f"peer-{i}-{num_peers}-{case.name}" for i in range(1, num_peers + 1)]
    seconds = load(hosts, folders, 0, case, model, size)
    copies = sent_by(0) / size
    wanted = digest_of(model)
    right = sum(digest_of(folder) == wanted for folder in folders)
    last = max(seconds)
    floor, ratio = size * 8 / (mbit * 1e6), last / (single_s or last)
    cells = num_peers, case.value, floor, last, ratio, f"{right} of {num_peers}", copies
    table.add(*cells, samples={"seconds": seconds})
    return last, hosts, folders


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def sent_by(number: int) -> int:
    """Bytes that a host's link has sent."""
    words = ["ip", "netns", "exec", namespace(number), "cat", "/sys/class/net/up0/statistics/tx_bytes"]
    return int(subprocess.run(words, capture_output=True, check=True, text=True).stdout)


def measure(result: Result, root: Path, counts: list[int], mbit: int, layers: int) -> None:
    model = root / "model-1"
    num_elements = write_model(model, layers)
    size = sum(path.stat().st_size for path in model.iterdir())
    if priority := os.nice(0):
        result.note(f"run with nice {priority}, because other programs used both cores")
    result.note(f"{size / 1e6:.1f} MB, {num_elements:,} elements of bfloat16; links of {mbit} Mbit/s")
    table = result.table(
        *("peers", "case", ("floor s", 2), ("last s", 2), ("/ single", 2), "right", ("copies sent", 2)),
        title="time until the last peer has the whole folder",
    )
    single = 0.0
    hosts: list[Host] = []
    folders: list[Path] = []
    for num_peers in counts:
        with links(num_peers + 1, mbit):
            last, hosts, folders = run(table, root, num_peers, mbit, model, Case.STAYS, single)
            single = single or last
            if num_peers == counts[-1]:
                change(result, root, model, hosts, num_peers)
            for host in hosts:
                host.close()
        for folder in folders:
            shutil.rmtree(folder)
    for case in (Case.SPREAD, Case.RESTART):
        with links(counts[-1] + 1, mbit):
            _, hosts, folders = run(table, root, counts[-1], mbit, model, case, single)
            for host in hosts:
                host.close()
        for folder in folders:
            shutil.rmtree(folder)
    lines = (
        f"floor: the bytes over one link. Goal: the last within {GOAL} of a single peer's time.",
        "Copies sent: bytes that the source's link sent, in copies of the folder.",
        "The second case with a kill has its source started again, at the same address: at that time",
        "the peers do not have every chunk.",
    )
    table.note = "\n".join(lines)


def change(result: Result, root: Path, model: Path, hosts: list[Host], num_peers: int) -> None:
    """Load a version with 1 % of the elements changed to peers that have the one before."""
    new = root / "model-2"
    num_changed = change_model(model, new, 0.01)
    hosts[0].tell("register", new)
    made = hosts[0].wait()
    before = [received(host.number) for host in hosts]
    folders = [root / f"next-{i}" for i in range(1, num_peers + 1)]
    seconds = load(hosts, folders, 2, Case.STAYS, new, size_of(new))
    taken = [(received(host.number) - was) / 1e6 for host, was in zip(hosts, before, strict=True)][1:]
    wanted = digest_of(new)
    right = sum(digest_of(folder) == wanted for folder in folders)
    table = result.table(
        *("changed elements", ("delta MB", 2), ("most MB to a peer", 2)),
        *(("last s", 2), ("made in s", 2), "right"),
        title="a version of which 1 % of the elements differ",
    )
    table.add(
        f"{num_changed:,}",
        made["deltas"][0] / 1e6,
        max(taken),
        max(seconds),
        float(made["seconds"]),
        f"{right} of {num_peers}",
        samples={"mb": taken, "seconds": seconds},
    )
    table.note = "Bytes: all that the peer's link received, overhead of the protocols included."
    for folder in (new, *folders):
        shutil.rmtree(folder)


def main() -> None:
    parser = options(__doc__, "bench.p2p")
    parser.add_argument("--mbit", type=int, default=200, help="speed of each link, in either direction")
    parser.add_argument("--peers", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--peer", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer is not None:
        asyncio.run(serve(arguments.peer))
        return
    if os.geteuid() != 0 or shutil.which("tc") is None:
        not_run(
            "it makes network namespaces, for which it must be root and have ip and tc (Debian: iproute2)"
        )
    exit_on_sigterm()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with measured("p2p", arguments) as result, tempfile.TemporaryDirectory(dir=memory) as root:
        layers = 2 if arguments.quick else LAYERS
        measure(result, Path(root), arguments.peers, arguments.mbit, layers)


if __name__ == "__main__":
    main()
