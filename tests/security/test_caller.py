"""What is asked of another server carries what the cluster wants to see."""

from __future__ import annotations

from mooncake.security import HEADER, Identity, SecuritySettings
from mooncake.security.caller import HttpClientAuth
from mooncake.security.keys import format_secret


def test_without_a_credential_it_asks_plainly() -> None:
    caller = HttpClientAuth(Identity())
    assert caller.url("host:1", "/ready") == "http://host:1/ready"
    assert caller.headers("GET", "/ready") == {} and caller.tls is None


def test_with_a_key_it_signs_this_very_request(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "key"
    file.write_text(format_secret(b"k" * 32))
    file.chmod(0o600)
    identity = Identity(SecuritySettings(cluster_key_file=str(file)))
    caller = HttpClientAuth(identity)
    header = caller.headers("POST", "/v1/completions", b"{}")[HEADER]
    verifier = identity.verifier()
    assert verifier is not None
    assert str(verifier.check(header, "POST", "/v1/completions")[0]) == "node"
