"""Flags as the existing package's programs take them.

``-f=v``, ``--f=v``, ``--f v``, hyphens or underscores, ``--f`` and ``--nof`` for what is true or false, and
the flags of its logging library, which are taken and mean nothing here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from mooncake.errors import InvalidArgument

LOGGING = {
    *(
        "alsologtostderr",
        "colorlogtostderr",
        "log_dir",
        "log_link",
        "logbuflevel",
        "logbufsecs",
        "logtostderr",
    ),
    *("max_log_size", "minloglevel", "stderrthreshold", "stop_logging_if_full_disk", "v", "vmodule"),
}
_TRUE, _FALSE = ("true", "t", "yes", "y", "1"), ("false", "f", "no", "n", "0")


def parse_flags(arguments: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The value of each flag in ``defaults``, of its default's type.

    Raises:
        InvalidArgument: an unknown flag, a word that is no flag, or a value of another type.
    """
    values = dict(defaults)
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            break
        if not word.startswith("-"):
            raise InvalidArgument(
                "argument", word, "flags only, such as " + " ".join(f"--{n}" for n in defaults)
            )
        name, has_value, text = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name in LOGGING:
            if not has_value and words and not words[0].startswith("-"):
                words.pop(0)
            continue
        if not has_value and name.startswith("no") and isinstance(defaults.get(name[2:]), bool):
            values[name[2:]] = False
            continue
        if name not in defaults:
            close = difflib.get_close_matches(name, defaults, 1)
            raise InvalidArgument("flag", word, f"--{close[0]}?" if close else ", ".join(defaults))
        if not has_value:
            if isinstance(defaults[name], bool):
                text = words.pop(0) if words and words[0].lower() in _TRUE + _FALSE else "true"
            elif words:
                text = words.pop(0)
            else:
                raise InvalidArgument(f"--{name}", "", "a value")
        values[name] = _typed(name, text, defaults[name])
    return values


def _typed(name: str, text: str, default: Any) -> Any:
    if isinstance(default, bool):
        if text.lower() not in _TRUE + _FALSE:
            raise InvalidArgument(f"--{name}", text, "true or false")
        return text.lower() in _TRUE
    try:
        return type(default)(text)
    except ValueError as error:
        raise InvalidArgument(f"--{name}", text, "a whole number") from error
