# SPDX-License-Identifier: Apache-2.0
"""``mooncake p2p`` as users and scripts call it: peers in processes of their own, one of which is killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mooncake.cli.p2p import _answer
from mooncake.p2p.messages import AskVersions
from tests.cli.conftest import Run
from tests.p2p.peers import contents, elements_of, write_model
from tests.program import Program, programs

pytestmark = pytest.mark.processes


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    with programs(tmp_path) as found:
        yield found


def test_a_checkpoint_from_host_to_host_and_its_next_version(
    tmp_path: Path, start: Callable[..., Program], mooncake: Run
) -> None:
    first = write_model(tmp_path / "a" / "step-1")
    elements = elements_of(first)
    elements[::150] += 1
    second = write_model(tmp_path / "a" / "step-2", elements)
    (tmp_path / "b").mkdir()
    one = start("p2p", "serve", "--root", str(tmp_path / "a"))
    two = start("p2p", "serve", "--root", str(tmp_path / "b"), "--peers", one.address)

    done = mooncake("p2p", "register", "m", "step-1", "--at", one.address)
    assert done.returncode == 0 and "version 1" in done.stdout
    digest = done.stdout.split()[0].partition("@")[2]
    done = mooncake("p2p", "get", "m", "step-1", "--at", two.address)
    assert done.returncode == 0 and digest in done.stdout
    assert contents(tmp_path / "b" / "step-1") == contents(first)

    done = mooncake("p2p", "register", "m", "step-2", "--at", one.address)
    assert f"delta from {digest[:12]}" in done.stdout
    assert mooncake("p2p", "get", "m@2", "step-2", "--at", two.address).returncode == 0
    assert contents(tmp_path / "b" / "step-2") == contents(second)

    done = mooncake("p2p", "list", "--json", "--at", two.address)
    listed = json.loads(done.stdout)
    assert [(row["name"], row["number"], len(row["peers"])) for row in listed] == [("m", 1, 2), ("m", 2, 2)]
    one.process.kill()
    one.process.wait()
    shutil.rmtree(tmp_path / "a")

    done = mooncake("p2p", "get", f"m@{digest}", str(tmp_path / "c"), "--peer", two.address)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "c") == contents(tmp_path / "b" / "step-1")
    done = mooncake("p2p", "list", "--at", two.address)
    assert digest in done.stdout and "1 whole" in done.stdout
    done = mooncake("p2p", "drop", "m", "--delete", "--at", two.address)
    assert done.stdout.count("dropped m@") == 2 and not (tmp_path / "b" / "step-1").exists()


def test_what_is_wrong_is_said_in_a_line(
    tmp_path: Path, start: Callable[..., Program], mooncake: Run
) -> None:
    (tmp_path / "a").mkdir()
    one = start("p2p", "serve", "--root", str(tmp_path / "a"))
    for status, reason, words in (
        (2, "--peer", ("get", "m", "x")),
        (2, "NAME@", ("get", "m@new", "x", "--at", one.address)),
        (2, "--limit-rate is 'abc'", ("get", "m", "x", "--peer", one.address, "--limit-rate", "abc")),
        (1, "no peer has", ("get", "m", "x", "--at", one.address)),
        (1, "no peer has", ("get", "m", str(tmp_path / "x"), "--peer", one.address)),
        (1, "no peer answers", ("get", "m", str(tmp_path / "x"), "--peer", "127.0.0.1:9")),
        (1, "has no version", ("drop", "m", "--at", one.address)),
        (2, "below", ("register", "m", "/etc", "--at", one.address)),
        (2, "digest", ("register", "m", "x", "--base", "abc", "--at", one.address)),
        (2, "root", ("serve", "--root", str(tmp_path / "absent"))),
        (2, "credential", ("serve", "--root", str(tmp_path), "--host", "0.0.0.0", "--port", "0")),
    ):
        done = mooncake("p2p", *words)
        assert done.returncode == status and reason in done.stderr, (words, done)
        assert "Traceback" not in done.stderr


def test_list_asks_other_peers_at_once_and_goes_on_without_them(
    tmp_path: Path, start: Callable[..., Program], mooncake: Run
) -> None:
    model = write_model(tmp_path / "a" / "model")
    assert model.exists()
    one = start("p2p", "serve", "--root", str(tmp_path / "a"), "--peers", "127.0.0.1:9")
    assert mooncake("p2p", "register", "m", "model", "--at", one.address).returncode == 0
    done = mooncake("p2p", "get", "m", str(tmp_path / "copy"), "--peer", one.address)  # a peer that ends
    assert done.returncode == 0, done.stderr
    for text in ("xyz", "a..b:1", "127.0.0.1:1"):  # as a peer may name itself
        _answer(one.address, AskVersions("", False, text), 5.0)
    done = mooncake("p2p", "list", "--json", "--at", one.address)
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in json.loads(done.stdout)] == ["m"]
    assert done.stderr == "no answer from peers that others named: 127.0.0.1:1\n"
