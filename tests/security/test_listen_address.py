# SPDX-License-Identifier: Apache-2.0
"""Addresses on which a server without a credential may listen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake.errors import InvalidArgument
from mooncake.security import Identity, SecuritySettings, check_address, is_loopback, listen_address
from mooncake.security.keys import format_secret


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(listen_address, "_keeps_defaults", "")
    monkeypatch.setattr(listen_address, "_has_warned", False)
    yield


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    check_address(host, Identity())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "127.0.0.1,10.0.0.1", "fe80::1%eth0"])
def test_the_rest_needs_a_credential(host: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"--tls-cert.*--cluster-key-file.*--insecure"):
        check_address(host, Identity())
    check_address(host, Identity(SecuritySettings(insecure=True)))
    key = tmp_path / "key"
    key.write_text(format_secret(b"s" * 32))
    key.chmod(0o600)
    check_address(host, Identity(SecuritySettings(cluster_key_file=str(key))))


def test_a_program_of_the_existing_package_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    listen_address.keep_upstream_defaults("mooncake_master")
    for host in ("127.0.0.1", "0.0.0.0", "0.0.0.0"):
        check_address(host, Identity())
    assert [one.getMessage() for one in caplog.records] == ["listening_without_credential"]
    assert caplog.records[0].__dict__["fields"]["program"] == "mooncake_master"
