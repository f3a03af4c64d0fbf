# SPDX-License-Identifier: Apache-2.0
"""YAML file with the tenants' quotas, in the existing master's format: read at start, rewritten on change.

A new version replaces the file atomically and durably. An empty file is refused all the same: after a loss of
power it may be what another program left of the quotas, and without them no tenant has a limit.

::

    version: 1
    tenants:
      - {name: team-a, quota: 200GB}
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mooncake.config import parse_size
from mooncake.errors import InvalidArgument, StorageError
from mooncake.files import Directory, OsDirectory
from mooncake.store import messages as m
from mooncake.store.master.tenants import MAX_QUOTA_BYTES

FIELD = "tenants_file"


def read(path: str) -> dict[str, int]:
    """Read bytes by tenant; empty when there is no file yet.

    Raises:
        InvalidArgument: the file can't be read, or is empty; names the entry that is wrong.
    """
    import yaml  # late: an extra

    file = Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else "{}"
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgument(
            FIELD, path, f"a readable YAML file ({' '.join(str(error).split())})"
        ) from error
    if not text.strip():
        allowed = "a file with content, but it is empty: restore it, or remove it to begin without quotas"
        raise InvalidArgument(FIELD, path, allowed)
    content = {} if content is None else content
    if not isinstance(content, dict) or content.get("version", 1) != 1:
        raise InvalidArgument(FIELD, path, "a mapping with version: 1 and tenants")
    tenants = content.get("tenants") or []
    if not isinstance(tenants, list):
        raise InvalidArgument(f"tenants in {path}", tenants, "a list of {name, quota}")
    return dict(_entry(path, one) for one in tenants)


def _entry(path: str, one: Any) -> tuple[str, int]:
    name, quota = (one.get("name"), one.get("quota")) if isinstance(one, dict) else (None, None)
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"tenants in {path}", one, "entries {name, quota}")
    try:
        size_bytes = parse_size(str(quota))
    except ValueError as error:
        raise InvalidArgument(f"quota of {name} in {path}", quota, "a size such as 200GB") from error
    if not 0 <= size_bytes <= MAX_QUOTA_BYTES:
        raise InvalidArgument(f"quota of {name} in {path}", quota, f"0 to {MAX_QUOTA_BYTES} bytes")
    return name, size_bytes


def write(path: str, quotas: Iterable[m.QuotaStatus]) -> None:
    """Replace the file atomically and durably.

    Raises:
        StorageError: the file can't be written.
    """
    import yaml  # late: an extra

    tenants = [
        {"name": one.tenant, "quota": one.quota_bytes} for one in quotas if one.quota_bytes is not None
    ]
    content = yaml.safe_dump({"version": 1, "tenants": tenants}, sort_keys=False).encode()
    file = Path(path).expanduser()
    try:
        with contextlib.closing(OsDirectory(file.parent)) as directory:
            _replace(directory, file.name, content)
    except OSError as error:
        raise StorageError(f"the quotas are set, but {path} can't be written: {error}") from error


def _replace(directory: Directory, name: str, content: bytes) -> None:
    """Replace the content of a file that other processes may replace at the same time. Raises OSError."""
    fresh = f"{name}.{secrets.token_hex(8)}.new"
    try:
        with contextlib.closing(directory.open(fresh)) as file:
            file.append(content)
            file.sync()
        directory.rename(fresh, name)
    except OSError:
        with contextlib.suppress(OSError):
            directory.remove(fresh)
        raise
    directory.sync()
