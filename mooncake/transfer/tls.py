# SPDX-License-Identifier: Apache-2.0
"""TLS of a transfer engine: which files it uses, and the native context for its tcp data.

Everything else about certificates is in ``mooncake.security``. An engine uses the files of its own settings
if these name any, else those of its process, in both cases for all its connections.
"""

from __future__ import annotations

import dataclasses

from mooncake import _native
from mooncake.security import Identity
from mooncake.security.tls_contexts import check_files, wrong_file
from mooncake.transfer.settings import TransferSettings


def agree_on_tls(settings: TransferSettings, identity: Identity) -> tuple[TransferSettings, Identity]:
    """Return settings and identity of one engine with the same TLS files.

    Raises:
        InvalidArgument: names the setting whose file is missing or wrong.
    """
    if settings.tls:
        return settings, identity.with_tls_files(
            settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_check_host
        )
    if not identity.has_tls:
        return settings, identity
    files = identity.settings
    return (
        dataclasses.replace(
            settings,
            tls="all",
            tls_cert=files.tls_cert,
            tls_key=files.tls_key,
            tls_ca=files.tls_ca,
            tls_check_host=files.tls_check_host,
        ),
        identity,
    )


def native_tls(settings: TransferSettings) -> _native.TlsContext:
    """Make the TLS context for tcp data.

    Raises:
        InvalidArgument: names the setting whose file is missing or wrong, or reports that OpenSSL is.
    """
    check_files(settings)
    try:
        return _native.TlsContext(
            settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_check_host
        )
    except ValueError as error:
        field, reason = error.args
        raise wrong_file(settings, field, reason) from error
