# SPDX-License-Identifier: Apache-2.0
"""The roles of a cluster on one host, what ``mooncake up`` refuses before it starts anything, its display."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from mooncake.cli import INTERRUPTED, main, up
from mooncake.cli.certs import CertsSettings, make
from mooncake.cli.output import check_writable
from mooncake.cli.ports import RolePlace, free_ports
from mooncake.cli.processes import HttpCheck, Processes, RolePlan
from mooncake.cli.role_command import Invocation
from mooncake.cli.supervisor import RoleExited, RoleReady, RoleSpec, StartAll, StopAll, Supervisor
from mooncake.cli.up import (
    LARGEST_DEFAULT_POOL_BYTES,
    Credentials,
    StatusBoard,
    UpSettings,
    check_certificate,
    check_status_file,
    cluster_roles,
    default_pool_bytes,
    gateway_place,
    keep_logs_before,
    locked_log_folder,
    places_here,
    plan_cluster,
    prepare_model,
    program_here,
    quiet_threads,
    ray_classes,
    read_resources,
    security_flags,
    threads_per_worker,
    welcome,
    write_status,
)
from mooncake.config import LogSettings
from mooncake.errors import InvalidArgument
from mooncake.machine import Wake
from mooncake.security import Identity, SecuritySettings, install_identity

UP = ("up", "--port", "0", "--pool-size", "64MiB")


def planned(settings: UpSettings, file: Path | None = None) -> dict[str, RolePlan]:
    given = Invocation(settings, LogSettings(level="debug"), file)
    roles = cluster_roles(settings)
    places = places_here(settings, roles)
    places["gateway"] = gateway_place(settings, places["gateway"])
    return plan_cluster(settings, given, "/models/smollm2", "swordfish", Path("/state"), roles, places)


def flag(plan: RolePlan, name: str) -> str:
    return plan.command[plan.command.index(name) + 1]


def test_every_role_has_its_process_and_its_port() -> None:
    plans = planned(UpSettings(prefill=3, decode=1, port=8123))
    assert [*plans] == [
        *["metadata", "master", "node", "prefill-0", "prefill-1", "prefill-2", "decode-0"],
        *["conductor", "gateway"],
    ]
    assert len({plan.port for plan in plans.values()}) == 9
    assert plans["gateway"].port == 8123
    Supervisor([plan.spec for plan in plans.values()]).check()


def test_a_prefill_group_is_a_process_per_stage_and_one_instance() -> None:
    plans = planned(UpSettings(prefill=0, decode=1, prefill_group="2x3", num_threads=1))
    first, second, third = (plans[f"prefill-group-1{end}"] for end in ("", "-stage-1", "-stage-2"))
    peers = [word for word in first.command if word in (second.address, third.address)]
    assert peers == [second.address, third.address] and first.command.count("--pipeline-peers") == 2
    assert [flag(one, "--pipeline-stage") for one in (second, third)] == ["1", "2"]
    assert flag(third, "--pipeline-stages") == "3"
    assert {second.name, third.name} < {*first.spec.after}
    at = plans["gateway"].command.index("--prefill")
    assert plans["gateway"].command[at + 1 : at + 4] == (
        *(plans[name].address for name in ("prefill-group-0", "prefill-group-1")),
        "--decode",
    )
    assert UpSettings(prefill_group="2").groups == (1, 2)
    assert UpSettings(prefill=1, decode=2, prefill_group="2x3").num_computing == 9
    Supervisor([plan.spec for plan in plans.values()]).check()


@pytest.mark.parametrize("group", ["1", "2x1", "2x", "3x65"])
def test_a_group_of_fewer_than_two_stages_is_refused(group: str) -> None:
    with pytest.raises(InvalidArgument, match="prefill_group"):
        UpSettings(prefill_group=group)
    with pytest.raises(InvalidArgument, match="unless prefill_group is set"):
        UpSettings(prefill=0)


def test_port_0_takes_a_real_one() -> None:
    gateway = planned(UpSettings(port=0))["gateway"]
    assert gateway.port >= 20_000
    assert flag(gateway, "--port") == str(gateway.port)


def test_a_gateway_that_listens_everywhere_is_called_here() -> None:
    plans = planned(UpSettings(host="0.0.0.0"))
    assert (flag(plans["gateway"], "--host"), plans["gateway"].host) == ("0.0.0.0", "127.0.0.1")
    assert (flag(plans["master"], "--host"), plans["master"].host) == ("127.0.0.1", "127.0.0.1")


def test_an_ipv6_address_has_brackets_wherever_a_port_follows() -> None:
    gateway = planned(UpSettings(host="::1", port=8123))["gateway"]
    assert (gateway.host, gateway.address, flag(gateway, "--host")) == ("::1", "[::1]:8123", "::1")
    settings = UpSettings(on="ray", prefill=1, decode=1)
    roles = cluster_roles(settings)
    places = {role.name: RolePlace("fd00::1", tuple(range(7000, 7000 + role.num_ports))) for role in roles}
    given = Invocation(settings, LogSettings(), None)
    plans = plan_cluster(settings, given, "m", "key", Path("/state"), roles, places, program=())
    assert flag(plans["decode-0"], "--master") == "[fd00::1]:7000"
    assert flag(plans["master"], "--kv-events-endpoint") == "tcp://[fd00::1]:7001"


def test_the_master_keeps_its_log_by_the_port_of_the_cluster() -> None:
    plans = planned(UpSettings(port=8123))
    assert flag(plans["master"], "--oplog") == "/state/master-8123.oplog"


def test_roles_get_the_addresses_of_each_other() -> None:
    plans = planned(UpSettings(prefill=1, decode=1, pool_size_bytes=64 << 20, scheduling="round_robin"))
    master = plans["master"].address
    assert all(flag(plans[name], "--master") == master for name in ("node", "prefill-0", "decode-0"))
    assert flag(plans["node"], "--pool-size") == "64MiB"
    assert flag(plans["prefill-0"], "--role") == "prefill"
    assert flag(plans["prefill-0"], "--model") == "/models/smollm2"
    assert flag(plans["prefill-0"], "--served-model-name") == "smollm2"
    assert flag(plans["conductor"], "--scheduling") == "round_robin"
    assert flag(plans["conductor"], "--pool-events") == flag(plans["master"], "--kv-events-endpoint")
    assert flag(plans["conductor"], "--pool-events-replay") == flag(
        plans["master"], "--kv-events-replay-endpoint"
    )
    assert flag(plans["gateway"], "--prefill") == plans["prefill-0"].address
    assert flag(plans["gateway"], "--decode") == plans["decode-0"].address
    assert flag(plans["gateway"], "--conductor") == plans["conductor"].address


def test_conductors_know_each_other_and_the_gateway_knows_all() -> None:
    plans = planned(UpSettings(conductors=3))
    names = ["conductor", "conductor-2", "conductor-3"]
    addresses = [plans[name].address for name in names]
    for name in names:
        command = plans[name].command
        peers = [command[at + 1] for at, word in enumerate(command) if word == "--peers"]
        assert sorted(peers) == sorted({*addresses} - {plans[name].address})
    assert flag(plans["gateway"], "--conductor") == ",".join(addresses)
    assert {*names} <= {*plans["gateway"].spec.after}
    Supervisor([plan.spec for plan in plans.values()]).check()


def test_the_admin_key_is_on_no_command_line() -> None:
    plans = planned(UpSettings())
    assert plans["gateway"].secrets["ADMIN_API_KEY"] == "swordfish"
    assert not any("swordfish" in repr(plan) for plan in plans.values())
    assert not any("swordfish" in word for plan in plans.values() for word in plan.command)


def test_children_log_and_are_configured_as_we_are(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text("[master]\n")
    for plan in planned(UpSettings(), tmp_path / "m.toml").values():
        assert plan.command[:3] == (sys.executable, "-m", "mooncake")
        assert flag(plan, "--log-level") == "debug"
        assert flag(plan, "--config") == str(tmp_path / "m.toml")


@pytest.fixture
def certified(tmp_path: Path) -> Iterator[SecuritySettings]:
    """This process has a certificate."""
    make(CertsSettings(folder=tmp_path))
    files = SecuritySettings(str(tmp_path / "node.pem"), str(tmp_path / "node.key"), str(tmp_path / "ca.pem"))
    install_identity(Identity(files))
    yield files
    install_identity(None)


def test_with_a_certificate_everything_speaks_tls(certified: SecuritySettings) -> None:
    plans = planned(UpSettings())
    for plan in plans.values():
        for name in ("tls_cert", "tls_key", "tls_ca"):
            assert flag(plan, f"--{name.replace('_', '-')}") == getattr(certified, name)
        assert plan.ready is None or plan.ready.over == "member", plan.name
    assert flag(plans["node"], "--metadata") == f"https://{plans['metadata'].address}/metadata"


@pytest.mark.parametrize("has_certificate", [False, True])
def test_a_gateway_is_checked_as_its_own_settings_require(
    has_certificate: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if has_certificate:
        request.getfixturevalue("certified")
    file = tmp_path / "mooncake.toml"
    file.write_text('[gateway]\nhttps_cert = "public.pem"\nhttps_key = "public.key"\n')
    assert [planned(UpSettings(), given)["gateway"].ready for given in (None, file)] == [
        HttpCheck("/ready", over="member" if has_certificate else "http"),
        HttpCheck("/ready", over="https"),
    ]


def test_threads_and_pool_fit_the_machine() -> None:
    assert threads_per_worker(UpSettings(num_threads=3)) == (3, 3)
    assert threads_per_worker(UpSettings(prefill=64, decode=64)) in ((1, 1), (2, 2))
    on_ray = UpSettings(on="ray", prefill_resources="CPU=8,GPU=1", decode_resources="GPU=1")
    assert threads_per_worker(on_ray) == (8, 1)
    assert quiet_threads(2)["OMP_WAIT_POLICY"] == "PASSIVE"
    assert 0 < default_pool_bytes() <= LARGEST_DEFAULT_POOL_BYTES
    assert default_pool_bytes() % (1 << 20) == 0


def test_every_role_takes_the_flags_it_gets(capsys: pytest.CaptureFixture[str]) -> None:
    """The plan repeats other packages' flags; this detects a renamed one."""
    seen = set()
    for plan in planned(UpSettings()).values():
        if plan.command[3] in seen:
            continue
        seen.add(plan.command[3])
        with pytest.raises(SystemExit) as exit:
            main([*plan.command[3:], "--print-config"])
        text = capsys.readouterr()
        assert exit.value.code == 0, f"{plan.name}: {text.err}"
        assert f"[{plan.command[3]}]" in text.out
    assert len(seen) == 6


def identity_of(
    folder: Path, authority: Path | None = None, host: tuple[str, ...] = CertsSettings.host
) -> Identity:
    make(CertsSettings(folder=folder, host=host))
    ca = (authority or folder) / "ca.pem"
    return Identity(SecuritySettings(str(folder / "node.pem"), str(folder / "node.key"), str(ca)))


def test_a_certificate_for_this_host_will_do(tmp_path: Path) -> None:
    check_certificate(identity_of(tmp_path))
    check_certificate(Identity())


def test_a_certificate_that_does_not_name_this_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"node\.pem.*names 127\.0\.0\.1"):
        check_certificate(identity_of(tmp_path, host=("node-1.example", "10.0.0.1")))


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path / "other"))
    with pytest.raises(InvalidArgument, match=r"node\.pem.*authority in tls_ca"):
        check_certificate(identity_of(tmp_path / "ours", tmp_path / "other"))


def some_processes(folder: Path) -> Processes:
    plans = [
        RolePlan(RoleSpec("master"), ("true",), "127.0.0.1", 50051),
        RolePlan(RoleSpec("node", ("master",)), ("true",), "127.0.0.1", 50052),
        RolePlan(RoleSpec("gateway", ("node",)), ("true",), "127.0.0.1", 8000),
    ]
    processes = Processes(plans, folder, lambda *rest: None, lambda: None, lambda: None)
    for event in (StartAll(), RoleReady("master"), RoleExited("node", 1)):
        processes.supervisor.handle(event, 10.0)  # the core alone: no process is started
    return processes


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--pool-size", "99999TiB"), "error: --pool-size is '99999TiB'; allowed: at most "),
        (("--device", "cuda:99"), "error: device is 'cuda:99'; allowed: cpu or auto: torch finds "),
    ],
)
def test_what_this_host_lacks_is_refused_before_any_role_starts(
    tmp_path: Path, flags: tuple[str, ...], why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="looks for GPUs")
    with pytest.raises(SystemExit) as exit:
        main(["up", "--port", "0", "--log-dir", str(tmp_path / "logs"), *flags])
    captured = capfd.readouterr()
    assert exit.value.code == 2 and captured.err.startswith(why), captured
    assert "starting" not in captured.out + captured.err


def test_the_table_shows_every_role(tmp_path: Path) -> None:
    out = io.StringIO()
    board = StatusBoard(Console(file=out, width=120))
    board.processes = some_processes(tmp_path)
    board.console.print(board.table())
    lines = {line.split()[0]: line for line in out.getvalue().splitlines() if line.strip()}
    assert "ready" in lines["master"]
    assert "127.0.0.1:50051" in lines["master"]
    assert "died, restart in" in lines["node"]
    assert "waiting" in lines["gateway"]


def test_without_a_terminal_there_are_plain_lines() -> None:
    out = io.StringIO()
    with StatusBoard(Console(file=out, width=20)) as board:
        board.say("node", "died (exit status 1); restarting in 0.5 s", ["error: [red]no[/red] memory"])
        board.say("", "everything has stopped")
    assert out.getvalue() == (
        "node: died (exit status 1); restarting in 0.5 s\n"
        "    node | error: [red]no[/red] memory\n"
        "mooncake: everything has stopped\n"
    )


def test_the_status_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    path.write_text("of a former run")
    write_status(path, some_processes(tmp_path), "http://127.0.0.1:8000")
    status = json.loads(path.read_text())
    assert status["url"] == "http://127.0.0.1:8000"
    assert status["roles"]["master"] == {
        "state": "ready",
        "pid": None,
        "address": "127.0.0.1:50051",
        "num_starts": 1,
        "log": str(tmp_path / "master.log"),
    }
    assert [file.name for file in tmp_path.iterdir()] == ["status.json"]


def test_the_status_file_says_ready_only_while_every_role_is(tmp_path: Path) -> None:
    path, processes = tmp_path / "status.json", some_processes(tmp_path)

    def is_ready() -> bool:
        write_status(path, processes, "http://127.0.0.1:8000")
        found: bool = json.loads(path.read_text())["is_ready"]
        return found

    assert not is_ready()
    processes.supervisor.handle(Wake(), 100.0)
    for name in ("node", "gateway"):
        assert not is_ready()
        processes.supervisor.handle(RoleReady(name), 101.0)
    assert is_ready()
    processes.supervisor.handle(RoleExited("node", 1), 102.0)
    assert not is_ready(), "one has died"
    processes.supervisor.handle(Wake(), 200.0)
    processes.supervisor.handle(RoleReady("node"), 201.0)
    assert is_ready()
    processes.supervisor.handle(StopAll(), 202.0)
    assert not is_ready()
    for name in ("gateway", "node", "master"):
        processes.supervisor.handle(RoleExited(name, 0), 203.0)
    assert not is_ready(), "everything has stopped"


def test_a_former_run_s_status_is_replaced_before_the_model_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "status.json"
    path.write_text('{"url": "http://127.0.0.1:8000", "is_ready": true, "pid": 1, "roles": {}}')
    seen: list[object] = []

    def prepare(name: str, device: str) -> str:
        seen.append(json.loads(path.read_text()))
        sys.exit(2)

    monkeypatch.setattr(up, "prepare_model", prepare)
    with pytest.raises(SystemExit):
        main([*UP, "--log-dir", str(tmp_path / "logs"), "--json-status", str(path)])
    assert seen == [{"url": "", "is_ready": False, "pid": os.getpid(), "roles": {}}]


def test_a_status_file_that_cannot_be_written_is_refused_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "folder" / "status.json"
    with pytest.raises(InvalidArgument, match=r"json_status is .*a file that can be written"):
        check_writable(path, "json_status")
    write_status(path, some_processes(tmp_path), "http://127.0.0.1:8000")
    assert "status_not_written" in caplog.text
    path.parent.mkdir()
    check_writable(path, "json_status")
    assert not [*path.parent.iterdir()]


def test_a_pipe_is_no_status_file(tmp_path: Path) -> None:
    """It would wait for a reader at every change."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgument, match=r"json_status is '.*pipe'; allowed: a file"):
        check_status_file(tmp_path / "pipe")
    check_status_file(tmp_path / "file")
    check_status_file(None)


def test_logs_are_moved_only_once_a_cluster_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    port = free_ports("127.0.0.1", 1, Random(1))[0]
    log = tmp_path / "mooncake" / "logs" / str(port) / "master.log"
    with locked_log_folder(None, port) as folder:
        assert folder == log.parent
        log.write_text("of the run before")
    with pytest.raises(SystemExit) as exit:
        main(["up", "--port", str(port), "--model", "/nonexistent"])
    assert exit.value.code == 2 and "/nonexistent" in capfd.readouterr().err
    assert log.read_text() == "of the run before"
    keep_logs_before([log])
    assert not log.exists() and log.with_suffix(".log.old").read_text() == "of the run before"


def test_only_logs_of_roles_are_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("master.log", "master.log.old", "train.log", "train.log.old"):
        (tmp_path / name).write_text(name)

    async def run(processes: Processes) -> int:
        return 0

    monkeypatch.setattr(up, "prepare_model", lambda name, device: "/models/smollm2")
    monkeypatch.setattr(Processes, "run", run)
    with pytest.raises(SystemExit) as exit:
        main([*UP, "--log-dir", str(tmp_path)])
    assert exit.value.code == 0
    assert {path.name: path.read_text() for path in tmp_path.glob("*.log*")} == {
        "master.log.old": "master.log",
        "train.log": "train.log",
        "train.log.old": "train.log.old",
    }


def test_a_killed_preparation_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(up, "_PREPARE_MODEL", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(SystemExit) as exit:
        prepare_model("smollm2")
    error = capsys.readouterr().err
    assert exit.value.code == 1
    assert error.startswith(
        "error: the process that prepares the model smollm2 has ended (killed by signal 9)"
    )


SLOW_MODEL = """
import signal, sys, types

def resolve_model(name):
    print("begun", flush=True)
    signal.pause()

sys.modules["mooncake.inference.gguf"] = types.ModuleType("gguf")
sys.modules["mooncake.inference.gguf"].resolve_model = resolve_model
"""


def test_an_interrupted_preparation_is_silent(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_MODEL)
    preparing = subprocess.Popen(
        [sys.executable, "-c", up._PREPARE_MODEL, "smollm2", "auto"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    try:
        assert preparing.stdout is not None and preparing.stdout.readline() == "begun\n"
        preparing.send_signal(signal.SIGINT)
        _, error = preparing.communicate(timeout=60)
    finally:
        preparing.kill()
        preparing.communicate()
    assert (preparing.returncode, error) == (INTERRUPTED, "")


def test_a_folder_of_logs_is_of_one_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    wanted = tmp_path / "logs"
    with (
        locked_log_folder(wanted, 0),
        locked_log_folder(None, 0) as first,
        locked_log_folder(None, 0) as second,
    ):
        assert first != second, "free ports are not known yet"
        with pytest.raises(SystemExit) as exit:
            main(["up", "--port", "0", "--log-dir", str(wanted), "--model", "/nonexistent"])
        error = capfd.readouterr().err
        assert exit.value.code == 2 and "that no other cluster uses" in error and "--port" in error
    with locked_log_folder(wanted, 0) as again, locked_log_folder(None, 0) as free:
        assert (again, free) == (wanted, first)


def test_the_welcome_has_a_line_that_can_be_pasted() -> None:
    text = welcome("http://127.0.0.1:8000", "smollm2", "127.0.0.1:50051", "key", Path("/logs"))
    [body] = [line.strip().removeprefix("-d ") for line in text.splitlines() if line.strip().startswith("-d")]
    assert json.loads(body.strip("'")) == {
        "model": "smollm2",
        "temperature": 0,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
    }
    assert "curl -s http://127.0.0.1:8000/v1/chat/completions" in text
    assert "X-API-Key: key" in text
    assert "export MOONCAKE_MASTER=127.0.0.1:50051" in text
    assert "`mooncake doctor --url http://127.0.0.1:8000`" in text


def test_the_welcome_names_a_program_that_the_shell_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", str(programs / "python"))
    monkeypatch.setenv("PATH", "/nonexistent")
    assert program_here() == f"{programs / 'python'} -m mooncake"
    (programs / "mooncake").write_text("#!/bin/sh\n")
    (programs / "mooncake").chmod(0o755)
    assert program_here() == ".venv/bin/mooncake"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert program_here() == str(programs / "mooncake")
    monkeypatch.setenv("PATH", str(programs))
    assert program_here() == "mooncake"
    text = welcome("http://h:1", "m", "h:2", "key", Path("/logs"), program=".venv/bin/mooncake")
    assert text.count(".venv/bin/mooncake") == 4 and " mooncake" not in text


def test_the_welcome_says_what_to_show() -> None:
    security = SecuritySettings("/c/node.pem", "/c/node.key", "/c/the ca.pem", cluster_key_file="/c/k")
    for shows in (True, False):
        given = Credentials(security, shows)
        text = welcome("https://127.0.0.1:8000", "m", "127.0.0.1:50051", "key", Path("/logs"), given)
        curl = (
            "curl -s --cacert '/c/the ca.pem' --cert /c/node.pem --key /c/node.key https://127.0.0.1:8000/v1/"
        )
        chat = "--tls-ca '/c/the ca.pem' --tls-cert /c/node.pem --tls-key /c/node.key"
        assert (curl in text, chat in text) == (shows, shows)
        for name in ("TLS_CERT=/c/node.pem", "TLS_CA='/c/the ca.pem'", "CLUSTER_KEY_FILE=/c/k"):
            assert f"MOONCAKE_SECURITY_{name}" in text


def test_on_ray_commands_name_the_hosts_and_no_program() -> None:
    settings = UpSettings(on="ray", prefill=1, decode=1, prefill_resources="CPU=4,GPU=1", prefill_group="2")
    roles = cluster_roles(settings, num_nodes=2)
    assert [role.name for role in roles if role.kind == "node"] == ["node-0", "node-1"]
    assert [role.num_ports for role in roles if role.name in ("gateway", "master", "node-1")] == [3, 2, 2]
    hosts = {role.name: f"10.0.0.{number}" for number, role in enumerate(roles, 1)}
    places = {
        role.name: RolePlace(hosts[role.name], tuple(range(7000, 7000 + role.num_ports))) for role in roles
    }
    given = Invocation(settings, LogSettings(), None)
    plans = plan_cluster(settings, given, "smollm2", "swordfish", Path("/state"), roles, places, program=())
    Supervisor([plan.spec for plan in plans.values()]).check()
    for name, plan in plans.items():
        assert (flag(plan, "--host"), flag(plan, "--port")) == (hosts[name], "7000")
        assert plan.command[0] in ("metadata", "master", "node", "worker", "conductor", "gateway")
        assert "--parent" not in plan.command
    assert flag(plans["node-1"], "--name") == "node-1"
    assert flag(plans["decode-0"], "--master") == f"{hosts['master']}:7000"
    assert flag(plans["master"], "--kv-events-endpoint") == f"tcp://{hosts['master']}:7001"
    assert flag(plans["prefill-0"], "--num-threads") == "4"
    assert flag(plans["prefill-group-0"], "--pipeline-peers") == f"{hosts['prefill-group-0-stage-1']}:7000"
    assert plans["gateway"].follows == ("prefill-0", "prefill-group-0", "decode-0")
    assert flag(plans["gateway"], "--metrics-port") == "7001"


@pytest.mark.parametrize("text", ["", "CPU", "CPU=0", "CPU=x", "=1", "CPU=nan", "CPU=1,,GPU=1", "CPU=-1"])
def test_resources_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="decode_resources"):
        UpSettings(decode_resources=text)
    assert read_resources("x", "CPU=8, GPU=0.5") == {"CPU": 8.0, "GPU": 0.5}


def test_several_nodes_need_several_hosts() -> None:
    with pytest.raises(InvalidArgument, match="--on ray"):
        UpSettings(nodes=2)
    assert UpSettings(nodes=2, on="ray").nodes == 2


def test_without_ray_the_advice_is_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "mooncake.cli.ray_roles", raising=False)
    with pytest.raises(InvalidArgument, match=r"mooncake-serving\[ray\]"):
        ray_classes()


def test_credentials_have_absolute_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    flags = security_flags(SecuritySettings(cluster_key_file="a.key", insecure=True))
    assert flags == ["--cluster-key-file", str(tmp_path / "a.key"), "--insecure"]
