"""What ``mooncake up`` refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.cli.certs import CertsSettings, make
from mooncake.cli.up import check_certificate
from mooncake.errors import InvalidArgument
from mooncake.security import Identity, SecuritySettings


def identity_of(folder: Path, authority: Path | None = None, **more: tuple[str, ...]) -> Identity:
    make(CertsSettings(folder=folder, **more))
    ca = (authority or folder) / "ca.pem"
    return Identity(SecuritySettings(str(folder / "node.pem"), str(folder / "node.key"), str(ca)))


def test_a_certificate_for_this_host_will_do(tmp_path: Path) -> None:
    check_certificate(identity_of(tmp_path))
    check_certificate(Identity())


def test_a_certificate_that_does_not_name_this_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"node\.pem.*names 127\.0\.0\.1"):
        check_certificate(identity_of(tmp_path, host=("node-1.example", "10.0.0.1")))


def test_a_certificate_of_another_authority_is_refused(tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path / "other"))
    with pytest.raises(InvalidArgument, match=r"node\.pem.*authority in tls_ca"):
        check_certificate(identity_of(tmp_path / "ours", tmp_path / "other"))
