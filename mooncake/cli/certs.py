# SPDX-License-Identifier: Apache-2.0
"""``mooncake certs``: create the credentials of a cluster: an authority and its certificates, or cluster
keys.

For users without an authority; nothing else depends on this module, and certificates from elsewhere
serve as well. The authority's key is all that it takes to join the cluster: it stays where this
command ran. Written with the library `cryptography`, because the program `openssl` is not everywhere.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Meta

from mooncake.cli.output import write_new
from mooncake.cli.role_command import Invocation
from mooncake.errors import InvalidArgument, cause_of
from mooncake.security import Role
from mooncake.security.identity import read_key_file
from mooncake.security.keys import SECRET_BYTES, derive, format_credential, format_secret
from mooncake.security.principal import certificate_name, tenant_error

AUTHORITY_DAYS = 3650
MAX_NAME_BYTES = 200
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_HOST = re.compile(rf"(?![\d.]+$)(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")  # only digits and dots: a wrong address
_Write: TypeAlias = Callable[..., None]
_SKEW = datetime.timedelta(hours=1)  # clocks of a cluster are not all right


@dataclass(frozen=True)
class CertsSettings:
    """Create a cluster's credentials: certificates, or a cluster key."""

    folder: Path = Path("certs")
    "Folder of the files; an existing authority (`ca.pem`, `ca.key`) is used, else one is created."

    name: str = "node"
    "Name of the files to create: `<name>.pem` and `<name>.key`. Existing files are never overwritten."

    host: tuple[str, ...] = ("localhost", "127.0.0.1", "::1")
    "Host names and addresses that the certificate is for."

    days: Annotated[int, Meta(ge=1, le=3650)] = 365
    "Days for which the certificate is valid."

    role: Literal["node", "client", "admin"] = "node"
    "Role in the cluster of the owner of the certificate or derived key."

    tenant: str = ""
    "The only tenant whose objects a client may name; empty: all tenants."

    cluster_key: Path | None = None
    "Create a cluster key in this file instead of a certificate."

    derive_from: Path | None = None
    "Derive the key of `role` and `tenant` from the cluster key in this file, instead of a certificate."

    out: Path | None = None
    "File for the derived key; without it, `<role>[-<tenant>].key` beside the cluster key."

    def __post_init__(self) -> None:
        trouble = tenant_error(Role(self.role), self.tenant)
        if trouble:
            raise InvalidArgument("tenant", self.tenant, trouble)
        if self.cluster_key is not None and self.derive_from is not None:
            raise InvalidArgument("derive_from", str(self.derive_from), "nothing beside cluster_key")


def certs(given: Invocation) -> None:
    """The entry point of ``mooncake certs``."""
    settings: CertsSettings = given.settings
    if settings.cluster_key is not None:
        make_cluster_key(settings.cluster_key)
        print(f"made {settings.cluster_key}: its holder can join in every role")
        print(f"cluster_key_file = {settings.cluster_key}")
        return
    if settings.derive_from is not None:
        path = derive_key(settings)
        whose = f"{settings.role} of tenant {settings.tenant}" if settings.tenant else settings.role
        print(f"made {path}: the key of a {whose}\ncluster_key_file = {path}")
        return
    made = make(settings)
    print(f"made {', '.join(str(path) for path in made)}")
    folder = settings.folder
    print(f"tls_cert = {folder / settings.name}.pem\ntls_key = {folder / settings.name}.key")
    print(f"tls_ca = {folder / 'ca.pem'}\nkeep {folder / 'ca.key'} here: its holder can join")


def make_cluster_key(path: Path) -> None:
    """Write a fresh secret to a new file.

    Raises:
        InvalidArgument: the file exists, or can't be written.
    """
    _write_secret("cluster_key", path, format_secret(secrets.token_bytes(SECRET_BYTES)))


def derive_key(settings: CertsSettings) -> Path:
    """Derive the key of the settings' role and tenant into a file; raises as ``make_cluster_key``."""
    assert settings.derive_from is not None
    ring = read_key_file(str(settings.derive_from))
    if not ring.secrets:
        raise InvalidArgument("derive_from", str(settings.derive_from), "a file with the cluster's own key")
    role = Role(settings.role)
    name = f"{role}-{quote(settings.tenant, safe='')}.key" if settings.tenant else f"{role}.key"
    path = settings.out or settings.derive_from.with_name(name)
    lines = [format_credential(derive(secret, role, settings.tenant)) for secret in ring.secrets]
    _write_secret("out", path, "".join(lines))
    return path


def _write_secret(field: str, path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_new(path, text.encode(), 0o600)
    except FileExistsError:
        raise InvalidArgument(field, str(path), "a file that does not exist yet") from None
    except OSError as error:
        raise InvalidArgument(field, str(path), f"a file that can be written ({error.strerror})") from error


def make(settings: CertsSettings) -> list[Path]:
    """Create certificates; return the files written. Where one can't be written, none of them is left.

    Raises:
        InvalidArgument: the folder cannot be written, the certificate exists, or half an authority does; the
            name is not that of a file, or a host is not a host's name or address, or missing.
    """
    folder = settings.folder
    _check_names(settings.name, settings.host)
    if settings.role == "node" and not settings.host:
        raise InvalidArgument("host", "", "names or addresses of the host: a node is a server")
    certificate, key_file = folder / f"{settings.name}.pem", folder / f"{settings.name}.key"
    made: list[Path] = []
    with ExitStack() as undo:

        def write(path: Path, content: bytes, mode: int = 0o666) -> None:
            write_new(path, content, mode)
            undo.callback(path.unlink, missing_ok=True)
            made.append(path)

        try:
            folder.mkdir(parents=True, exist_ok=True)
            if settings.name == "ca" or certificate.exists() or key_file.exists():
                raise InvalidArgument("name", settings.name, f"one that has no files in {folder} yet")
            authority, authority_key = _authority(folder, write)
            key = ec.generate_private_key(ec.SECP256R1())
            issued = _issued(settings, key, authority, authority_key)
            write(certificate, issued.public_bytes(serialization.Encoding.PEM))
            write(key_file, _pem(key), 0o600)
        except OSError as error:
            raise InvalidArgument(
                "folder", str(folder), f"a folder to write to ({cause_of(error)})"
            ) from error
        undo.pop_all()
    return made


def is_for(certificate: x509.Certificate, host: str) -> bool:
    """Whether a certificate is for a host's name or address. Raises ValueError."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    address, name = _address(host), host.lower()
    if address is not None:
        return address in found.get_values_for_type(x509.IPAddress)
    names = [one.lower() for one in found.get_values_for_type(x509.DNSName)]
    return name in names or f"*.{name.partition('.')[2]}" in names


def _issued(
    settings: CertsSettings,
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
) -> x509.Certificate:
    """The certificate of ``key``."""
    return (
        _builder(_name(settings.host[0] if settings.host else settings.name), key, settings.days)
        .issuer_name(authority.subject)
        .add_extension(
            x509.SubjectAlternativeName(
                [
                    *(_alternative(host) for host in settings.host),
                    x509.UniformResourceIdentifier(certificate_name(Role(settings.role), settings.tenant)),
                ]
            ),
            False,
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False
        )
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), False)
        .sign(authority_key, hashes.SHA256())
    )


def _check_names(name: str, hosts: Sequence[str]) -> None:
    if not name or "/" in name or not name.isprintable() or len(name.encode()) > MAX_NAME_BYTES:
        allowed = f"the name of a file, without a folder and of at most {MAX_NAME_BYTES} bytes"
        raise InvalidArgument("name", name, allowed)
    for host in hosts:
        is_name = _HOST.fullmatch(host) is not None and len(host) <= 253
        if not is_name and _address(host) is None:
            allowed = "host names (in ASCII: xn--... for others; *.example for all of a domain) and addresses"
            raise InvalidArgument("host", host, allowed)


def _authority(folder: Path, write: _Write) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Load the authority of the folder and its key, or create them with ``write``."""
    certificate, key_file = folder / "ca.pem", folder / "ca.key"
    if certificate.exists() != key_file.exists():
        there, missing = (certificate, key_file) if certificate.exists() else (key_file, certificate)
        raise InvalidArgument(
            "folder", str(folder), f"both or none of ca.pem and ca.key: {there} needs {missing}"
        )
    if certificate.exists():
        try:
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            authority = x509.load_pem_x509_certificate(certificate.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise InvalidArgument("folder", str(folder), f"a readable ca.pem and ca.key ({error})") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != authority.public_key():
            raise InvalidArgument("folder", str(folder), "an authority that this command made")
        return authority, key
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Mooncake cluster authority")
    authority = (
        _builder(name, key, AUTHORITY_DAYS)
        .issuer_name(name)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
        .add_extension(_signs_only(), True)
        .sign(key, hashes.SHA256())
    )
    write(certificate, authority.public_bytes(serialization.Encoding.PEM))
    write(key_file, _pem(key), 0o600)
    return authority, key


def _builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _alternative(host: str) -> x509.GeneralName:
    address = _address(host)
    return x509.DNSName(host) if address is None else x509.IPAddress(address)


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _signs_only() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
