# SPDX-License-Identifier: Apache-2.0
"""The authority is created once, it signs the certificates, and nothing is overwritten."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from mooncake.errors import InvalidArgument

pytest.importorskip("cryptography", reason="makes the certificates: pip install 'mooncake-serving[tls]'")

from cryptography import x509

from mooncake.cli.certs import CertsSettings, make


def test_one_authority_many_certificates(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "certs"
    first = make(CertsSettings(folder=folder, name="a", host=("node-a.example", "10.0.0.1", "fd00::1")))
    second = make(CertsSettings(folder=folder, name="b", days=3))
    assert [path.name for path in first] == ["ca.pem", "ca.key", "a.pem", "a.key"]
    assert [path.name for path in second] == ["b.pem", "b.key"]
    authority, a, b = (
        x509.load_pem_x509_certificate((folder / f"{n}.pem").read_bytes()) for n in ("ca", "a", "b")
    )
    for one in (a, b):
        one.verify_directly_issued_by(authority)
    names = a.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["node-a.example"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1", "fd00::1"]
    assert not a.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert (b.not_valid_after_utc - b.not_valid_before_utc).days == 3
    for key in folder.glob("*.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_nothing_is_written_over(tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path))
    before = (tmp_path / "node.key").read_bytes()
    for name in ("node", "ca"):
        with pytest.raises(InvalidArgument, match=f"^name is '{name}'"):
            make(CertsSettings(folder=tmp_path, name=name))
    assert (tmp_path / "node.key").read_bytes() == before


def test_half_an_authority_is_refused(tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path))
    (tmp_path / "ca.key").unlink()
    with pytest.raises(InvalidArgument, match=r"ca\.pem needs .*ca\.key"):
        make(CertsSettings(folder=tmp_path, name="other"))
    (tmp_path / "ca.key").write_text("nonsense")
    with pytest.raises(InvalidArgument, match=r"a readable ca\.pem and ca\.key"):
        make(CertsSettings(folder=tmp_path, name="other"))
