# SPDX-License-Identifier: Apache-2.0
"""The command ``mooncake``: the entry point of every role, of a cluster on one host, and of a chat with it.

This module only words failures: a broken world (bad settings, a taken port, a missing model) is one line on
standard error and exit status 2, or 1 when trying again later may help; only a broken program shows a
traceback. ``cli/commands.py`` lists the commands, ``role_command.py`` derives their flags.
"""

from __future__ import annotations

import errno
import io
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from mooncake.cli.completion import completed_words
from mooncake.errors import AddressInUse, MooncakeError, Unavailable

INTERRUPTED = 130
"""Exit status after Ctrl-C."""
NO_HOME = "Could not determine home directory."
"""What pathlib raises for ``~`` without HOME and for a user who is not known."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script ``mooncake``."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Read once, when torch is loaded. Its threads wait for each other by spinning otherwise: measured 50
    # times slower as soon as another process wants the same cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def run() -> None:
        # Here, so that an interrupt meanwhile and a missing extra are reported in one line.
        from mooncake.log import show_early_fields

        show_early_fields()
        from mooncake.cli.commands import application_for

        completed = completed_words(os.environ)
        application_for(words if completed is None else completed)(args=words, prog_name="mooncake")

    run_program(run)


def print_and_exit(text: str) -> NoReturn:
    """Print a program's help or version and exit, also where the reader has ended (``| head``)."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _discard_output()
    sys.exit(0)


def run_program(run: Callable[[], None]) -> NoReturn:
    """Run a whole program and exit; a failure is reported in one line.

    A reader that has ended (``| head``) is no failure: it has what it wanted.
    """
    end = SystemExit(0)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name must not end a program because of the locale
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            run()
        except SystemExit as error:
            end = SystemExit(0) if isinstance(error.__context__, BrokenPipeError) else error
        sys.stdout.flush()  # here, where a full disk can be worded
    except BrokenPipeError:
        _discard_output()
    except KeyboardInterrupt:  # as shells count it; the program's parts have undone what they had begun
        sys.exit(INTERRUPTED)
    except AddressInUse as error:
        _fail(str(error) if "--" in str(error) else f"{error}: --port", 2)
    except MooncakeError as error:
        _fail(str(error), 1 if isinstance(error, Unavailable) else 2)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "mooncake":
            raise
        _fail(f"{error.name} is not installed; `pip install 'mooncake-serving[all]'` installs it", 2)
    except RuntimeError as error:
        if str(error) != NO_HOME:
            raise
        _fail(
            "a path begins with ~, and its user has no home folder here; set HOME or write the path in full",
            2,
        )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            what = error.filename or "the output or a file"
            _fail(f"{what} can't be written: {error.strerror}; free some space or write elsewhere", 1)
        advice = _address_advice(error)
        if advice is None:
            raise
        _fail(advice, 2)
    raise end


def daemon_main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The console script ``mooncaked``: a whole store, or a node only, for which the name once stood."""
    from mooncake.security import keep_upstream_defaults  # here, as it is slow and would delay `mooncake`

    words = list(sys.argv[1:] if arguments is None else arguments)
    keep_upstream_defaults("mooncaked")
    role = daemon_role(words, os.environ)
    main([role, *words, *(() if role == "node" else _open_host(words, os.environ))])


def _open_host(words: Sequence[str], environment: Mapping[str, str]) -> Sequence[str]:
    """The flag with which other hosts reach the daemon, as its users expect, unless an address is set."""
    is_set = {"MOONCAKE_CONFIG", "MOONCAKE_DAEMON_HOST"} & environment.keys()
    is_set |= {"--config", "--host"} & {word.partition("=")[0] for word in words}
    return () if is_set else ("--host", "0.0.0.0")


def daemon_role(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return ``node`` when a master is named and no setting is one of the whole store only, else
    ``daemon``."""
    names = {word.partition("=")[0] for word in words}
    if any(name.startswith(("--capacity-", "--nvme-path", "--transfer-port", "--oplog")) for name in names):
        return "daemon"
    of_nodes = {"--master", "--config", "--pool-size", "--ssd-path", "--ssd-size"}
    variables = {"MOONCAKE_CONFIG", "MOONCAKE_NODE_MASTER"}
    return "node" if of_nodes & names or variables & environment.keys() else "daemon"


def _fail(message: str, status: int) -> NoReturn:
    print(f"error: {message}", file=sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    sys.exit(status)


def _discard_output() -> None:
    """Discard what standard output still holds, which the interpreter would try to write at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _address_advice(error: OSError) -> str | None:
    """Advice for an address that cannot be listened on; None for any other failure."""
    text = error.strerror or str(error)
    if isinstance(error, socket.gaierror):
        return f"the host to listen on is unknown ({text}); choose another with --host"
    return {
        errno.EADDRINUSE: f"{text}; free that port or choose another with --port",
        errno.EADDRNOTAVAIL: f"{text}; choose an address of this machine with --host",
        errno.EACCES: f"{text}; ports below 1024 need privileges, choose another with --port",
    }.get(error.errno or 0)
