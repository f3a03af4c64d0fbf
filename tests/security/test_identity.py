# SPDX-License-Identifier: Apache-2.0
"""The settings [security], the key file, the one identity of a process, and where it may listen."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from mooncake import clock
from mooncake.cli.certs import CertsSettings, make
from mooncake.errors import InvalidArgument
from mooncake.metrics import registry
from mooncake.security import (
    Identity,
    Role,
    SecuritySettings,
    check_address,
    install_identity,
    is_loopback,
    process_identity,
    show_remaining,
    tool_identity,
)
from mooncake.security import identity as module
from mooncake.security.identity import read_key_file
from mooncake.security.keys import derive, format_credential, format_secret
from mooncake.security.tls_contexts import certificate_ends

SECRET = b"s" * 32


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("MOONCAKE_"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(module, "_keeps_defaults", "")
    monkeypatch.setattr(module, "_has_warned", False)
    install_identity(None)
    yield
    install_identity(None)


def key_file(folder: Path, text: str = format_secret(SECRET), mode: int = 0o600) -> Path:
    path = folder / "cluster.key"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_without_settings_nothing_is_asked_for() -> None:
    assert process_identity().is_open and process_identity() is process_identity()
    assert process_identity().signer() is None and process_identity().verifier() is None


def test_a_process_takes_its_identity_from_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_SECURITY_CLUSTER_KEY_FILE", str(key_file(tmp_path)))
    assert process_identity().credential == derive(SECRET, Role.NODE)
    assert tool_identity().credential == derive(SECRET, Role.ADMIN), (
        "the cluster's own key permits everything"
    )


def test_or_by_the_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mooncake.toml"
    file.write_text(f'[security]\ncluster_key_file = "{key_file(tmp_path)}"\n')
    monkeypatch.setenv("MOONCAKE_CONFIG", str(file))
    assert process_identity().credential == derive(SECRET, Role.NODE)


def test_a_derived_key_is_what_it_is_whatever_is_wished(tmp_path: Path) -> None:
    acme = derive(SECRET, Role.CLIENT, "acme")
    settings = SecuritySettings(cluster_key_file=str(key_file(tmp_path, format_credential(acme))))
    for role in Role:
        assert Identity(settings, role).credential == acme
    assert Identity(settings).tenant == "acme"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    with pytest.raises(InvalidArgument, match=rf"{mode:04o}; chmod 600"):
        read_key_file(str(path))


def test_what_is_no_key_file_is_named(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path / "missing", "No such file"),
        (tmp_path, "directory|regular file"),
        (key_file(tmp_path, "hello"), "line 1 is no key"),
    ):
        with pytest.raises(InvalidArgument, match=reason) as caught:
            read_key_file(str(path))
        assert caught.value.field == "cluster_key_file"
    with pytest.raises(InvalidArgument, match="too large"):
        read_key_file(str(key_file(tmp_path, "x" * (1 << 17))))


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"tls_cert": "a.pem"}, "tls_key and tls_ca"),
        ({"tls_ca": "a.pem"}, "tls_cert and tls_key"),
        ({"tls_cert": "b.pem", "tls_key": "a.pem"}, "tls_ca"),
    ],
)
def test_half_of_tls_is_refused(given: dict[str, Any], missing: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SecuritySettings(**given)
    assert caught.value.field in given, "one that its user has given"
    assert caught.value.allowed == f"set together with {missing}"


@pytest.mark.parametrize("days", [90, 3650])
def test_what_remains_of_the_process_s_certificate_is_a_metric(
    tmp_path: Path, days: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(CertsSettings(folder=tmp_path, days=days))
    file, key, authority = (str(tmp_path / name) for name in ("node.pem", "node.key", "ca.pem"))
    name = "mooncake_security_certificate_remaining_seconds"
    install_identity(Identity(SecuritySettings(file, key, authority)))
    certificate = x509.load_pem_x509_certificate(Path(file).read_bytes())
    ends = certificate.not_valid_after_utc.timestamp()
    monkeypatch.setattr(clock, "wall", lambda: ends - 3.0)
    assert registry.get_sample_value(name, {"file": file}) == 3.0
    install_identity(None)
    assert registry.get_sample_value(name, {"file": file}) is None


def test_an_end_beyond_2049_is_read(tmp_path: Path) -> None:
    """Certificates write the year in two digits before, and in four from then on."""
    make(CertsSettings(folder=tmp_path))
    authority = x509.load_pem_x509_certificate((tmp_path / "ca.pem").read_bytes())
    key = serialization.load_pem_private_key((tmp_path / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    ends = datetime.datetime(2051, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)
    builder = x509.CertificateBuilder(authority.subject, authority.subject, key.public_key(), 7)
    builder = builder.not_valid_before(authority.not_valid_before_utc).not_valid_after(ends)
    certificate = builder.sign(key, hashes.SHA256())
    file = tmp_path / "late.pem"
    file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    assert certificate_ends(str(file)) == [ends.timestamp()]


def test_the_end_of_an_authority_is_a_metric_and_so_is_that_of_another_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with several authorities counts with the one that ends last: the others are being replaced."""
    for name, days in (("old", 30), ("new", 900)):
        make(CertsSettings(folder=tmp_path / name, days=days))
    both = tmp_path / "both.pem"
    parts = [(tmp_path / name / "ca.pem").read_bytes() for name in ("new", "old")]
    both.write_bytes(b"the authorities:\n" + b"".join(parts))
    ends = [x509.load_pem_x509_certificate(part).not_valid_after_utc.timestamp() for part in parts]
    file, key = (str(tmp_path / "new" / name) for name in ("node.pem", "node.key"))
    assert certificate_ends(str(both)) == ends and certificate_ends(key) == []
    name = "mooncake_security_certificate_remaining_seconds"
    monkeypatch.setattr(clock, "wall", lambda: max(ends) - 5.0)
    install_identity(Identity(SecuritySettings(file, key, str(both))))
    assert registry.get_sample_value(name, {"file": str(both)}) == 5.0
    both.write_bytes((tmp_path / "new" / "node.pem").read_bytes() + b"".join(parts))
    last = max(certificate_ends(str(both)))
    monkeypatch.setattr(module, "certificate_ends", lambda file: [last - 7.0, last])
    install_identity(Identity(SecuritySettings(str(both), key, str(both))))
    assert registry.get_sample_value(name, {"file": str(both)}) == last - 7.0 - clock.wall()
    monkeypatch.setattr(module, "certificate_ends", certificate_ends)
    public = str(tmp_path / "old" / "node.pem")
    show_remaining(public)
    show_remaining(key)  # without a certificate
    shown = registry.get_sample_value(name, {"file": public})
    assert shown == certificate_ends(public)[0] - clock.wall()
    assert registry.get_sample_value(name, {"file": key}) is None
    install_identity(None)


def test_nothing_shows_the_key(tmp_path: Path) -> None:
    identity = Identity(SecuritySettings(cluster_key_file=str(key_file(tmp_path))))
    assert identity.credential is not None
    shown = f"{identity!r} {identity.keys!r} {identity.settings!r}"
    for secret in (SECRET, identity.credential.key):
        assert repr(secret)[2:-1] not in shown


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_loopback_needs_nothing(host: str) -> None:
    assert is_loopback(host)
    check_address(host, Identity())


@pytest.mark.parametrize("host", ["a..b", "x" * 64, ".a", "no-such-host.invalid", "a\0b", "\ud800"], ids=repr)
def test_a_name_without_an_address_is_left_to_the_listener(host: str) -> None:
    """It fails with its own error."""
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
    module.keep_upstream_defaults("mooncake_master")
    for host in ("127.0.0.1", "0.0.0.0", "0.0.0.0"):
        check_address(host, Identity())
    assert [one.getMessage() for one in caplog.records] == ["listening_without_credential"]
    assert caplog.records[0].__dict__["fields"]["program"] == "mooncake_master"
