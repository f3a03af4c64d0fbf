# SPDX-License-Identifier: Apache-2.0
"""What a credential adds to a call and to a new connection of the RPC: none, a cluster key, TLS, both.

    python -m bench.credentials [--calls 20000] [--connections 400] [--rounds 9]

The server is a process of its own. The kinds take turns in every round, so that other load on the machine
affects all of them. It prints the median of the rounds' medians, and its ratio to no credential.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from bench.report import measured, options
from mooncake.cli.certs import CertsSettings, make, make_cluster_key
from mooncake.rpc import BlockingClient, Call, RpcServer
from mooncake.security import EVERYBODY, Access, Identity, SecuritySettings

WAYS = ("none", "key", "tls", "both")


class Question(msgspec.Struct, array_like=True, tag="question"):
    keys: list[str]


class Answer(msgspec.Struct, array_like=True, tag="answer"):
    flags: bytes


def settings_of(way: str, folder: str) -> SecuritySettings:
    files = (f"{folder}/node.pem", f"{folder}/node.key", f"{folder}/ca.pem")
    key = f"{folder}/cluster.key"
    return {
        "none": SecuritySettings(),
        "key": SecuritySettings(cluster_key_file=key),
        "tls": SecuritySettings(*files),
        "both": SecuritySettings(*files, cluster_key_file=key),
    }[way]


def serve(folder: str, pipe: Connection) -> None:
    def answer(question: Question, call: Call) -> Answer:
        return Answer(bytes(len(question.keys)))

    async def run() -> None:
        ports = {}
        for way in WAYS:
            server = RpcServer(
                {Question: answer},
                access=Access({Question: EVERYBODY}),
                identity=Identity(settings_of(way, folder)),
            )
            ports[way] = await server.start("127.0.0.1", 0)
        pipe.send(ports)
        await asyncio.Event().wait()

    asyncio.run(run())


def seconds_of_calls(address: str, identity: Identity, number: int) -> float:
    client = BlockingClient(address, (Answer,), identity=identity)
    question = Question(["kv/0123456789abcdef"])
    client.call(question, 10)
    times = []
    for _ in range(number):
        since = time.perf_counter()
        client.call(question, 10)
        times.append(time.perf_counter() - since)
    client.close()
    return statistics.median(times)


def seconds_of_connections(address: str, identity: Identity, number: int) -> float:
    times = []
    for _ in range(number):
        since = time.perf_counter()
        client = BlockingClient(address, (Answer,), identity=identity)
        client.call(Question(["k"]), 10)
        times.append(time.perf_counter() - since)
        client.close()
    return statistics.median(times)


def main() -> None:
    parser = options(__doc__, "bench.credentials")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as folder, measured("credentials", arguments) as result:
        make(CertsSettings(folder=Path(folder)))
        make_cluster_key(Path(folder) / "cluster.key")
        ours, theirs = multiprocessing.Pipe()
        server = multiprocessing.get_context("spawn").Process(
            target=serve, args=(folder, theirs), daemon=True
        )
        server.start()
        ports = ours.recv()
        identities = {way: Identity(settings_of(way, folder)) for way in WAYS}
        calls: dict[str, list[float]] = {way: [] for way in WAYS}
        connections: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds):
            for way in WAYS:
                address = f"127.0.0.1:{ports[way]}"
                calls[way].append(
                    seconds_of_calls(address, identities[way], arguments.calls // arguments.rounds)
                )
                number = arguments.connections // arguments.rounds
                connections[way].append(seconds_of_connections(address, identities[way], number))
        server.terminate()
        table = result.table(
            "credential",
            ("one call, us", 1),
            ("more than none, %", 1),
            ("new connection and a call, us", 0),
            title="RPC on loopback",
        )
        none_s = statistics.median(calls["none"])
        for way in WAYS:
            call_s, connect_s = statistics.median(calls[way]), statistics.median(connections[way])
            more = 100 * (call_s / none_s - 1)
            samples = {"call_s": calls[way], "connect_s": connections[way]}
            table.add(way, 1e6 * call_s, more, 1e6 * connect_s, samples=samples)


if __name__ == "__main__":
    main()
