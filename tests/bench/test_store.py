# SPDX-License-Identifier: Apache-2.0
"""The bench of the store: what it compares with what, and the C client of Redis with a small server."""

from __future__ import annotations

import shutil
import socketserver
import subprocess
import threading
from pathlib import Path

import pytest

from bench.report import FASTER_THAN, LIMIT, OF_LIMIT, OVER, Result
from bench.store import PACKAGE, REDIS_C, Row, columns_of, compare, show

ROOT = Path(__file__).parents[2]


class RedisHandler(socketserver.StreamRequestHandler):
    """SET and GET of one connection."""

    def handle(self) -> None:
        values: dict[bytes, bytes] = self.server.values  # type: ignore[attr-defined]
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(size))
                assert self.rfile.read(2) == b"\r\n"
            if words[0] == b"SET":
                values[words[1]] = words[2]
                self.wfile.write(b"+OK\r\n")
            else:
                self.wfile.write(b"$%d\r\n%b\r\n" % (len(values[words[1]]), values[words[1]]))


@pytest.mark.processes
def test_the_client_in_c_puts_and_gets_pipelines(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for the client of Redis; install gcc")
    program = tmp_path / "redis_client"
    source = ROOT / "bench" / "redis_client.c"
    subprocess.run([compiler, "-O1", "-Wall", "-Wextra", "-Werror", "-o", program, source], check=True)
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), RedisHandler) as server:
        server.values = {}  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = [str(program), str(server.server_address[1]), str(1 << 20)]
        orders = "put 100000 3 2\nget 100000 3 1\nput 17 1 5\nget 17 1 2\n"
        done = subprocess.run(words, input=orders, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0] == "ready" and len(lines) == 5 and all(float(line) > 0 for line in lines[1:])
        values: dict[bytes, bytes] = server.values  # type: ignore[attr-defined]
        assert {key: len(value) for key, value in values.items()} == {
            b"key0": 17, b"key1": 100_000, b"key2": 100_000
        }  # fmt: skip
        assert len(set(values[b"key1"][:256])) > 16, "no bytes that a compression would remove"
        wrong = subprocess.run(words, input="get 99 1 1\n", capture_output=True, text=True, timeout=60)
        assert wrong.returncode != 0 and "GET: $17" in wrong.stderr, "another size is no result"
        server.shutdown()


def test_a_row_names_its_limit_and_how_others_moved_their_bytes() -> None:
    made = Result("x", "", "", False, "", "", [])
    systems = [PACKAGE, REDIS_C]
    table = made.table(*columns_of(systems))
    row = Row("shm", "get", 50.0, None, 20_000.0, 2.0, "memcpy, one thread", 8.0)
    compare(row, {(PACKAGE, "get"): [1e-4, 3e-4, 2e-4], (PACKAGE, "put"): [9.0]}, "get")
    show(table, row, systems)
    cells = list(zip((column.name for column in table.columns), table.rows[0], strict=True))
    found = dict(cells)
    assert found[LIMIT] == "memcpy, one thread" and found[OF_LIMIT] == 0.25
    assert found[f"{FASTER_THAN}{PACKAGE}"] == pytest.approx(4.0) and found[f"{FASTER_THAN}{REDIS_C}"] is None
    assert [cell for name, cell in cells if name == OVER] == ["tcp", ""]
