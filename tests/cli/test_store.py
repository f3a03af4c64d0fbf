# SPDX-License-Identifier: Apache-2.0
"""``mooncake store`` as users and scripts call it, against a store in another process."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mooncake.cli import main, output, store
from mooncake.cli.certs import CertsSettings, derive_key, make_cluster_key
from mooncake.errors import InvalidArgument
from mooncake.security import Identity, SecuritySettings, install_identity
from mooncake.store import PutGrant, Store
from mooncake.store import messages as m
from tests.store.test_daemon import daemon

pytestmark = pytest.mark.processes

Done = subprocess.CompletedProcess[bytes]
Run = Callable[..., Done]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with daemon("--capacity-dram", "0.064", "--name", "here") as (address, _, _):
        yield address


@pytest.fixture
def run(address: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    return runner(address, monkeypatch, capsysbinary)


def runner(address: str, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run the command in this process: starting one takes ten times as long as what it does."""

    def call(*words: str, content: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        with pytest.raises(SystemExit) as exit:
            main(["store", *words, "--master", address])
        assert isinstance(exit.value.code, int), exit.value.code
        return Done(words, exit.value.code, *capsysbinary.readouterr())

    return call


def start(*words: str, content: bytes = b"") -> Done:
    """Run the command in a process of its own."""
    command = [sys.executable, "-m", "mooncake", "store", *words]
    return subprocess.run(command, input=content, capture_output=True, timeout=120)


def test_a_process_of_its_own_takes_and_gives_bytes(address: str) -> None:
    content = bytes(range(256)) * 10
    assert start("put", "p/1", "--master", address, content=content).returncode == 0
    found = start("get", "p/1", "--master", address)
    assert (found.returncode, found.stdout, found.stderr) == (0, content, b"")
    assert start("rm", "p/1", "--force", "--master", address).returncode == 0


def test_put_get_ls_stat_rm(run: Run, tmp_path: Path) -> None:
    content = bytes(range(256)) * 10
    assert run("put", "a/1", content=content).returncode == 0
    (tmp_path / "in").write_bytes(b"file")
    assert run("put", "a/2", str(tmp_path / "in"), "--pin", "10m").returncode == 0
    assert run("get", "a/1").stdout == content
    assert run("get", "a/2", "-o", str(tmp_path / "out")).returncode == 0
    assert (tmp_path / "out").read_bytes() == b"file"
    assert run("ls", "a/").stdout == b"a/1\na/2\n"
    assert json.loads(run("ls", "a/", "--json").stdout) == ["a/1", "a/2"]
    limited = run("ls", "a/", "--limit", "1")
    assert limited.stdout == b"a/1\n" and b"--limit" in limited.stderr
    long = run("ls", "a/", "--long").stdout.decode()
    assert "2.5 KiB" in long and "here [memory]" in long
    shown = run("stat", "a/2").stdout.decode()
    assert "4 bytes" in shown and "replica: here [memory]" in shown
    assert re.search(r"pinned: for (9\.\d+|10) min", shown), shown
    assert "readable as" in shown
    found = json.loads(run("stat", "a/1", "--json").stdout)["a/1"]
    assert found["size_bytes"] == len(content)
    again = run("put", "a/1", content=b"other")
    assert again.returncode == 0 and b"--replace" in again.stderr
    assert run("put", "a/1", "--replace", content=b"other").returncode == 0
    assert run("get", "a/1").stdout == b"other"
    assert run("rm", "a/1", "--force").returncode == 0
    assert run("rm", "--match", "^a/", "--force").stdout == b"1 removed\n"
    assert run("ls", "a/").stdout == b""


def test_put_says_whether_the_content_was_stored(
    run: Run, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inspect = Store.inspect

    def during_the_first_look(change: Callable[[Store], object]) -> None:
        """What another client does between the look at the key and the put."""
        is_first = True

        def looked(client: Store, keys: list[str]) -> list[m.ObjectStatus | None]:
            nonlocal is_first
            found, was_first, is_first = inspect(client, keys), is_first, False
            if was_first:
                change(other)
            return found

        monkeypatch.setattr(Store, "inspect", looked)

    def begin_put(client: Store) -> PutGrant:
        (grant,) = client.start_puts(["said"], [2], 4096)
        assert isinstance(grant, PutGrant)
        return grant

    def end_put(client: Store) -> None:
        source = client.engine.allocate(4096, huge_pages=False)
        assert client.write_ranges([begun], [0], [source.address], [2]) == [None]
        assert client.end_puts([begun]) == [None]

    with Store(address) as other:
        begun = begin_put(other)
        during_the_first_look(lambda client: client.abort_puts([begun]))
        assert run("put", "said", content=b"me").stderr == b"", "the other put was aborted"
        assert other.get("said") == b"me" and other.remove(["said"], force=True) == [True]
        begun = begin_put(other)
        during_the_first_look(end_put)
        found = run("put", "said", content=b"me")
        assert found.returncode == 0 and b"was left unchanged" in found.stderr
        assert other.get("said") == bytes(2) and other.remove(["said"], force=True) == [True]
        during_the_first_look(lambda client: client.put("said", b"others"))
        assert b"was left unchanged" in run("put", "said", content=b"me").stderr
        during_the_first_look(lambda client: client.remove(["said"], force=True))
        assert run("put", "said", content=b"me").stderr == b"", "the old one was removed meanwhile"
        assert other.get("said") == b"me" and other.remove(["said"], force=True) == [True]


def test_ls_shows_prefixes_as_a_tree(run: Run) -> None:
    for key in ("t/a/1", "t/a/2", "t/b/c/1"):
        assert run("put", key, content=b"12345").returncode == 0
    assert run("ls", "t/").stdout.count(b"\n") == 3, "piped output stays as it was"
    shown = run("ls", "t/", "--tree").stdout.decode().splitlines()
    assert shown[0] == "t/  3 objects, 15 B" and shown[1].endswith("a/  2 objects, 10 B")
    assert len(shown) == 4 and len(run("ls", "t/", "--tree", "--depth", "1").stdout.splitlines()) == 3
    found = json.loads(run("ls", "t/", "--tree", "--json").stdout)
    assert (found["num_objects"], [one["name"] for one in found["below"]]) == (3, ["a/", "b/"])
    few = run("ls", "t/", "--tree", "--limit", "1")
    assert b"--limit" in few.stderr and b"3 objects" in few.stdout
    assert run("rm", "--match", "^t/", "--force").returncode == 0


def test_keys_are_one_line_each_and_no_commands_to_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, shown, piped = "e/\x1b[2J\n\tx\u2028", rb"e/\x1b[2J\x0a\x09x\x2028", b"e/\x1b[2J\\x0a\tx\\x2028"
    assert run("put", key, content=b"x").returncode == 0
    assert run("ls", "e/").stdout == piped + b"\n"
    assert json.loads(run("ls", "e/", "--json").stdout) == [key]
    assert run("stat", key).stdout.splitlines()[0] == piped
    assert run("ls", "e/", "--long").stdout.count(b"\n") == 2, "the heading and the object"
    again = run("put", key, content=b"x")
    assert again.stderr.startswith(piped + b" exists") and again.stderr.count(b"\n") == 1
    for words in (("ls", "e/", "--flat"), ("ls", "e/", "--long"), ("stat", key), ("verify", key, key + "y")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        found = run(*words)
        assert shown in found.stdout and b"\x1b[2J" not in found.stdout, words
    assert run("rm", key, "--force").returncode == 0


def test_pins(run: Run) -> None:
    run("put", "pinned", content=b"x")
    for words, expected in ((("pin", "pinned"), "hard"), (("unpin", "pinned"), "no")):
        assert run(*words).returncode == 0
        assert f"pinned: {expected}" in run("stat", "pinned").stdout.decode()
    assert run("rm", "pinned", "--force").returncode == 0


@pytest.mark.parametrize("words", [("--match", "^l/"), ("--all",)])
def test_leased_objects_that_rm_leaves_are_counted(run: Run, address: str, words: tuple[str, ...]) -> None:
    for key in ("l/1", "l/2"):
        assert run("put", key, content=b"x").returncode == 0
    with Store(address) as store:
        assert store.exists(["l/2"]) == [True], "which leases it"
        found = run("rm", *words)
    assert (found.returncode, found.stdout) == (1, b"1 removed\n")
    assert found.stderr == b"error: leased objects stay: 1; --force removes them\n"
    assert run("ls", "l/").stdout == b"l/2\n"
    assert run("rm", *words, "--force").stdout == b"1 removed\n"


def test_a_key_of_a_tenant_needs_no_tenant_flag(
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    secret, credential = tmp_path / "cluster.key", tmp_path / "client-acme.key"
    make_cluster_key(secret)
    derive_key(CertsSettings(derive_from=secret, role="client", tenant="acme", out=credential))
    monkeypatch.setenv("MOONCAKE_SECURITY_CLUSTER_KEY_FILE", str(secret))
    with daemon("--capacity-dram", "0.064") as (address, _, _):
        install_identity(Identity(SecuritySettings(cluster_key_file=str(credential))))
        request.addfinalizer(lambda: install_identity(None))

        def shown(*words: str) -> str:
            with pytest.raises(SystemExit) as exit:
                main(["store", *words, "--master", address])
            out, err = capsysbinary.readouterr()
            assert exit.value.code == 0, err
            return out.decode()

        assert shown("put", "k", "/etc/hostname") == ""
        assert shown("ls") == "k\n"
        assert "[memory]" in shown("ls", "--long")
        assert "1 object," in shown("ls", "--tree")
        assert "readable as" in shown("stat", "k")
        assert shown("verify", "--all").startswith("1 good, 0 wrong")
        assert shown("rm", "k", "--force") == ""


def test_verify_finds_what_is_wrong(run: Run, address: str) -> None:
    for number in range(3):
        run("put", f"v/{number}", content=b"good")
    found = run("verify", "--prefix", "v/")
    assert (found.returncode, found.stdout) == (0, b"3 good, 0 wrong, 0 removed meanwhile\n")
    assert json.loads(run("verify", "v/0", "--json").stdout) == {"v/0": True}
    missing = run("verify", "v/0", "v/9")
    assert missing.returncode == 1 and b"not found: v/9" in missing.stdout
    with Store(address) as store:
        assert store.remove_matching("^v/", force=True) == 3


def test_verify_lists_many_keys_in_parts(run: Run, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LISTED_KEYS", 10)
    sent: list[m.ListKeys] = []
    ask = Store.ask

    def noted(client: Store, message: Any) -> Any:
        if isinstance(message, m.ListKeys):
            sent.append(message)
        return ask(client, message)

    monkeypatch.setattr(Store, "ask", noted)
    with Store(address) as client:
        keys = [f"v/{number}" for number in range(35)]
        assert client.put_batch(keys, [b"good"] * 35) == [None] * 35
        found = json.loads(run("verify", "--prefix", "v/", "--json").stdout)
        assert found == dict.fromkeys(keys, True)
        assert [(one.num_parts, one.part) for one in sent] == [(4, part) for part in range(4)]
        assert client.remove_matching("^v/", force=True) == 35


def test_top_shows_the_nodes(run: Run) -> None:
    text = run("top").stdout.decode()
    assert "memory" in text and "here" in text and "61 MiB" in text
    assert "alive" in text and "…" not in text, "nothing is cut to the width of a screen that is not there"
    assert json.loads(run("top", "--json").stdout)["segments"][0]["segment"] == "here"


def test_a_drained_segment_is_empty(address: str) -> None:
    with daemon("--capacity-dram", "0.032", "--name", "there", "--master", address) as (_, _, _):
        with Store(address) as store:
            policy = m.PutPolicy(preferred_segments=["there"])
            assert store.put_batch([f"d/{n}" for n in range(5)], [b"value"] * 5, policy) == [None] * 5
        found = start("drain", "there", "--master", address)
        assert (found.returncode, found.stderr) == (0, b"")
        assert found.stdout.startswith(b"drained there: 5 moved")
        with Store(address) as store:
            assert store.get_batch([f"d/{n}" for n in range(5)]) == [b"value"] * 5
            assert {r.segment for one in store.inspect(["d/0"]) if one for r in one.replicas} == {"here"}
            store.remove_matching("^d/", force=True)


def test_a_drain_that_the_master_forgot_says_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    began = m.JobStatus(7, "drain", "running", "here", 0, 0, 1, 0, "", 0.0, 0.0)
    monkeypatch.setattr(Store, "drain", lambda *_: began)
    monkeypatch.setattr(Store, "job", lambda *_: None)  # as after a restart of the master
    found = run("drain", "here")
    assert found.returncode == 1 and b"no longer knows job 7: it was restarted" in found.stderr
    assert b"here takes new objects again; start the drain again" in found.stderr


@pytest.fixture
def run_alone(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Iterator[Run]:
    """With a store of its own: a drain waits for writes that other tests have begun and not ended."""
    with daemon("--capacity-dram", "0.064", "--name", "here") as (address, _, _):
        yield runner(address, monkeypatch, capsysbinary)


def test_a_segment_whose_drain_failed_takes_objects_again(run_alone: Run) -> None:
    run = run_alone
    assert run("put", "k", "/etc/hostname").returncode == 0
    found = run("drain", "here")
    assert found.returncode == 1
    assert b"no other segment has room" in found.stderr and b"here takes objects again" in found.stderr
    assert run("put", "l", "/etc/hostname").returncode == 0
    waiting = json.loads(run("drain", "here", "--no-wait", "--json").stdout)
    deadline = time.monotonic() + 10.0
    while (refused := run("put", "n", "/etc/hostname")).returncode == 0 and time.monotonic() < deadline:
        assert run("rm", "n").returncode == 0
    assert b"all segments are being drained: here" in refused.stderr
    assert run("undrain", str(waiting["job_id"])).stdout == b"here takes objects again\n"
    assert run("put", "n", "/etc/hostname").returncode == 0
    assert run("rm", "k", "l", "n").returncode == 0


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (("undrain", "12345"), 1, "no drain with number 12345"),
        (("get", "nothing"), 1, "there is no 'nothing'"),
        (("put", "empty"), 1, "standard input is empty"),
        (("put", "k", "/nowhere/at/all"), 2, "FILE"),
        (("put", "k\x7f", "/dev/null"), 1, "/dev/null"),
        (("put", "k" * 2000, "/etc/hostname"), 1, "invalid_key"),
        (("put", "k", "--pin", "soon"), 2, "--pin"),
        (("put", "k", "--replicas", "0"), 2, "--replicas"),
        (("rm",), 2, "--match, or --all"),
        (("rm", "nothing"), 1, "there is no 'nothing'"),
        (("rm", "--match", "("), 2, "("),
        (("pin", "nothing"), 1, "there is no 'nothing'"),
        (("pin", "k", "--for", "-1"), 2, "--for"),
        (("verify",), 2, "--prefix, or --all"),
        (("drain", "nothing"), 1, "nothing"),
        (("stat", "nothing"), 1, ""),
        (("ls", "--limit", "0"), 2, "--limit"),
        (("sl",), 2, "sl"),
    ],
)
def test_what_is_wrong_is_one_line(run: Run, words: tuple[str, ...], status: int, why: str) -> None:
    found = run(*words)
    assert found.returncode == status, found
    assert why in found.stderr.decode() and b"Traceback" not in found.stderr


class Endless(io.RawIOBase):
    """An input without end, or with ``num_left`` bytes."""

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        num = min(len(buffer), self.num_left)
        buffer[:num] = b"x" * num
        self.num_left -= num
        return num


def test_an_input_without_end_is_read_up_to_the_largest_segment(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = 1 << 30
    endless = Endless(given)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(endless)))
    with (tmp_path / "large").open("wb") as large:
        large.truncate(given)
    for file, name in (("-", "standard input"), (str(tmp_path / "large"), str(tmp_path / "large"))):
        with pytest.raises(SystemExit) as exit:
            main(["store", "put", "endless", file, "--master", address])
        assert exit.value.code == 1
        assert f"error: {name} is larger than any object can be" in capsys.readouterr().err
    assert given - endless.num_left < 100 << 20, "of 64 MB of memory"


def test_an_input_of_many_pieces_is_stored_whole(run: Run, tmp_path: Path) -> None:
    content = bytes(range(256)) * (17 << 12)
    (tmp_path / "file").write_bytes(content)
    for words in (("put", "pieces"), ("put", "pieces", str(tmp_path / "file"))):
        assert run(*words, content=content).returncode == 0
        assert run("get", "pieces").stdout == content
        assert run("rm", "pieces", "--force").returncode == 0


def test_a_master_that_is_not_there_is_named() -> None:
    found = start("ls", "--master", "127.0.0.1:9")
    assert found.returncode == 1 and b"127.0.0.1:9" in found.stderr and b"Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (1536, "1.5 KiB"),
        (3 << 40, "3 TiB"),
        (1 << 60, "1.05e+06 TiB"),
    ],
)
def test_sizes(value: int, text: str) -> None:
    assert output.size_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (2.5, "2.5 s"), (600, "10 min"), (7200, "2 h"), (864000, "10 d")]
)
def test_spans(seconds: float, text: str) -> None:
    assert output.span_text(seconds) == text


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), ("5s", 5.0), ("1.5h", 5400.0), ("1d", 86400.0)])
def test_reading_spans(text: str, seconds: Any) -> None:
    assert output.read_span(text, "--for") == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "5x", "m"])
def test_spans_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--for"):
        output.read_span(text, "--for")
