# SPDX-License-Identifier: Apache-2.0
"""A store, and prefill and decode, over RDMA between two machines; ``scripts/test-rdma pair``: two VMs.

The first machine (``VM_RANK`` 0) has master, node and the prefill engine, the second one the decode engine
and the clients, which ask both engines as a gateway does. Every process may use rdma only, so that what
arrives came that way; the counters of the decode engine, of the client and of the network devices say the
same. The engines are those without a model: their KV bytes are real, and another byte gives another answer.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from random import Random

from mooncake import metrics
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from tests.cluster import wait_for
from tests.hosts.network import wait_for_line
from tests.kill.journal import content
from tests.kill.mixed import Request, ask

PATIENCE_S = 300.0
"""An emulated processor takes a minute to start a process."""
MASTER_PORT, ENGINE_PORT, END_PORT = 50051, 8100, 8999
NUM_OBJECTS = 64
NUM_PROMPTS = 6
PROMPT_TOKENS, NUM_TOKENS = 160, 8
MOVED = re.compile(r'^mooncake_transfer_moved_bytes_total\{.*path="(\w+)[^"]*"\} (\S+)', re.MULTILINE)
KV_BYTES = 4 * 2 * 16 * 4
"""KV of one token in all layers."""


def prepare(folder: Path) -> None:
    """Write what both machines read: the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    # The wire between the machines has no other end.
    text = '[security]\ninsecure = true\n[transfer]\ntransports = ["rdma"]\n'
    (folder / "mooncake.toml").write_text(text)


class Machine:
    """The processes of one machine, whose logs are in its own memory."""

    def __init__(self) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._logs: dict[str, Path] = {}

    def start(self, name: str, *words: str) -> None:
        """Start a role and wait until it is ready."""
        self._logs[name] = Path(f"/run/{name}.log")
        with self._logs[name].open("wb") as log:
            child = subprocess.Popen([sys.executable, "-m", "mooncake", *words], stdout=log, stderr=log)
        self._children.append(child)
        wait_for_line(child, self._logs[name], PATIENCE_S)
        print(f"{name} is ready", flush=True)

    def close(self) -> None:
        for child in reversed(self._children):
            child.terminate()
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(20)
            child.kill()

    def show_logs(self) -> None:
        for name, path in self._logs.items():
            print(f"--- {name}", *path.read_text().splitlines()[-12:], sep="\n", flush=True)


@contextlib.contextmanager
def running() -> Iterator[Machine]:
    machine = Machine()
    try:
        yield machine
    except BaseException:
        machine.show_logs()
        raise
    finally:
        machine.close()


def serve(here: str, there: str) -> None:
    """The first machine, until the second one has ended."""
    with running() as machine:
        machine.start("master", "master", "--host", here, "--port", str(MASTER_PORT))
        of_store = ["--master", f"{here}:{MASTER_PORT}", "--host", here]
        sizes = ["--pool-size", "128MiB", "--no-huge-pages"]
        machine.start("node", "node", *of_store, "--name", "node", *sizes)
        engine = ["--role", "prefill", *of_store, "--port", str(ENGINE_PORT), "--transfer-listen-host", here]
        machine.start("prefill", "dev", "fake-engine", *engine)
        with socket.create_server((here, END_PORT)) as listener:
            listener.settimeout(PATIENCE_S)
            listener.accept()[0].close()


def use(here: str, there: str) -> None:
    """The second machine: the decode engine and the clients."""
    master = f"{there}:{MASTER_PORT}"

    def is_serving() -> bool:
        with socket.create_connection((there, ENGINE_PORT), timeout=2):
            return True

    wait_for(is_serving, f"{there}:{ENGINE_PORT} to be open", 2 * PATIENCE_S)
    with running() as machine:
        engine = ["--role", "decode", "--master", master, "--host", here, "--port", str(ENGINE_PORT)]
        machine.start("decode", "dev", "fake-engine", *engine, "--transfer-listen-host", here)
        use_store(master)
        prefill, decode = f"http://{there}:{ENGINE_PORT}", f"http://{here}:{ENGINE_PORT}"
        use_engines(prefill, decode)
        with socket.create_connection((there, END_PORT), timeout=30):
            pass


def use_store(master: str) -> None:
    """Put objects into the other machine's node and read them back, from another client, too."""
    keys = [f"rdma/{number}" for number in range(NUM_OBJECTS)]
    values = [content(key, 1) for key in keys]
    before = card_bytes()
    with Store(master, settings=StoreSettings(timeout_s=60.0)) as store:
        refused = store.put_batch(keys, values, m.PutPolicy())
        assert refused == [None] * NUM_OBJECTS, refused[0]
        assert store.get_batch(keys) == values
    num_bytes = sum(map(len, values))
    moved = moved_bytes(metrics.page().decode())
    assert set(moved) == {"rdma"}, moved
    assert moved["rdma"] >= 2 * num_bytes, (moved, num_bytes)
    carried = card_bytes() - before
    assert carried >= 2 * num_bytes, (carried, num_bytes)
    print(f"store: {NUM_OBJECTS} objects, {num_bytes} B put and got, {moved['rdma']:.0f} B by rdma, "
          f"{carried} B through the card", flush=True)  # fmt: skip


def use_engines(prefill: str, decode: str) -> None:
    """Prompts computed on one machine and decoded on the other give the answer of one engine alone."""
    for number in range(NUM_PROMPTS):
        random = Random(number)
        prompt = [random.randrange(1, 200) for _ in range(PROMPT_TOKENS)]
        body = {"model": "fake", "prompt": prompt, "temperature": 0, "return_token_ids": True}
        whole = Request(number, "/v1/completions", {**body, "max_tokens": NUM_TOKENS})
        alone = ask(prefill, whole, salt="alone")
        handed_over = {"do_remote_decode": True}
        first = Request(number, whole.path, {**body, "max_tokens": 1, "kv_transfer_params": handed_over})
        assert ask(prefill, first).status == 200
        there = ask(decode, whole)
        assert len(alone.token_ids) == NUM_TOKENS and not alone.error, alone
        assert there.token_ids == alone.token_ids, (number, there, alone)
    moved = moved_bytes(page_of(f"{decode}/metrics"))
    assert set(moved) == {"rdma"}, moved
    assert moved["rdma"] >= NUM_PROMPTS * PROMPT_TOKENS * KV_BYTES, moved
    print(f"prefill and decode: {NUM_PROMPTS} answers right, {moved['rdma']:.0f} B of KV by rdma", flush=True)


def moved_bytes(page: str) -> dict[str, float]:
    """Bytes that a process has moved, by path without the device, from its page of metrics."""
    found: dict[str, float] = {}
    for path, value in MOVED.findall(page):
        if float(value):
            found[path] = found.get(path, 0.0) + float(value)
    return found


def card_bytes() -> int:
    """Bytes through the network devices of the RDMA devices, both ways."""
    devices = [path.read_text().strip() for path in Path("/sys/class/infiniband").glob("*/parent")]
    assert devices, "no RDMA device"
    names = [f"{device}/statistics/{name}" for device in devices for name in ("rx_bytes", "tx_bytes")]
    return sum(int((Path("/sys/class/net") / name).read_text()) for name in names)


def page_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def main() -> None:
    if sys.argv[1] == "prepare":
        prepare(Path(sys.argv[2]))
        return
    os.environ["MOONCAKE_CONFIG"] = f"{sys.argv[1]}/mooncake.toml"
    role = serve if os.environ["VM_RANK"] == "0" else use
    role(os.environ["VM_IP"], os.environ["VM_PEER_IP"])


if __name__ == "__main__":
    main()
