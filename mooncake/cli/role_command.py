# SPDX-License-Identifier: Apache-2.0
"""Derives a subcommand from a settings class and an entry point.

There is no second list of options: flags, their help and their errors come from the fields of the settings
class. Values are passed on as text, because ``config.load`` is the one place that validates them. A role is
then run until SIGTERM or SIGINT, either of which is a clean stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperCommand

from mooncake import config
from mooncake.config import LogSettings, Option
from mooncake.file_limit import raise_file_limit
from mooncake.log import get_logger, setup_logging
from mooncake.security import Identity, SecuritySettings, install_identity
from mooncake.tracing import TracingSettings, install_tracing, tracing_of

log = get_logger(__name__)
DEFAULT_TRACING = TracingSettings()


@dataclass(frozen=True)
class Invocation:
    """The parsed invocation of a command."""

    settings: Any
    logs: LogSettings
    file: Path | None
    tracing: TracingSettings = DEFAULT_TRACING


class ManyValues(TyperCommand):
    """Lets a repeatable option take several values at once: ``--prefill a:1 b:2`` counts as two."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        many = {flag for param in self.params if getattr(param, "multiple", False) for flag in param.opts}
        return super().parse_args(ctx, repeat_flags(args, many))


def repeat_flags(words: Sequence[str], many: set[str]) -> list[str]:
    """``--prefill a b --port 1`` -> ``--prefill a --prefill b --port 1``."""
    result: list[str] = []
    current, num_values = "", 0
    for word in words:
        if word.startswith("-"):
            current, num_values = word if word in many else "", 0
        elif current:
            num_values += 1
            if num_values > 1:
                result.append(current)
        result.append(word)
    return result


def add_command(
    application: typer.Typer,
    name: str,
    settings_class: type,
    run: Callable[[Invocation], None],
    example: str,
    known_roles: Sequence[str],
    role: str = "",
) -> None:
    """Add a subcommand whose flags are the fields of ``settings_class``.

    ``role``: the name in its log lines, where that is not the command's. Logging is set up before the other
    settings are read, because a misspelt variable is reported as an event.
    """

    def command(**given: Any) -> None:
        own = {
            field: given.pop(field) for field in (option.field for option in config.options(settings_class))
        }
        for field, included in config.included_tables(settings_class).items():
            names = [option.field for option in config.options(included)]
            own[field] = {name: given.pop(f"{field}_table_{name}") for name in names}
        file, logs, log_origins = _general(given, known_roles)
        if not given["print_config"]:
            setup_logging(logs.level, logs.format, role or name)
        security, security_origins = _security(given, file, known_roles)
        tracing, tracing_origins = _tracing(given, file, known_roles)
        settings: Any
        settings, origins = config.load(settings_class, own, os.environ, file, known_roles)
        if given["print_config"]:
            print(config.describe(settings, origins))
            print(config.describe_included(settings, origins))
            print(config.describe(logs, log_origins))
            print(config.describe(security, security_origins))
            print(config.describe(tracing, tracing_origins))
            return
        if given["parent"]:
            die_with(given["parent"])
        install_identity(Identity(security))
        traces = tracing_of(tracing)
        install_tracing(traces)
        try:
            run(Invocation(settings, logs, file, tracing))
        finally:
            install_tracing(None)
            traces.close()

    parameters = [_parameter(option) for option in config.options(settings_class)]
    for field, included in config.included_tables(settings_class).items():
        parameters += [_parameter(option, field.capitalize(), field) for option in config.options(included)]
    parameters += GENERAL_PARAMETERS
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    application.command(
        name,
        cls=ManyValues,
        help=inspect.getdoc(settings_class),
        epilog=f"Example: {example}",
        context_settings={"help_option_names": ["--help", "-h"]},
    )(command)


def config_file(named: str | None) -> Path | None:
    """The configuration file from the flag, or else from the environment."""
    return Path(named).expanduser() if named else config.named_file(os.environ)


def _general(
    given: dict[str, Any], known_roles: Sequence[str]
) -> tuple[Path | None, LogSettings, dict[str, str]]:
    """The configuration file and the log settings, which every command has."""
    file = config_file(given["config"])
    flags = {"level": given["log_level"], "format": given["log_format"]}
    logs, origins = config.load(LogSettings, flags, os.environ, file, known_roles, flags_start="--log-")
    return file, logs, origins


def _security(
    given: dict[str, Any], file: Path | None, known_roles: Sequence[str]
) -> tuple[SecuritySettings, dict[str, str]]:
    """The security settings, which every command has."""
    flags = {option.field: given[option.field] for option in config.options(SecuritySettings)}
    return config.load(SecuritySettings, flags, os.environ, file, known_roles)


def _tracing(
    given: dict[str, Any], file: Path | None, known_roles: Sequence[str]
) -> tuple[TracingSettings, dict[str, str]]:
    """The settings of traces, which every command has."""
    flags = {option.field: given[f"tracing_{option.field}"] for option in config.options(TracingSettings)}
    return config.load(TracingSettings, flags, os.environ, file, known_roles, flags_start="--tracing-")


def _parameter(option: Option, panel: str | None = None, table: str = "") -> inspect.Parameter:
    """A field as a typer parameter, of an included ``table`` if that is named.

    All flags are optional: None means not given.
    """
    flags = option.flag if not table else f"--{table}-{option.flag[2:]}"
    kind: Any = str | None
    if option.base is bool:
        flags, kind = f"{flags}/--no-{flags[2:]}", bool | None
    elif option.takes_many:
        kind = list[str] | None
    details = typer.Option(
        flags,
        help=_help(option),
        metavar=None if option.base is bool else _metavar(option),
        show_default=False,
        rich_help_panel=panel,
    )
    return _keyword(f"{table}_table_{option.field}" if table else option.field, Annotated[kind, details])


def _help(option: Option) -> str:
    if option.default in (None, (), ""):
        return escape(option.sentence)
    shown = option.show(option.default).strip('"')
    return escape(f"{option.sentence} (default: {shown})")


def _metavar(option: Option) -> str:
    choices = config.choices_of(option.base)
    if choices:
        return f"[{'|'.join(choices)}]"
    if option.has(config.Size):
        return "SIZE"
    if option.takes_many:
        return "VALUE ..."
    return {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(option.base, "TEXT")


def _keyword(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _general_parameters() -> list[inspect.Parameter]:
    level, log_format = config.options(LogSettings)
    panel = "General"
    return [
        _keyword(
            "config",
            Annotated[
                str | None,
                typer.Option(
                    "--config",
                    metavar="FILE",
                    help=f"TOML or JSON file with one table per role; {config.CONFIG_VARIABLE} names it too.",
                    rich_help_panel=panel,
                ),
            ],
        ),
        _keyword(
            "print_config",
            Annotated[
                bool | None,
                typer.Option(
                    "--print-config",
                    help="Print every setting and the source of its value, and do nothing else.",
                    rich_help_panel=panel,
                    show_default=False,
                ),
            ],
        ),
        *(
            _keyword(
                f"log_{option.field}",
                Annotated[
                    str | None,
                    typer.Option(
                        f"--log-{option.name}",
                        metavar=_metavar(option),
                        help=_help(option),
                        show_default=False,
                        rich_help_panel=panel,
                    ),
                ],
            )
            for option in (level, log_format)
        ),
        *(_parameter(option, "Security") for option in config.options(SecuritySettings)),
        *(
            _parameter(option, "Tracing", "tracing").replace(name=f"tracing_{option.field}")
            for option in config.options(TracingSettings)
        ),
        _keyword("parent", Annotated[int | None, typer.Option("--parent", hidden=True)]),
    ]


GENERAL_PARAMETERS = _general_parameters()


# -- running -----------------------------------------------------------------------------------------


STOPPING_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_until_stopped(serve: Callable[[Any], Coroutine[Any, Any, None] | None], settings: Any) -> None:
    """Run a role's ``serve``, plain or async. SIGTERM and SIGINT end it cleanly and are not an error.

    Both are logged, so that the log of a role that was stopped differs from that of a killed one.
    """

    raise_file_limit()
    is_stopping = False

    def stop(number: int, frame: object) -> None:
        stopping(number)
        raise KeyboardInterrupt

    def stopping(number: int) -> None:
        nonlocal is_stopping
        is_stopping = True
        log.info("stopping", signal=signal.Signals(number).name)

    for number in STOPPING_SIGNALS:
        signal.signal(number, stop)
    with contextlib.suppress(KeyboardInterrupt):
        if inspect.iscoroutinefunction(serve):
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(_until_signal(serve(settings), stopping))
        else:
            serve(settings)
    if is_stopping:
        log.info("stopped")


async def _until_signal(serving: Coroutine[Any, Any, None], stopping: Callable[[int], None]) -> None:
    """Cancel ``serving`` on a signal, after ``stopping(number)``; it cleans up in its ``finally`` blocks."""
    loop = asyncio.get_running_loop()
    task = loop.create_task(serving)

    def stop(number: int) -> None:
        stopping(number)
        task.cancel()

    for number in STOPPING_SIGNALS:
        loop.add_signal_handler(number, stop, number)
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however that happens (PR_SET_PDEATHSIG)."""
    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before this call
        sys.exit(1)
