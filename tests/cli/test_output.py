# SPDX-License-Identifier: Apache-2.0
"""Long work shows its progress in a terminal, and nothing of it where the output is piped; output that
can't be written is reported in one line, where possible before the work."""

from __future__ import annotations

import os
import pty
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.cli import main
from mooncake.cli.output import check_writable, write_whole
from mooncake.errors import InvalidArgument
from mooncake.store import Store
from tests.store.test_daemon import daemon

pytestmark = pytest.mark.processes

SIMULATED = "poisson:rate=5,requests=200,input_tokens=2000"
LONG: dict[str, tuple[tuple[str, ...], bytes]] = {
    "put": (("store", "put", "large", "FILE", "--master", "MASTER"), b"storing 4 MiB"),
    "get": (("store", "get", "known", "--master", "MASTER"), b"fetching"),
    "ls": (("store", "ls", "--tree", "--master", "MASTER"), b"counting keys"),
    "rm": (("store", "rm", "--match", "^none", "--master", "MASTER"), b"removing"),
    "verify": (("store", "verify", "--all", "--master", "MASTER"), b"verifying"),
    "drain": (("store", "drain", "here", "--master", "MASTER"), b"draining"),
    "repair": (("store", "repair", "OPLOG"), b"reading"),
    "simulate": (("simulate", SIMULATED, "--cluster", "1P1D"), b"overlap"),
    "plan": (("plan", SIMULATED, "--costs", "llama3-70b-8xH100", "--slo-ttft", "30"), b"tried"),
    "bench transfer": (("bench", "transfer", "--quick", "--path", "shm", "--largest", "64KiB"), b"..."),
}
"""Commands that may take long, with a part of what each shows while it works.

``replay``, ``calibrate`` and ``p2p get`` need other servers; they show theirs by the same library."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("long")
    (folder / "content").write_bytes(b"x" * (4 << 20))
    oplog = folder / "master.oplog"
    with daemon("--capacity-dram", "0.064", "--name", "here", "--oplog", str(oplog)) as (address, _, _):
        with Store(address) as store:
            assert store.put("known", b"content") is None
        copied = folder / "copy.oplog"
        copied.write_bytes(oplog.read_bytes())
        yield {"MASTER": address, "FILE": str(folder / "content"), "OPLOG": str(copied)}


def command(places: dict[str, str], name: str) -> list[str]:
    return [sys.executable, "-m", "mooncake", *(places.get(word, word) for word in LONG[name][0])]


@pytest.mark.parametrize("name", LONG)
def test_a_terminal_shows_progress(places: dict[str, str], name: str) -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        command(places, name), stdout=subprocess.DEVNULL, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    except OSError:  # the other side was closed
        pass
    finally:
        os.close(ours)
        process.wait(120)
    assert LONG[name][1] in shown, shown[-2000:]


@pytest.mark.parametrize("name", ["verify", "ls", "simulate", "plan"])
def test_a_pipe_gets_none(places: dict[str, str], name: str) -> None:
    done = subprocess.run(command(places, name), capture_output=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\x1b" not in done.stdout and done.stdout


WAYS = {
    "ls": ("store", "ls", "--flat", "--master", "MASTER"),
    "get": ("store", "get", "known", "--master", "MASTER"),
    "help": ("store", "--help"),
}


@pytest.mark.parametrize("name", WAYS)
def test_output_to_a_full_disk_is_one_line(places: dict[str, str], name: str) -> None:
    words = [sys.executable, "-m", "mooncake", *(places.get(word, word) for word in WAYS[name])]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: ") and "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["ls", "help"])
def test_a_reader_that_has_ended_is_no_failure(places: dict[str, str], name: str) -> None:
    words = [sys.executable, "-m", "mooncake", *(places.get(word, word) for word in WAYS[name])]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_names_that_the_terminal_cannot_show_are_escaped(places: dict[str, str]) -> None:
    with Store(places["MASTER"]) as store:
        assert store.put("clé", b"content") is None
    words = [sys.executable, "-m", "mooncake", *(places.get(word, word) for word in WAYS["ls"])]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0 and r"cl\xe9" in done.stdout.splitlines(), done.stderr


def test_outputs_that_cannot_be_written_are_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = (
        ["simulate", SIMULATED, "--cluster", "1P1D"],
        ["plan", SIMULATED, "--costs", "llama3-70b-8xH100", "--slo-ttft", "30"],
        ["replay", SIMULATED, "--url", "http://127.0.0.1:9"],
    )
    for words in work:
        for flag in ("--json", "--html"):
            with pytest.raises(SystemExit) as exit:
                main([*words, flag, str(tmp_path / "none" / "file")])
            captured = capsys.readouterr()
            assert exit.value.code == 2 and captured.err.startswith(f"error: {flag} is '"), captured.err
            assert "a file that can be written (No such file or directory)" in captured.err
            assert not captured.out
    with pytest.raises(InvalidArgument, match=r"--json is .*Is a directory"):
        check_writable(tmp_path, "--json")
    check_writable(tmp_path / "file", "--json")
    assert not [*tmp_path.iterdir()]


def test_writing_a_file_leaves_others_beside_it_alone(tmp_path: Path) -> None:
    own, other = tmp_path / "file", tmp_path / "file.new"
    other.write_text("of the user")
    check_writable(own, "--json")
    assert [*tmp_path.iterdir()] == [other]
    write_whole(own, "whole", "--json")
    assert other.read_text() == "of the user" and own.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == [own, other]
    assert own.stat().st_mode == other.stat().st_mode, "as the umask says"
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidArgument, match=r"--json is .*Is a directory"):
        write_whole(tmp_path / "folder", "whole", "--json")
    assert len([*tmp_path.iterdir()]) == 3, "nothing is left of what could not be written"


def test_a_file_is_written_where_links_lead_and_they_stay(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link, dangling = tmp_path / "folder" / "file", tmp_path / "link", tmp_path / "dangling"
    target.write_text("old")
    link.symlink_to(target)
    dangling.symlink_to(tmp_path / "folder" / "fresh")
    for name in (link, dangling):
        check_writable(name, "--json")
        write_whole(name, "new", "--json")
        assert name.is_symlink() and name.resolve().read_text() == "new"
    assert target.read_text() == "new"
    assert sorted((tmp_path / "folder").iterdir()) == [target, tmp_path / "folder" / "fresh"]


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable(pipe, "--json")  # before it has a reader
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "whole", "--json")
        assert os.read(reader, 99) == b"whole"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [*tmp_path.iterdir()] == [pipe]


def test_standard_output_as_a_file_keeps_what_was_printed(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from mooncake.cli.output import write_whole\n"
        "print('table'); write_whole(Path('/dev/stdout'), 'json', '--json'); print(' and more')"
    )
    words = [sys.executable, "-c", code]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "table\njson and more\n"
    with (tmp_path / "out").open("w") as out:
        subprocess.run(words, stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "table\njson and more\n"
    assert [*tmp_path.iterdir()] == [tmp_path / "out"]


def test_a_dash_is_refused_with_the_name_of_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refusal = r"--json is '-'; allowed: .*/dev/stdout"
    with pytest.raises(InvalidArgument, match=refusal):
        check_writable(Path("-"), "--json")
    with pytest.raises(InvalidArgument, match=refusal):
        write_whole(Path("-"), "", "--json")
    assert not [*tmp_path.iterdir()]
