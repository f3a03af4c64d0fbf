# SPDX-License-Identifier: Apache-2.0
"""The file of quotas: its content, its errors, and that it follows changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.compat.master import load_http
from mooncake.errors import InvalidArgument, StorageError
from mooncake.store import messages as m
from mooncake.store.master.tenants_file import read, write
from mooncake.store.server import running
from mooncake.store.settings import MasterSettings


def test_the_file_is_read_and_written(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    assert read(str(file)) == {}
    file.write_text("version: 1\ntenants: [{name: a, quota: 200GB}, {name: b, quota: 4096}]\n")
    assert read(str(file)) == {"a": 200_000_000_000, "b": 4096}
    write(str(file), [m.QuotaStatus("c", 7, 0, 0), m.QuotaStatus("unlimited", None, 3, 1)])
    assert read(str(file)) == {"c": 7}
    with pytest.raises(StorageError, match="/proc"):
        write("/proc/tenants.yaml", [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tenants: {", "readable"),
        ("version: 2", "version: 1"),
        ("[1]", "version: 1"),
        ("tenants: 7", "a list"),
        ("tenants: [a]", "name, quota"),
        ("tenants: [{quota: 1}]", "name, quota"),
        ("tenants: [{name: a, quota: lots}]", "quota of a"),
        ("tenants: [{name: a}]", "quota of a"),
        ("tenants: [{name: a, quota: 9223372036854775808}]", "quota of a.*0 to 9223372036854775807 bytes"),
    ],
)
def test_an_error_in_the_file_is_named(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    with pytest.raises(InvalidArgument, match=why):
        read(str(file))


async def test_a_master_begins_with_the_files_quotas(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: [{name: a, quota: 4096}]\n")
    async with running(MasterSettings(port=0, tenants_file=str(file)), load_http) as server:
        quotas = await server.ask(m.AskQuotas())
        assert isinstance(quotas, m.Quotas)
        assert [(one.tenant, one.quota_bytes) for one in quotas.quotas] == [("a", 4096)]
