# SPDX-License-Identifier: Apache-2.0
"""The file of quotas: its content, its errors, and that it follows changes."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from mooncake.compat.master import load_http
from mooncake.errors import InvalidArgument, StorageError
from mooncake.sim.faults.disks import SimDirectory
from mooncake.store import messages as m
from mooncake.store.master import tenants_file
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


@pytest.mark.parametrize("seed", range(20))
def test_new_quotas_are_there_after_a_loss_of_power(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDirectory(Random(seed), "/etc/mooncake")
    monkeypatch.setattr(tenants_file, "OsDirectory", lambda path: disk)
    for quota_bytes in (1, 2):
        write("/etc/mooncake/tenants.yaml", [m.QuotaStatus("a", quota_bytes, 0, 0)])
        disk.lose_power()
        assert disk.names() == ["tenants.yaml"]
        expected = f"version: 1\ntenants:\n- name: a\n  quota: {quota_bytes}\n"
        assert disk.content("tenants.yaml").decode() == expected, f"seed {seed}"


def test_what_can_not_be_written_leaves_the_file_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDirectory(Random(1), "/etc/mooncake")
    monkeypatch.setattr(tenants_file, "OsDirectory", lambda path: disk)
    write("/etc/mooncake/tenants.yaml", [m.QuotaStatus("a", 1, 0, 0)])
    before = disk.content("tenants.yaml")
    disk.capacity_bytes = len(before) + 5
    with pytest.raises(StorageError, match=r"quotas are set.*No space"):
        write("/etc/mooncake/tenants.yaml", [m.QuotaStatus("a", 2, 0, 0)])
    assert disk.names() == ["tenants.yaml"] and disk.content("tenants.yaml") == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty: restore it"),
        (" \n", "it is empty: restore it"),
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
