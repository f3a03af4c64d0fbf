# SPDX-License-Identifier: Apache-2.0
"""Loads a role's settings from flags, environment and file, and records where each value came from.

A role's settings are one frozen dataclass in the role's own package: each field has a type, a default and,
as the string below it, a sentence. Everything else (flags, environment names, file keys, documentation)
is derived here, so that a new setting is one new field::

    @dataclass(frozen=True)
    class NodeSettings:
        port: Annotated[int, Meta(ge=0, le=65535)] = 0
        "TCP port of the transfer engine; 0 takes a free one."

        pool_size_bytes: Annotated[int, Size] = 2 << 30
        "Memory that this node contributes to the store."

gives ``--pool-size 2GiB``, ``MOONCAKE_NODE_POOL_SIZE``, the key ``pool_size`` in the table ``[node]`` of a
TOML or JSON file, and a row in ``docs/configuration.md``. Flags beat the environment, which beats the file,
which beats the default. A size takes a suffix and therefore drops ``_bytes`` from its external name;
durations are seconds and keep their ``_s``. Ranges are ``msgspec.Meta``. ``Secret`` values are never printed.

A field whose type is another settings class includes that one's table: ``transfer: TransferSettings`` reads
``[transfer]`` and ``MOONCAKE_TRANSFER_...``, the same in every role that has it, and has flags that begin
with ``--transfer-``.

Why not pydantic-settings: it needs its own model class instead of a plain frozen dataclass that a core may
hold, it does not report which source a value came from, and it would become a dependency of processes that
only use the store. msgspec, which is one already, checks types and ranges. This module knows no role and is,
with the command line that calls it, the only one that reads the environment.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import json
import math
import re
import textwrap
import tomllib
import types
import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from mooncake.errors import InvalidArgument
from mooncake.log import get_logger
from mooncake.setting_types import AlsoFrom as AlsoFrom
from mooncake.setting_types import Port as Port
from mooncake.setting_types import Secret as Secret
from mooncake.setting_types import Size as Size

log = get_logger(__name__)

SettingsT = TypeVar("SettingsT")

_USER_OF_URL = re.compile(r"""://[^/?#\s"]*@""")

CONFIG_VARIABLE = "MOONCAKE_CONFIG"
"""Names the configuration file where a command's ``--config`` does not, and for parts of other programs."""


@dataclass(frozen=True)
class LogSettings:
    """Log output of every role."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    "Events below this level are not printed."

    format: Literal["text", "json"] = "text"
    "`text` for people, `json` for machines: one object a line."


@dataclass(frozen=True)
class Option:
    """One field of a settings class, with its external names."""

    field: str
    name: str
    annotation: Any
    default: Any
    sentence: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def base(self) -> Any:
        """The type without ``Annotated`` and without ``| None``."""
        return _base(self.annotation)

    @property
    def is_optional(self) -> bool:
        return type(None) in typing.get_args(_bare(self.annotation))

    @property
    def takes_many(self) -> bool:
        return typing.get_origin(self.base) is tuple

    def has(self, marker: type) -> bool:
        return any(mark is marker for mark in _marks(self.annotation))

    @property
    def more_variables(self) -> list[str]:
        return [mark.variable for mark in _marks(self.annotation) if isinstance(mark, AlsoFrom)]

    def show(self, value: Any) -> str:
        """``value`` as it would be written in a TOML file; secrets, and users and passwords in URLs, are
        hidden."""
        if self.has(Secret) and value:
            return '"(hidden)"'
        if self.has(Size) and isinstance(value, int):
            return json.dumps(format_size(value))
        return _USER_OF_URL.sub("://(hidden)@", _toml(value))


def options(settings_class: type) -> tuple[Option, ...]:
    """The fields of a settings class, in order; each must have a default and a sentence below it."""
    return _options(settings_class)


@functools.cache
def _options(settings_class: Hashable) -> tuple[Option, ...]:
    assert isinstance(settings_class, type) and dataclasses.is_dataclass(settings_class)
    hints = typing.get_type_hints(settings_class, include_extras=True)
    sentences = _sentences(settings_class)
    found = []
    for field in dataclasses.fields(settings_class):
        where = f"{settings_class.__name__}.{field.name}"
        assert field.default is not dataclasses.MISSING, f"{where} has no default"
        if dataclasses.is_dataclass(hints[field.name]):
            continue  # a table of its own
        assert field.name in sentences, f"{where} has no sentence below it"
        annotation = hints[field.name]
        is_size = any(mark is Size for mark in _marks(annotation))
        name = field.name.removesuffix("_bytes") if is_size else field.name
        found.append(Option(field.name, name, annotation, field.default, sentences[field.name]))
    return tuple(found)


def included_tables(settings_class: type) -> dict[str, type]:
    """Fields that are settings classes themselves, with a table and flags of their own."""
    hints = typing.get_type_hints(settings_class)
    names = [field.name for field in dataclasses.fields(settings_class)]
    return {name: hints[name] for name in names if dataclasses.is_dataclass(hints[name])}


def role_of(settings_class: type) -> str:
    """``NodeSettings`` -> ``node``."""
    return settings_class.__name__.removesuffix("Settings").lower()


def variable_of(role: str, option: Option) -> str:
    return f"MOONCAKE_{role}_{option.name}".upper()


def load(
    settings_class: type[SettingsT],
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    file: Path | None = None,
    known_roles: Iterable[str] = (),
    flags_start: str = "--",
) -> tuple[SettingsT, dict[str, str]]:
    """Load the settings of one role; also return, for each field, where its value came from.

    Args:
        flags: values by field name; None when the flag was not given. Those of an included table are a
            mapping under the name of its field; their origins have names such as ``transfer.listen_host``.
        file: a TOML file, or JSON when its name ends in ``.json``.
        known_roles: names of other tables that ``file`` may hold; when empty, any table is allowed.
        flags_start: prefix of the flags' names, used in the origins.

    Raises:
        InvalidArgument: a value is not allowed; names the field, its origin, the value and what is allowed.
    """
    role = role_of(settings_class)
    known_roles = list(known_roles)
    from_variable = file is not None and file == named_file(environment)
    origin_of_file = CONFIG_VARIABLE if from_variable else "--config"
    table = {} if file is None else _read_table(settings_class, file, known_roles, origin_of_file)
    _warn_of_misspelt(settings_class, environment)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for option in options(settings_class):
        raw, origin = _find(option, role, flags, environment, table, file)
        origin = origin.replace("flag --", f"flag {flags_start}")
        origins[option.field] = origin
        values[option.field] = raw if origin == "default" else _coerce(option, raw, origin)
    for field, included in included_tables(settings_class).items():
        given = flags.get(field) or {}
        values[field], found = load(included, given, environment, file, known_roles, f"--{field}-")
        origins |= {f"{field}.{name}": origin for name, origin in found.items()}
    try:
        return settings_class(**values), origins
    except InvalidArgument as error:  # a check over several fields, in __post_init__
        if error.field in origins:
            raise InvalidArgument(
                f"{error.field} ({origins[error.field]})", error.value, error.allowed
            ) from error
        raise


def _find(
    option: Option,
    role: str,
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    table: Mapping[str, Any],
    file: Path | None,
) -> tuple[Any, str]:
    """The raw value of one field from its strongest source, and its origin."""
    if flags.get(option.field) is not None:
        return flags[option.field], f"flag {option.flag}"
    for variable in [variable_of(role, option), *option.more_variables]:
        if variable in environment and not _is_service_link(option, environment[variable]):
            return environment[variable], f"environment {variable}"
    if option.name in table:
        return table[option.name], f"file {file} [{role}]"
    return option.default, "default"


def _is_service_link(option: Option, value: str) -> bool:
    """Whether Kubernetes set this for a service, as ``MOONCAKE_MASTER_PORT=tcp://10.0.0.1:50051``.

    Only a number can be meant, since these names end in ``_PORT``; an endpoint is written in the same form.
    """
    return option.base is int and re.match(r"(tcp|udp)://", value) is not None


def _warn_of_misspelt(settings_class: type, environment: Mapping[str, str]) -> None:
    role = role_of(settings_class)
    prefix = f"MOONCAKE_{role}_".upper()
    known = [variable_of(role, option) for option in options(settings_class)]
    for variable in environment:
        if variable.startswith(prefix) and variable not in known:
            close = difflib.get_close_matches(variable, known, 1)
            if close:
                log.warning("unknown_environment_variable", name=variable, did_you_mean=close[0])


def named_file(environment: Mapping[str, str]) -> Path | None:
    """The configuration file that the environment names."""
    name = environment.get(CONFIG_VARIABLE)
    return Path(name).expanduser() if name else None


UPSTREAM_NAMES = {
    "master_server_address": "master",
    "global_segment_size": "pool_size",
    "root_fs_dir": "root_fs_dir",
    "cluster_id": "cluster_id",
}
"""Names in the flat ``mooncake.json`` of the existing package, and those of our settings. Its other keys
configure the client process that reads it and are ignored here."""
_FLAT_NAMES = (*UPSTREAM_NAMES, "local_hostname", "metadata_server", "local_buffer_size")
"""Any of them shows that a file is that one, which has no tables."""


# -- files -------------------------------------------------------------------------------------------


def _read_table(settings_class: type, file: Path, known_roles: Sequence[str], origin: str) -> dict[str, Any]:
    """The role's table of a configuration file. Unknown tables and keys are errors.

    ``origin``: see ``read_file``.
    """
    content = read_file(file, origin)
    role = role_of(settings_class)
    names = [option.name for option in options(settings_class)]
    if any(name in content and not isinstance(content[name], dict) for name in _FLAT_NAMES):
        theirs = {ours: content[name] for name, ours in UPSTREAM_NAMES.items() if content.get(name, "") != ""}
        return {name: value for name, value in theirs.items() if name in names}
    roles = list(dict.fromkeys([role, *known_roles])) if known_roles else []
    for name in content:
        if roles and name not in roles:
            raise InvalidArgument(f"table [{name}] in {file}", name, _one_of(roles, name))
    table = content.get(role, {})
    if not isinstance(table, dict):
        raise InvalidArgument(f"[{role}] in {file}", table, "a table of settings")
    for key in table:
        if key not in names:
            raise InvalidArgument(f"key {key} in {file} [{role}]", table[key], _one_of(names, key))
    return table


def read_file(file: Path, origin: str = "--config") -> dict[str, Any]:
    """The tables of a configuration file (TOML, or JSON when the name ends in ``.json``).

    Raises:
        InvalidArgument: it can't be read, or is none; names ``origin``, the flag or the variable it is from.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(origin, str(file), f"a readable TOML or JSON file ({error})") from error
    try:
        content = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(origin, str(file), f"well-formed TOML or JSON ({error})") from error
    if not isinstance(content, dict):
        raise InvalidArgument(origin, str(file), "an object with one table per role")
    return content


def _one_of(names: list[str], given: str) -> str:
    close = difflib.get_close_matches(given, names, 1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{', '.join(names)}{hint}"


# -- values ------------------------------------------------------------------------------------------


def _coerce(option: Option, raw: Any, origin: str) -> Any:
    """Convert a raw value to the field's type."""
    try:
        if option.is_optional and isinstance(raw, str) and raw.lower() in ("", "none"):
            return None
        value = _prepare(option, raw)
        if option.base is Path:
            return Path(msgspec.convert(value, str)).expanduser()
        result = msgspec.convert(value, option.annotation, strict=not isinstance(value, str | list))
        if isinstance(result, float) and not math.isfinite(result):
            raise ValueError("not finite")
        return result
    except (msgspec.ValidationError, ValueError, TypeError) as error:
        shown = "(hidden)" if option.has(Secret) else raw
        raise InvalidArgument(f"{option.name} ({origin})", shown, allowed(option)) from error


def _prepare(option: Option, raw: Any) -> Any:
    """Parse human notation: size suffixes, yes and no, comma-separated lists, surrounding spaces."""
    if option.takes_many:
        items = raw.split(",") if isinstance(raw, str) else raw
        return [item.strip() if isinstance(item, str) else item for item in items if item != ""]
    if option.has(Size) and isinstance(raw, str):
        return parse_size(raw)
    if option.base is bool and isinstance(raw, str):
        return _parse_bool(raw)
    if option.base is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    return raw.strip() if isinstance(raw, str) else raw


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}


def parse_size(text: str) -> int:
    """Bytes from ``4096``, ``64MiB`` (powers of 1024), ``256GB`` or ``1.5 G`` (powers of 1000).

    Raises:
        ValueError: ``text`` is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is not a size")
    number, unit = match[1], _UNITS[match[2].lower()]
    return int(Decimal(number) * unit)


def format_size(size_bytes: int) -> str:
    """The shortest exact way to write a size: ``2GiB``, ``256GB``, ``1500``."""
    if size_bytes > 0:
        for unit in ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "KB"):
            factor = _UNITS[unit.lower()]
            if size_bytes % factor == 0:
                return f"{size_bytes // factor}{unit}"
    return str(size_bytes)


def _parse_bool(text: str) -> bool:
    values = {
        "true": True,
        "yes": True,
        "on": True,
        "1": True,
        "false": False,
        "no": False,
        "off": False,
        "0": False,
    }
    if text.strip().lower() not in values:
        raise ValueError(f"{text!r} is neither true nor false")
    return values[text.strip().lower()]


def allowed(option: Option) -> str:
    """Description of the values that a field takes: ``an integer from 0 to 65535``."""
    text = _allowed(option)
    return f"{text}, or none" if option.is_optional else text


def _allowed(option: Option) -> str:
    choices = choices_of(option.base)
    if choices:
        return ", ".join(choices)
    if option.takes_many:
        return "a list (separated by commas in the environment)"
    if option.has(Size):
        return f"a size{_range(option)}, such as 64MiB, 256GB or 4096"
    nouns: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", Path: "a path"}
    return f"{nouns.get(option.base, 'text')}{_range(option)}"


def choices_of(base: Any) -> list[str]:
    """The values that a ``Literal`` or ``StrEnum`` allows; empty for other types."""
    if typing.get_origin(base) is Literal:
        return [str(choice) for choice in typing.get_args(base)]
    if isinstance(base, type) and issubclass(base, enum.StrEnum):
        return [member.value for member in base]
    return []


def _range(option: Option) -> str:
    """The field's limits, from its ``Meta`` marks: `` from 0 to 65535``."""

    def write(bound: float) -> str:
        return format_size(int(bound)) if option.has(Size) else str(bound)

    text = ""
    for mark in _marks(option.annotation):
        if isinstance(mark, Meta):
            bounds = [("from", mark.ge), ("above", mark.gt), ("to", mark.le), ("below", mark.lt)]
            text += "".join(f" {word} {write(bound)}" for word, bound in bounds if bound is not None)
            if mark.min_length:
                text += f" of at least {mark.min_length} character{'s' if mark.min_length > 1 else ''}"
            if mark.pattern is not None:
                text += f" {mark.description or f'matching {mark.pattern}'}"
    return text


def _marks(annotation: Any) -> list[Any]:
    """All marks in ``Annotated``, also inside ``| None``."""
    marks = list(getattr(annotation, "__metadata__", ()))
    for inner in typing.get_args(_bare(annotation)):
        if typing.get_origin(_bare(annotation)) in (typing.Union, types.UnionType):
            marks += getattr(inner, "__metadata__", ())
    return marks


def _bare(annotation: Any) -> Any:
    return annotation.__origin__ if hasattr(annotation, "__metadata__") else annotation


def _base(annotation: Any) -> Any:
    bare = _bare(annotation)
    if typing.get_origin(bare) in (typing.Union, types.UnionType):
        kinds = [_bare(inner) for inner in typing.get_args(bare) if inner is not type(None)]
        assert len(kinds) == 1, f"{annotation} mixes types; only `T | None` is allowed"
        return kinds[0]
    return bare


def _sentences(settings_class: type) -> dict[str, str]:
    """The string below each field, read from the source once. A subclass inherits its bases' sentences."""
    sentences: dict[str, str] = {}
    for owner in reversed(settings_class.__mro__[:-1]):
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
                and isinstance(below.value.value, str)
            ):
                sentences[field.target.id] = " ".join(below.value.value.split())
    return sentences


# -- showing -----------------------------------------------------------------------------------------


def describe(settings: Any, origins: Mapping[str, str]) -> str:
    """Format the settings as a TOML table that can be loaded again, each with its origin."""
    settings_class = type(settings)
    lines = [
        (f"{option.name} = {option.show(getattr(settings, option.field))}", origins[option.field])
        for option in options(settings_class)
        if getattr(settings, option.field) is not None
    ]
    unset = [option.name for option in options(settings_class) if getattr(settings, option.field) is None]
    width = max((len(line) for line, _ in lines), default=0)
    table = [f"[{role_of(settings_class)}]", *(f"{line:<{width}}  # {origin}" for line, origin in lines)]
    return "\n".join(table + [f"# {name} is not set" for name in unset])


def describe_included(settings: Any, origins: Mapping[str, str]) -> str:
    """Format the tables that ``settings`` includes as ``describe`` does; empty if there are none."""
    tables = []
    for field in included_tables(type(settings)):
        start = f"{field}."
        theirs = {name.removeprefix(start): origins[name] for name in origins if name.startswith(start)}
        tables.append(describe(getattr(settings, field), theirs))
    return "\n".join(tables)


def render_docs(settings_classes: Iterable[type], opening: str) -> str:
    """Render Markdown with one section per role and one row per field."""
    sections = [opening.strip()]
    for settings_class in settings_classes:
        role = role_of(settings_class)
        summary = (inspect.getdoc(settings_class) or "").split("\n\n")[0].replace("\n", " ")
        rows = [_row(role, option) for option in options(settings_class)]
        head = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
        sections.append("\n".join([f"## [{role}]", "", summary, "", *head, *rows]))
    return "\n\n".join(sections) + "\n"


def _row(role: str, option: Option) -> str:
    default = "not set" if option.default is None else f"`{option.show(option.default)}`"
    takes = allowed(option)
    limits = "" if takes in ("text", "true or false", "a path") else f" Takes {takes}."
    also = "".join(f" Also read from `{name}`." for name in option.more_variables)
    cells = [
        f"`{option.flag}`",
        f"`{variable_of(role, option)}`",
        default,
        f"{option.sentence}{limits}{also}",
    ]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)
