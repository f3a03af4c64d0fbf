# SPDX-License-Identifier: Apache-2.0
"""TLS contexts of Python's ``ssl``, from the files that settings name.

They use TLS 1.3 only and are mutual: a peer without a certificate of the authority is refused.
Certificates are made elsewhere (``mooncake certs``, or other tools); this module reads them and names a
setting that is wrong.
"""

from __future__ import annotations

import datetime
import hashlib
import ssl
from pathlib import Path
from typing import Protocol

from mooncake.errors import InvalidArgument


class TlsFiles(Protocol):
    """Settings that name PEM files."""

    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_ca(self) -> str: ...


CERTIFICATE = "-----BEGIN CERTIFICATE-----"
_END = "-----END CERTIFICATE-----"
_VERSION, _UTC_TIME = 0xA0, 0x17  # tags in DER


def server_context(settings: TlsFiles) -> ssl.SSLContext:
    """Make the context of a server.

    Raises:
        InvalidArgument: names the setting whose file is missing or wrong.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = 0
    return _filled(settings, context)


def client_context(settings: TlsFiles, *, check_host: bool) -> ssl.SSLContext:
    """Make the context of a client; raises as ``server_context``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = check_host
    return _filled(settings, context)


def _filled(settings: TlsFiles, context: ssl.SSLContext) -> ssl.SSLContext:
    check_files(settings)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    field = "tls_cert"
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=lambda: "")
        field = "tls_ca"
        context.load_verify_locations(settings.tls_ca)
    except (OSError, ValueError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            field = "tls_key"
        raise wrong_file(settings, field, str(error)) from error
    return context


def certificate_digest(settings: TlsFiles) -> bytes:
    """SHA-256 of the certificate that its owner presents: the first in its file."""
    first = _certificates(settings.tls_cert)[0]
    try:
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest()
    except ValueError as error:
        raise wrong_file(settings, "tls_cert", str(error)) from error


def certificate_ends(file: str) -> list[float]:
    """Times since the epoch, in seconds, at which the certificates in a PEM file end, in its order.

    The file is one that OpenSSL has loaded.
    """
    return [_end_of(ssl.PEM_cert_to_DER_cert(one)) for one in _certificates(file)]


def _end_of(certificate: bytes) -> float:
    # The library that reads certificates is an extra, and Python's `ssl` shows those of peers only.
    ((_, signed), *_) = _der_elements(certificate)
    ((_, content), *_) = _der_elements(signed)
    fields = [(tag, value) for tag, value in _der_elements(content) if tag != _VERSION]
    _, (tag, text) = _der_elements(fields[3][1])  # behind the serial number, the algorithm and the issuer
    digits = text.decode("ascii")
    if tag == _UTC_TIME:
        digits = ("19" if digits >= "50" else "20") + digits
    ends = datetime.datetime.strptime(digits, "%Y%m%d%H%M%SZ")
    return ends.replace(tzinfo=datetime.UTC).timestamp()


def _certificates(file: str) -> list[str]:
    """The certificates in a PEM file, which may have keys and text between them."""
    text = Path(file).read_text(encoding="ascii", errors="replace")
    return [CERTIFICATE + part.partition(_END)[0] + _END for part in text.split(CERTIFICATE)[1:]]


def _der_elements(content: bytes) -> list[tuple[int, bytes]]:
    """Tag and value of each element of DER in ``content``."""
    found, at = [], 0
    while at < len(content):
        tag, size, start = content[at], content[at + 1], at + 2
        if size & 0x80:
            start += size & 0x7F
            size = int.from_bytes(content[at + 2 : start], "big")
        at = start + size
        found.append((tag, content[start:at]))
    return found


def check_files(settings: TlsFiles) -> None:
    """Check that the files exist and have the expected content, with clearer errors than OpenSSL's."""
    for field, mark in {
        "tls_cert": CERTIFICATE,
        "tls_key": "PRIVATE KEY-----",
        "tls_ca": CERTIFICATE,
    }.items():
        try:
            content = Path(getattr(settings, field)).read_text(encoding="ascii", errors="replace")
        except OSError as error:
            raise wrong_file(settings, field, error.strerror or str(error)) from error
        if mark not in content:
            raise wrong_file(settings, field, f"it has no line with {mark.strip('-')}")
        if "ENCRYPTED" in content and field == "tls_key":
            raise wrong_file(settings, field, "it has a password; `openssl pkey` takes it off")


def wrong_file(settings: TlsFiles, field: str, reason: str) -> InvalidArgument:
    """Make the error that names ``field`` and what it needs."""
    needs = {
        "tls": "only where OpenSSL 3 is installed",
        "tls_cert": "a PEM certificate",
        "tls_key": "the PEM private key of tls_cert",
        "tls_ca": "PEM certificates of the authority",
    }
    return InvalidArgument(field, getattr(settings, field), f"{needs[field]} ({reason})")
