# SPDX-License-Identifier: Apache-2.0
"""Faults, one at a time, in two real vLLM servers with gateway and store: does ``mooncake doctor`` name each?

    scripts/faults-doctor [--healthy 20] [--only NAME ...] [--out FILE]
    python -m bench.doctor_faults --up [--healthy 20] [--out FILE]

The second one injects its faults into ``mooncake up``, with our workers. Prints a table of the faults, the
findings and the seconds of each examination, and how many of the healthy examinations had a finding that is
broken or wasteful. Of the vLLM servers one stays, the other one is started anew for faults of its
configuration. The reference is the fault itself: the finding that names it is written here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mooncake.rpc import BlockingClient
from mooncake.store import Store, StoreSettings
from mooncake.store import messages as m
from mooncake.transfer import TransferEngine, transfer_from_environment
from tests.cluster import ADMIN_KEY, Cluster, running_cluster, wait_for
from tests.vllm_server import (
    HOST,
    Gateway,
    VllmServer,
    direct_connector,
    free_port,
    running_gateway,
    running_store,
    store_connector,
)

ALARMS = ("broken", "wasteful")


@dataclass(frozen=True)
class EngineFault:
    """How a server is started otherwise, and the codes of which one must be found at it."""

    name: str
    codes: tuple[str, ...]
    flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    connector: str = "store"
    dtype: str = "float32"
    events: str = "all"
    """``all``, ``off`` or ``no_replay``."""
    doctor: tuple[str, ...] = ()


@dataclass(frozen=True)
class Result:
    name: str
    wanted: tuple[str, ...]
    codes: tuple[str, ...]
    alarms: tuple[str, ...]
    seconds: float

    @property
    def is_named(self) -> bool:
        return not self.wanted or any(code in self.codes for code in self.wanted)


class Examinations:
    """The examinations of one deployment, whose store is ``store``, and their results."""

    def __init__(self, folder: Path, store: str) -> None:
        self.folder, self.store = folder, store
        self.results: list[Result] = []

    def examine(self, name: str, wanted: tuple[str, ...], *flags: str, master: str | None = None) -> Result:
        """Run the doctor as its users do."""
        master = self.store if master is None else master
        command = [sys.executable, "-m", "mooncake", "doctor", "--json", *flags]
        command += ["--master", master] if master else []
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
        seconds = time.perf_counter() - began
        if not done.stdout:
            raise RuntimeError(done.stderr)
        (self.folder / f"{name.replace(' ', '-')}.json").write_text(done.stdout)
        findings = json.loads(done.stdout)["findings"]
        codes = tuple(one["code"] for one in findings)
        alarms = tuple(one["code"] for one in findings if one["severity"] in ALARMS)
        result = Result(name, wanted, codes, alarms, seconds)
        self.results.append(result)
        verdict = "named" if result.is_named else "MISSED"
        print(
            f"{name:32} {verdict if wanted else 'healthy':8} {seconds:5.1f} s  {', '.join(codes)}", flush=True
        )
        return result


class Deployment:
    """Two servers, a store and gateways; ``second`` changes from fault to fault."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self.folder, self.model = folder, model
        self.store = stack.enter_context(running_store(folder))
        self.examinations = Examinations(folder, self.store)
        self.first = self._server(EngineFault("first", ()), 0)
        stack.callback(self.first.close)

    def _server(self, fault: EngineFault, core: int) -> VllmServer:
        connector = {
            "store": store_connector(self.store),
            "dead": store_connector(f"{HOST}:{free_port()}"),
            "direct": direct_connector("kv_both", listen_addr=f"{HOST}:{free_port()}"),
            "consumer": store_connector(self.store, "kv_consumer"),
            "none": None,
        }[fault.connector]
        flags = [*fault.flags]
        if fault.events != "off":
            events: dict[str, Any] = {"enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv"}
            events["endpoint"] = f"tcp://*:{free_port()}"
            if fault.events != "no_replay":
                events["replay_endpoint"] = f"tcp://*:{free_port()}"
            flags += ["--kv-events-config", json.dumps(events)]
        name = fault.name.replace(" ", "-")
        return VllmServer(
            name, self.model, self.folder, connector, core, fault.dtype, fault.environment, tuple(flags)
        )

    @contextmanager
    def second(self, fault: EngineFault) -> Iterator[VllmServer]:
        """The other server, with a fault."""
        server = self._server(fault, 1)
        try:
            server.wait_until_ready()
            yield server
        finally:
            server.kill()

    @contextmanager
    def gateway(self, *flags: str) -> Iterator[Gateway]:
        # On a busy machine one may take longer to end than is waited for, which is no finding.
        with (
            contextlib.suppress(subprocess.TimeoutExpired),
            running_gateway(self.folder, self.model, *flags) as gateway,
        ):
            yield gateway


def pool_flags(*servers: VllmServer) -> list[str]:
    return ["--protocol", "pool", "--decode", *(one.address for one in servers)]


def doctor_flags(gateway: Gateway) -> list[str]:
    return ["--url", gateway.url, "--admin-api-key", ADMIN_KEY]


def engine_faults(folder: Path) -> list[EngineFault]:
    shift = folder / "shift"
    shift.mkdir()
    code = "import time\n_real = time.time\ntime.time = lambda: _real() - 300\n"
    (shift / "sitecustomize.py").write_text(code)
    path = f"{os.environ.get('PYTHONPATH', '')}:{shift}"
    return [
        EngineFault("no connector", ("connector_missing",), connector="none"),
        EngineFault("other block size", ("block_size_differs",), ("--block-size", "64")),
        EngineFault("other hash seed", ("hash_seed_differs",), environment={"PYTHONHASHSEED": "7"}),
        EngineFault(
            "other hash algorithm", ("hash_algorithm_differs",), ("--prefix-caching-hash-algo", "sha256_cbor")
        ),
        EngineFault("events off", ("events_off",), events="off"),
        EngineFault("no replay of events", ("events_not_replayable",), events="no_replay"),
        EngineFault("wrong topic", ("events_wrong_topic",), doctor=("--events-topic", "kv@other")),
        EngineFault("prefix caching off", ("prefix_caching_off",), ("--no-enable-prefix-caching",)),
        EngineFault("other dtype", ("pool_not_shared", "cache_dtype_differs"), dtype="bfloat16"),
        EngineFault("stale master", ("pool_not_written",), connector="dead"),
        EngineFault("clock 5 minutes behind", ("clock_skew",), environment={"PYTHONPATH": path}),
        EngineFault("other model name", ("models_differ",), ("--served-model-name", "other")),
        EngineFault(
            "cached tokens hidden", ("cached_tokens_hidden",), ("--no-enable-prompt-tokens-details",)
        ),
    ]


def run(deployment: Deployment, num_healthy: int, only: list[str]) -> None:
    """All faults: first those beside two healthy servers, then those of the second server."""
    deployment.first.wait_until_ready()
    if not only:
        with deployment.second(EngineFault("second", ())) as second:
            beside_healthy_servers(deployment, second, num_healthy)
    first = deployment.first
    for one in engine_faults(deployment.folder):
        if only and one.name not in only:
            continue
        with (
            deployment.second(one) as second,
            deployment.gateway(*pool_flags(first, second)) as gateway,
        ):
            gateway.wait_until_routable()
            deployment.examinations.examine(one.name, one.codes, *doctor_flags(gateway), *one.doctor)
    if only and "decode without KV" not in only:
        return
    with deployment.second(EngineFault("decode without KV", (), connector="none")) as second:
        roles = ["--prefill", first.address, "--decode", second.address]
        with deployment.gateway("--protocol", "sequential", *roles) as gateway:
            gateway.wait_until_routable()
            wanted = ("decode_without_kv",)
            deployment.examinations.examine("decode without KV", wanted, *doctor_flags(gateway), master="")


def beside_healthy_servers(deployment: Deployment, second: VllmServer, num_healthy: int) -> None:
    """Healthy examinations, and faults outside of the servers; at last one is killed."""
    first, examine = deployment.first, deployment.examinations.examine
    with deployment.gateway(*pool_flags(first, second)) as gateway:
        gateway.wait_until_routable()
        for number in range(num_healthy):
            examine(f"healthy {number}", (), *doctor_flags(gateway))
        for fault in outside_faults(
            deployment.examinations, gateway.url, doctor_flags(gateway), first._process.pid, 100
        ):
            fault()
    keys = deployment.folder / "keys.toml"
    keys.write_text('[[keys]]\nname = "a"\nkey = "mk-0123456789abcdef0123456789abcdef"\n')
    keys.chmod(0o600)
    with deployment.gateway("--api-keys-file", str(keys), *pool_flags(first, second)) as gateway:
        wanted = ("client_key_refused",)
        examine("client key wrong", wanted, *doctor_flags(gateway), "--api-key", "mk-wrong")
    engines = ["--engine", first.url, second.url]
    examine("gateway down", ("gateway_unreachable",), "--url", f"http://{HOST}:{free_port()}", *engines)
    with deployment.gateway("--scheduling", "random", *pool_flags(first, second)) as gateway:
        gateway.wait_until_routable()
        examine("scheduling by chance", ("scheduling_ignores_cache",), *doctor_flags(gateway))
    with deployment.gateway("--conductor", f"{HOST}:{free_port()}", *pool_flags(first, second)) as gateway:
        examine("conductor down", ("conductor_unreachable",), *doctor_flags(gateway))
    with deployment.gateway() as gateway:
        examine("no instance", ("no_instance",), *doctor_flags(gateway), *engines)
    with deployment.gateway(*pool_flags(first, second)) as gateway:
        gateway.wait_until_routable()
        second.kill()
        examine("an engine is killed", ("engine_unreachable",), *doctor_flags(gateway))


def outside_faults(
    examinations: Examinations, url: str, flags: list[str], pid: int, short_tokens: int
) -> list[Callable[[], None]]:
    """Faults beside healthy servers, which leave everything as it was.

    ``pid`` is an engine's process; a prompt of ``short_tokens`` is shorter than its block.
    """
    examine, folder = examinations.examine, examinations.folder

    def prompts_shorter_than_a_block() -> None:
        wanted = ("prompt_shorter_than_block",)
        examine("prompts shorter than a block", wanted, *flags, "--prompt-tokens", str(short_tokens))

    def few_files() -> None:
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, before[1]))
        try:
            examine("64 file descriptors", ("few_file_descriptors",), *flags)
        finally:
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)

    def doctor_at_another_store() -> None:
        with running_store(mkdir(folder / "other")) as other, opened(other):
            examine("engines at another store", ("pool_not_written",), *flags, master=other)

    def master_down() -> None:
        examine("master down", ("master_unreachable",), *flags, master=f"{HOST}:{free_port()}")

    def store_full() -> None:
        with running_store(mkdir(folder / "full"), 0.016) as full:
            fill(full)
            examine("full pool", ("store_full",), *flags, master=full)

    def store_without_memory() -> None:
        port = free_port()
        command = [sys.executable, "-m", "mooncake", "master", "--port", str(port)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as master:
            BlockingClient(f"{HOST}:{port}", (m.Flags,)).call(m.Exists(["a key"]), 60.0)
            examine("store without memory", ("store_without_memory",), *flags, master=f"{HOST}:{port}")
            master.terminate()

    def wrong_scheme() -> None:
        https = url.replace("http:", "https:")
        examine("TLS on one side", ("tls_mismatch",), "--url", https, "--admin-api-key", ADMIN_KEY)

    def no_admin_key() -> None:
        examine("admin key missing", ("status_hidden",), "--url", url)

    def slow_disk() -> None:
        promised = ["--disk", str(folder), "--disk-write-mb-s", "1000000"]
        examine("disk slower than promised", ("disk_slow",), *flags, *promised)

    def master_frozen() -> None:
        with running_store(mkdir(folder / "frozen")) as frozen, opened(frozen):
            (daemon,) = pids_listening(int(frozen.rpartition(":")[2]))
            with stopped(daemon):
                wanted = ("master_unreachable",)
                examine("master frozen", wanted, *flags, "--timeout-s", "5", master=frozen)

    return [
        prompts_shorter_than_a_block,
        few_files,
        doctor_at_another_store,
        master_down,
        store_full,
        store_without_memory,
        wrong_scheme,
        no_admin_key,
        slow_disk,
        master_frozen,
    ]


def run_up(examinations: Examinations, cluster: Cluster, num_healthy: int) -> None:
    """Faults of a ``mooncake up``; at last its pool is filled."""
    examine = examinations.examine
    flags = ["--url", cluster.url, "--admin-api-key", ADMIN_KEY]
    for number in range(num_healthy):
        examine(f"healthy {number}", (), *flags)
    for fault in outside_faults(examinations, cluster.url, flags, cluster.pid("decode-0"), 5):
        fault()
    for role, wanted in ROLES_FROZEN.items():
        with stopped(cluster.pid(role)):
            examine(f"{role} frozen", wanted, *flags, "--timeout-s", "5")
        cluster.wait_until_routable()
        with opened(examinations.store) as store:
            wait_for(partial(takes_objects, store), "the store to take objects", 60.0)
    examine("wrong topic", ("events_wrong_topic",), *flags, "--events-topic", "kv@other")
    gone = f"{HOST}:{free_port()}"
    examine("an engine that is not there", ("engine_unreachable",), *flags, "--engine", gone)
    for _ in range(8):  # what was read lately is leased, and makes room when its lease has ended
        fill(examinations.store)
        time.sleep(2.0)
    examine("its own pool full", ("store_full",), *flags)


ROLES_FROZEN = {
    "gateway": ("gateway_unreachable",),
    "conductor": ("conductor_unreachable",),
    "prefill-0": ("engine_unreachable",),
    "decode-0": ("engine_unreachable",),
    "master": ("master_unreachable",),
    "node": ("store_object_lost", "store_without_memory"),
}
"""What names a role of ``mooncake up`` after SIGSTOP: it accepts connections and never answers."""


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def opened(master: str) -> Iterator[Store]:
    """A client of a store that has memory."""
    with (
        TransferEngine(transfer_from_environment().for_tool()) as engine,
        Store(master, engine, StoreSettings(60.0)) as store,
    ):
        wait_for(lambda: store.ask(m.GetMasterStatus()).capacity_bytes > 0, "memory", 60.0)
        yield store


def takes_objects(store: Store) -> bool:
    return store.put(f"probe-{time.monotonic_ns()}", bytes(4096)) is None


def fill(master: str) -> None:
    """Fill a store with objects that are never evicted."""
    with opened(master) as store:
        size = 1 << 20
        while size >= 4096:
            key, policy = f"fill-{time.monotonic_ns()}", m.PutPolicy(is_hard_pinned=True)
            if store.put(key, bytes(size), policy) is not None:
                size >>= 1


def pids_listening(port: int) -> list[int]:
    """The process that listens on a port of this host."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if str(port).encode() in words and b"daemon" in words:
                found.append(int(folder.name))
    return found


def mkdir(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Inject faults into real vLLM servers, and count those named."
    )
    parser.add_argument("--healthy", type=int, default=20, help="number of examinations without a fault")
    parser.add_argument("--only", nargs="*", default=[], help="names of faults of a server, instead of all")
    parser.add_argument("--out", type=Path, help="also write the results to this file, as JSON")
    parser.add_argument("--up", action="store_true", help="inject faults into `mooncake up` instead of vLLM")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="doctor-faults-"))
    if given.up:
        with running_cluster("--prefill", "1", "--decode", "1", "--pool-size", "64MiB") as cluster:
            examinations = Examinations(folder, cluster.address("master"))
            cluster.wait_until_routable()
            run_up(examinations, cluster, given.healthy)
    else:
        with ExitStack() as stack:
            deployment = Deployment(folder, Path(os.environ["MOONCAKE_VLLM_ENV"]) / "model", stack)
            examinations = deployment.examinations
            run(deployment, given.healthy, given.only)
    results = examinations.results
    faults = [one for one in results if one.wanted]
    healthy = [one for one in results if not one.wanted]
    named, false = sum(one.is_named for one in faults), sum(bool(one.alarms) for one in healthy)
    slowest = max(one.seconds for one in results)
    print(
        f"{named} of {len(faults)} faults named; {false} false alarms in {len(healthy)} healthy runs; "
        f"slowest examination {slowest:.1f} s"
    )
    if given.out is not None:
        given.out.write_text(json.dumps([vars(one) for one in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
