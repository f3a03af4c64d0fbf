"""``mooncake up``: a whole cluster on one host.

``local_cluster.py`` defines the roles, ``supervisor.py`` decides when they run, ``processes.py`` runs them,
``status_board.py`` shows them; this module connects these and prepares the disk. A convenience for one host
and no more: on many hosts the same roles are started by whatever places processes there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import ssl
import subprocess
import sys
from pathlib import Path

from mooncake.cli import status_board
from mooncake.cli.local_cluster import INSIDE, UpSettings, plan_cluster
from mooncake.cli.ports import check_free
from mooncake.cli.processes import Processes
from mooncake.cli.role_command import Invocation
from mooncake.cli.status_board import Credentials, StatusBoard
from mooncake.errors import InvalidArgument
from mooncake.security import Identity, check_address, process_identity
from mooncake.security.tls_contexts import client_context

__all__ = ["UpSettings", "up"]


def up(given: Invocation) -> None:
    """Run until Ctrl-C; exit with the status of the supervisor."""
    settings = given.settings
    assert isinstance(settings, UpSettings)
    check_address(settings.host)
    check_certificate(process_identity())
    check_free(settings.host, settings.port)
    log_folder = prepare_log_folder(settings.log_dir)
    model_folder = prepare_model(settings.model)
    sys.exit(asyncio.run(_run(settings, given, model_folder, log_folder)))


def check_certificate(identity: Identity) -> None:
    """One certificate serves all roles here: it must be valid on both sides, and name where they listen.

    Without this check every role would report the problem and be restarted endlessly; no network is needed.

    Raises:
        InvalidArgument: it is not of its authority, or does not name the address.
    """
    if identity.server_tls is None:
        return
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_tls = client_context(identity.settings, check_host=True)
    client = client_tls.wrap_bio(to_client, to_server, server_hostname=INSIDE)
    server = identity.server_tls.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLError as error:
        allowed = f"a certificate of the authority in tls_ca that names {INSIDE} ({error})"
        raise InvalidArgument("--tls-cert", identity.settings.tls_cert, allowed) from error


async def _run(settings: UpSettings, given: Invocation, model_folder: str, log_folder: Path) -> int:
    admin_key = settings.admin_api_key or secrets.token_urlsafe(18)
    plans = plan_cluster(settings, given, model_folder, admin_key, log_folder)
    master, gateway = plans["master"], plans["gateway"]
    assert gateway.ready is not None
    over = gateway.ready.over
    url = f"{'http' if over == 'http' else 'https'}://{gateway.address}"
    credentials = Credentials(process_identity().settings, shows_certificate=over == "member")
    is_ready = False

    with StatusBoard() as screen:

        def changed() -> None:
            if settings.json_status is not None:
                status_board.write_status(settings.json_status, processes, url, is_ready)

        def all_ready() -> None:
            nonlocal is_ready
            is_ready = True
            screen.print(
                status_board.welcome(
                    url, settings.model_name, master.address, admin_key, log_folder, credentials
                )
            )

        processes = Processes(list(plans.values()), log_folder, screen.say, changed, all_ready)
        screen.processes = processes
        screen.say("", f"starting {len(plans)} roles; their logs are in {log_folder}")
        status = await processes.run()
        screen.say("", "everything has stopped")
    return status


_PREPARE_MODEL = """
import sys
from mooncake.errors import MooncakeError
from mooncake.inference.gguf import resolve_model
try:
    print(resolve_model(sys.argv[1]))
except MooncakeError as error:
    sys.exit(f"error: {error}")
"""


def prepare_model(name: str) -> str:
    """The folder of the model, converted if need be: once, before several workers need it at the same time.

    In a process of its own, whose progress bar is visible and whose torch does not stay in our memory.
    """
    command = [sys.executable, "-c", _PREPARE_MODEL, name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(2)  # it has reported the reason
    return done.stdout.splitlines()[-1]


def prepare_log_folder(wanted: Path | None) -> Path:
    """The folder for the roles' logs; those of the run before are kept once, as ``.old``."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    folder = wanted or Path(state).expanduser() / "mooncake" / "logs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("*.log"):
            log.replace(log.with_suffix(".log.old"))
    except OSError as error:
        raise InvalidArgument("log_dir", str(folder), f"a folder that can be written to ({error})") from error
    return folder.absolute()
