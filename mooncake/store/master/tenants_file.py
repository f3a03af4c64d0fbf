# SPDX-License-Identifier: Apache-2.0
"""YAML file with the tenants' quotas, in the existing master's format: read at start, rewritten on change.

::

    version: 1
    tenants:
      - {name: team-a, quota: 200GB}
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mooncake.config import parse_size
from mooncake.errors import InvalidArgument, StorageError
from mooncake.store import messages as m
from mooncake.store.master.tenants import MAX_QUOTA_BYTES

FIELD = "tenants_file"


def read(path: str) -> dict[str, int]:
    """Read bytes by tenant; empty when there is no file yet.

    Raises:
        InvalidArgument: the file can't be read; names the entry that is wrong.
    """
    import yaml  # late: an extra

    file = Path(path).expanduser()
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidArgument(
            FIELD, path, f"a readable YAML file ({' '.join(str(error).split())})"
        ) from error
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
    """Replace the file atomically.

    Raises:
        StorageError: the file can't be written.
    """
    import yaml  # late: an extra

    tenants = [
        {"name": one.tenant, "quota": one.quota_bytes} for one in quotas if one.quota_bytes is not None
    ]
    file = Path(path).expanduser()
    fresh = file.with_name(file.name + ".new")
    try:
        fresh.write_text(
            yaml.safe_dump({"version": 1, "tenants": tenants}, sort_keys=False), encoding="utf-8"
        )
        os.replace(fresh, file)
    except OSError as error:
        raise StorageError(f"the quotas are set, but {path} can't be written: {error}") from error
