# SPDX-License-Identifier: Apache-2.0
"""The authority is created once, it signs the certificates, and nothing is overwritten."""

from __future__ import annotations

import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mooncake.errors import InvalidArgument

pytest.importorskip("cryptography", reason="makes the certificates: pip install 'mooncake-serving[tls]'")

from cryptography import x509

from mooncake.cli.certs import CertsSettings, derive_key, make, make_cluster_key


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


@pytest.mark.parametrize("name", ["", "sub/x", "/x", "a\0b", "x" * 300])
def test_a_name_that_is_none_of_a_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^name is .*the name of a file"):
        make(CertsSettings(folder=tmp_path, name=name))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "host", ["", "ünïcode.de", "bad host!", "10.0.0.256", "a..b", "-a", "a" * 64, "a.*", "host:8000"]
)
def test_a_host_that_is_none_is_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidArgument, match=r"^host is .*host names"):
        make(CertsSettings(folder=tmp_path, host=("localhost", host)))
    assert list(tmp_path.iterdir()) == []


def test_names_of_hosts_are_taken_as_they_are(tmp_path: Path) -> None:
    names = ["node_1", "*.cluster.local", "xn--nicode-2ya.de", "4u-node", "a-b.c-d"]
    make(CertsSettings(folder=tmp_path, host=(*names, "fe80::1")))
    found = x509.load_pem_x509_certificate((tmp_path / "node.pem").read_bytes())
    alternatives = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert alternatives.get_values_for_type(x509.DNSName) == names


def test_half_an_authority_is_refused(tmp_path: Path) -> None:
    make(CertsSettings(folder=tmp_path))
    (tmp_path / "ca.key").unlink()
    with pytest.raises(InvalidArgument, match=r"ca\.pem needs .*ca\.key"):
        make(CertsSettings(folder=tmp_path, name="other"))
    (tmp_path / "ca.key").write_text("nonsense")
    with pytest.raises(InvalidArgument, match=r"a readable ca\.pem and ca\.key"):
        make(CertsSettings(folder=tmp_path, name="other"))


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond this, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [0, 300, 640])
def test_nothing_is_left_of_certificates_that_do_not_fit_the_disk(tmp_path: Path, num_bytes: int) -> None:
    with largest_file(num_bytes), pytest.raises(InvalidArgument, match=r"^folder is .*File too large"):
        make(CertsSettings(folder=tmp_path, host=("localhost", "a" * 60, "b" * 60)))
    assert [*tmp_path.iterdir()] == []
    assert len(make(CertsSettings(folder=tmp_path))) == 4, "it can be repeated"


def test_nothing_is_left_of_a_secret_that_does_not_fit_the_disk(tmp_path: Path) -> None:
    cluster, derived = tmp_path / "cluster.key", tmp_path / "client.key"
    with largest_file(3), pytest.raises(InvalidArgument, match=r"^cluster_key is .*File too large"):
        make_cluster_key(cluster)
    assert [*tmp_path.iterdir()] == []
    make_cluster_key(cluster)
    settings = CertsSettings(derive_from=cluster, role="client", out=derived)
    with largest_file(3), pytest.raises(InvalidArgument, match=r"^out is .*File too large"):
        derive_key(settings)
    assert [*tmp_path.iterdir()] == [cluster]
    assert derive_key(settings) == derived
    content = derived.read_text()
    with pytest.raises(InvalidArgument, match="does not exist yet"):
        derive_key(settings)
    assert derived.read_text() == content


def test_a_certificate_of_a_node_needs_a_host(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"^host is ''; allowed: names or addresses"):
        make(CertsSettings(folder=tmp_path, host=()))
    assert [*tmp_path.iterdir()] == []
    assert make(CertsSettings(folder=tmp_path, host=(), role="client", name="c"))
