# SPDX-License-Identifier: Apache-2.0
"""Marks on the type of a setting, beside its range; ``config.py`` evaluates them.

Not in ``config.py``, because a core may hold its settings but not read any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta


class Size:
    """Marks an integer as a number of bytes: ``Annotated[int, Size]``, written ``64MiB`` or ``256GB``."""


class Secret:
    """Marks a value that is never shown: ``Annotated[str, Secret]``."""


@dataclass(frozen=True)
class AlsoFrom:
    """One more environment variable to read, after the field's own: ``AlsoFrom("ADMIN_API_KEY")``."""

    variable: str


Port = Annotated[int, Meta(ge=0, le=65535)]
"""A port to listen on; 0 takes a free one."""
