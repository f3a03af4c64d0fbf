# SPDX-License-Identifier: Apache-2.0
"""What commands print: sizes, durations and shares as text, JSON, errors, and the progress of long work.

Progress goes to standard error and only to a terminal, so that output that is piped stays as it is.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import sys
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mooncake.config import parse_size
from mooncake.errors import InvalidArgument, cause_of


def progress_bar() -> Progress:
    """A progress bar on standard error, shown only in a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show in a terminal that work is under way whose end is not known."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


MIN_WIDTH = 240
"""Width of output to a file or a pipe: nothing is folded there to fit a screen."""


def wide_console() -> Console:
    """Standard output, as wide as the terminal, and wide enough where there is none."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, MIN_WIDTH))


_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def size_text(size_bytes: float) -> str:
    """``1.5 MiB``: three digits at most, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size_bytes < 1000 or unit == "TiB":
            break
        size_bytes /= 1024
    return f"{size_bytes:.3g} {unit}"


def span_text(seconds: float) -> str:
    """``2.5 s``, ``10 min``, ``3.2 h``."""
    for bound, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < bound:
            return f"{seconds / divisor:.3g} {unit}"
    return f"{seconds / 86_400:.3g} d"


def read_span(text: str, field: str, more: str = "") -> float:
    """Seconds in ``30``, ``5s``, ``30m``, ``1.5h`` or ``1d``; ``more``: what else the caller takes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if match is None or not float(match[1]):
        raise InvalidArgument(field, text, f"a duration such as 30s, 10m, 2h or 1d {more}".rstrip())
    return float(match[1]) * _UNITS_S[match[2]]


def read_size(text: str, field: str) -> int:
    """Bytes in ``4096``, ``64MiB`` or ``256GB``. Raises InvalidArgument, naming ``field``."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise InvalidArgument(field, text, "a size such as 16MiB") from error


def check_url(url: str, field: str = "--url") -> None:
    """Raises InvalidArgument unless this is the address of an HTTP server, with a port that is a number."""
    try:
        parts = urllib.parse.urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool((parts.hostname or "").encode("idna"))
        is_right = is_right and (parts.port or 0) >= 0 and url.isprintable() and " " not in url
    except ValueError:
        is_right = False
    if not is_right:
        raise InvalidArgument(field, url, "an address such as http://127.0.0.1:8000")


def printable(text: str) -> str:
    """A text without characters that a terminal would take as commands."""
    return "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text)


_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def harmless(text: str) -> str:
    """A text of several lines, without characters that a terminal would take as commands or can't show."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


_LINE_BREAKS = re.compile("[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def one_line(text: str, stream: TextIO | None = None) -> str:
    """A key or a name as one line of output, on standard output by default.

    For a terminal it is ``printable``; for a program it keeps everything but its line breaks.
    """
    if (stream or sys.stdout).isatty():
        return printable(text)
    return _LINE_BREAKS.sub(lambda found: printable(found[0]), text)


def reason_of(error: Any) -> str:
    """An error as servers of the OpenAI API send it, an object with a message or a text, as text."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def reason_in(content: bytes) -> str:
    """The error in the body of an answer whose status is one, as text; without one, the body's beginning."""
    try:
        return reason_of(json.loads(content)["error"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return content[:200].decode(errors="replace")


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def fail(reason: str) -> NoReturn:
    """Print one line on standard error, and exit with status 1."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def share_text(used: int, total: int) -> str:
    return f"{100 * used / total:.0f}%" if total else "-"


def write_whole(file: Path, text: str, field: str) -> None:
    """Write the whole file or none; a device or a pipe gets the text, and stays what it is.

    A file that is already this program's output (``/dev/stdout``) gets the text behind what was printed.

    Raises:
        InvalidArgument: the file can't be written; names ``field``.
        BrokenPipeError: the reader of a pipe has ended.
    """
    with _worded(file, field) as found:
        stream = None if found is None else _stream_of(found)
        if stream is not None:
            stream.write(text)
            stream.flush()
        elif found is None or stat.S_ISREG(found.st_mode):
            with _beside(file) as (fresh, target):
                fresh.write_text(text)
                os.replace(fresh, target)
        else:
            with file.open("w") as device:
                device.write(text)


def write_new(file: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file that does not exist yet, whole or not at all; ``mode`` is subject to the umask.

    Raises:
        FileExistsError: it exists, and is unchanged.
        OSError: it can't be written, and is not left behind.
    """
    number = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    try:
        with open(number, "wb") as opened:
            opened.write(content)
    except BaseException:
        file.unlink(missing_ok=True)
        raise


def check_writable(file: Path | None, field: str) -> None:
    """Check that ``write_whole`` can write ``file``, before long work whose results it gets; None is right.

    Raises:
        InvalidArgument: naming ``field``.
    """
    if file is None:
        return
    with _worded(file, field) as found:
        if found is None or stat.S_ISREG(found.st_mode):
            with _beside(file):
                pass
        elif stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        elif not os.access(file, os.W_OK):  # a pipe can't be opened without its reader
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def _worded(file: Path, field: str) -> Iterator[os.stat_result | None]:
    """The status of the file that ``file`` leads to, None if there is none yet; an error is one of
    ``field``."""
    if str(file) == "-":
        raise InvalidArgument(field, "-", "the name of a file; /dev/stdout is the standard output")
    try:
        try:
            found = file.stat()
        except FileNotFoundError:
            found = None
        yield found
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        raise InvalidArgument(field, str(file), f"a file that can be written ({cause_of(error)})") from error


@contextmanager
def _beside(file: Path) -> Iterator[tuple[Path, Path]]:
    """A new file to be renamed when it is whole, and removed if it is not; and the file to replace, which
    is the one that a link names."""
    target = Path(os.path.realpath(file))
    fresh = target.with_name(f"{target.name}.{secrets.token_hex(4)}.new")
    fresh.touch(exist_ok=False)
    try:
        yield fresh, target
    finally:
        fresh.unlink(missing_ok=True)


def _stream_of(found: os.stat_result) -> TextIO | None:
    """The standard stream of this program that is the file with this status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if os.path.samestat(os.fstat(stream.fileno()), found):
                return stream
        except (OSError, ValueError):  # it is closed, or no file
            continue
    return None
