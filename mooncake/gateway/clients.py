# SPDX-License-Identifier: Apache-2.0
"""The gateway's clients: the key, tenant and quotas of each.

Owns the file of keys, which may hold only a key's SHA-256, and the quotas: answers in progress, requests and
tokens a minute. A client's tenant and the salt of its cached blocks come from its key, never from its
request. Instants are parameters; reading the file is the only I/O here, and ``gateway.py`` repeats it when
the file has changed. No key is ever shown, logged or used as a label: metrics and logs have the name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from prometheus_client import Counter

from mooncake import metrics
from mooncake.errors import InvalidArgument
from mooncake.http.openai import ApiError
from mooncake.security.http_auth import secret_bytes
from mooncake.security.identity import check_private

MAX_FILE_BYTES = 16 << 20
MIN_KEY_CHARS = 16
_SALT_OF_VLLM = r"[^@/\\\0]{1,128}"
_MINUTE_S = 60.0

_requests = Counter(
    "mooncake_gateway_client_requests",
    "Requests of each client of the keys file, by outcome: admitted or the code of the refusal.",
    ["client", "outcome"],
    registry=metrics.registry,
)
_tokens = Counter(
    "mooncake_gateway_client_tokens",
    "Prompt and output tokens of each client's completed answers.",
    ["client", "kind"],
    registry=metrics.registry,
)


class ClientEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One row of the file: ``key``, or ``sha256``, which is the key's digest in hexadecimal."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    key: Annotated[str, Meta(min_length=MIN_KEY_CHARS, max_length=512)] | None = None
    sha256: Annotated[str, Meta(pattern="^[0-9a-fA-F]{64}$")] | None = None
    tenant: Annotated[str, Meta(max_length=255)] = ""
    "Tenant; empty takes the name."
    salt: Annotated[str, Meta(max_length=1024)] = ""
    "Salt; empty derives one from the tenant: only keys of one tenant share cached blocks."
    max_in_flight: Annotated[int, Meta(ge=0)] = 0
    "Answers in progress at a time; 0 for no limit."
    requests_per_minute: Annotated[float, Meta(ge=0)] = 0.0
    tokens_per_minute: Annotated[float, Meta(ge=0)] = 0.0
    "Prompt and output tokens; an answer that exceeds them is completed, the next one waits."

    @property
    def digest(self) -> str:
        if self.sha256 is not None:
            return self.sha256.lower()
        assert self.key is not None
        return _digest(self.key)

    @property
    def tenant_name(self) -> str:
        return self.tenant or self.name

    @property
    def cache_salt(self) -> str:
        return self.salt or hashlib.sha256(f"mooncake tenant\0{self.tenant_name}".encode()).hexdigest()

    @property
    def salt_at_engines(self) -> str:
        """The salt for other engines; the digest of one that vLLM would refuse."""
        salt = self.cache_salt
        return salt if re.fullmatch(_SALT_OF_VLLM, salt) else _digest(salt)


class _ClientKeysFile(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[ClientEntry]


class Bucket:
    """A token bucket with ``per_minute`` and at most a minute's worth. Charges may overdraw it."""

    def __init__(self, per_minute: float, now: float) -> None:
        self._rate = per_minute / _MINUTE_S
        self._most = self._level = per_minute
        self._at = now

    def wait_s(self, needed: float, now: float) -> float:
        """Seconds until ``needed`` (at most the capacity) is available; 0 when it is."""
        self._fill(now)
        missing = min(needed, self._most) - self._level
        return max(0.0, missing / self._rate)

    def charge(self, amount: float, now: float) -> None:
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self._most, self._level + max(0.0, now - self._at) * self._rate)
        self._at = now


class Client:
    """The holder of a key, with its current use of the quotas."""

    def __init__(self, entry: ClientEntry, now: float) -> None:
        self.entry = entry
        self.num_in_flight = 0
        self._requests = Bucket(entry.requests_per_minute, now) if entry.requests_per_minute else None
        self._tokens = Bucket(entry.tokens_per_minute, now) if entry.tokens_per_minute else None

    def __repr__(self) -> str:
        return f"<Client {self.name}: {self.num_in_flight} answers in progress>"

    @property
    def name(self) -> str:
        return self.entry.name

    def enter(self, num_answers: int, now: float) -> None:
        """Admit a request for ``num_answers`` answers.

        Raises:
            ApiError: 429 naming the quota, with the time to retry; 400 when it never fits.
        """
        try:
            self._check(num_answers, now)
        except ApiError as error:
            _requests.labels(self.name, error.detail.code).inc()
            raise
        if self._requests is not None:
            self._requests.charge(1.0, now)
        self.num_in_flight += num_answers
        _requests.labels(self.name, "admitted").inc()

    def _check(self, num_answers: int, now: float) -> None:
        most = self.entry.max_in_flight
        if most and num_answers > most:
            message = f"the request asks for {num_answers} answers; allowed with this key: at most {most}"
            raise ApiError(400, message, param="n", code="invalid_value")
        if most and self.num_in_flight + num_answers > most:
            message = f"{self.num_in_flight} answers are in progress with this key; allowed: at most {most}"
            raise ApiError(429, message, code="quota_in_flight", retry_after_s=1.0)
        for bucket, needed, what, per_minute in (
            (self._requests, 1.0, "requests", self.entry.requests_per_minute),
            (self._tokens, 1.0, "tokens", self.entry.tokens_per_minute),
        ):
            wait_s = bucket.wait_s(needed, now) if bucket is not None else 0.0
            if wait_s > 0:
                message = f"this key's quota of {per_minute:g} {what} a minute is used up"
                raise ApiError(429, message, code=f"quota_{what}", retry_after_s=wait_s)

    def leave(self, num_answers: int) -> None:
        """Record the end of an admitted request."""
        self.num_in_flight -= num_answers
        assert self.num_in_flight >= 0

    def used(self, prompt_tokens: int, output_tokens: int, now: float) -> None:
        """Charge and count a completed answer's tokens."""
        _tokens.labels(self.name, "prompt").inc(prompt_tokens)
        _tokens.labels(self.name, "output").inc(output_tokens)
        self.charge(prompt_tokens + output_tokens, now)

    def charge(self, num_tokens: int, now: float) -> None:
        """Charge tokens to the quota alone, as those of an answer that ends early: hanging up before an
        answer's end must not make it free."""
        if self._tokens is not None:
            self._tokens.charge(num_tokens, now)


class Clients:
    """The clients in the file, by key."""

    def __init__(self, entries: list[ClientEntry], now: float) -> None:
        self._by_digest: dict[str, Client] = {}
        self.replace(entries, now)

    def __len__(self) -> int:
        return len(self._by_digest)

    def replace(self, entries: list[ClientEntry], now: float) -> None:
        """Replace the clients. One that is in both lists with the same quotas keeps its current use."""
        before = {client.name: client for client in self._by_digest.values()}
        self._by_digest = {}
        for entry in entries:
            known = before.get(entry.name)
            if known is not None and _quotas(known.entry) == _quotas(entry):
                known.entry = entry
                self._by_digest[entry.digest] = known
            else:  # answers in progress end at the object that they began with
                self._by_digest[entry.digest] = Client(entry, now)

    def of(self, headers: Mapping[str, str], may_be_x_api_key: bool = False) -> Client:
        """The client whose key is in the headers.

        ``may_be_x_api_key``: without ``Authorization``, read X-API-Key, as Anthropic's API does.

        Raises:
            ApiError: 401, in the form of the public API.
        """
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if may_be_x_api_key and not given:
            scheme, given = "bearer", headers.get("x-api-key", "")
        given = given.strip()
        # The lookup's duration reveals nothing without the ability to choose a key's digest.
        found = self._by_digest.get(_digest(given)) if scheme.lower() == "bearer" and given else None
        if found is not None:
            return found
        message = (
            "the API key is wrong" if given else "there is no API key: send Authorization: Bearer and the key"
        )
        _requests.labels("unknown", "invalid_api_key").inc()
        raise ApiError(401, message, code="invalid_api_key")


def read_clients(path: str | Path) -> list[ClientEntry]:
    """The rows of a file of keys: TOML, JSON or YAML by its name's ending.

    Raises:
        InvalidArgument: it can't be read or used, or users other than its owner may read it.
    """

    def wrong(reason: str) -> InvalidArgument:
        return InvalidArgument(
            "api_keys_file", str(path), f"a file of keys as described in docs/gateway.md ({reason})"
        )

    try:
        with Path(path).expanduser().open("rb") as file:
            found = check_private(file, wrong)
            if found.st_uid not in (os.geteuid(), 0):
                raise wrong("it belongs to another user")
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise wrong(error.strerror or str(error)) from error
    if len(text) > MAX_FILE_BYTES:
        raise wrong("it is too large")
    try:
        entries = msgspec.convert(_decoded(Path(path).suffix, text.decode()), _ClientKeysFile).keys
    except (ValueError, msgspec.ValidationError) as error:
        # A decoder's message may quote the line, and so a key.
        shown = str(error) if isinstance(error, msgspec.ValidationError) else type(error).__name__
        raise wrong(re.sub(r"'[^']*'|\"[^\"]*\"", "…", shown)) from None
    names, digests = [one.name for one in entries], []
    for one in entries:
        if (one.key is None) == (one.sha256 is None):
            raise wrong(f"{one.name} needs either key or sha256")
        digests.append(one.digest)
    if not entries:
        raise wrong("it has no keys")
    for what, values in (("name", names), ("key", digests)):
        if len({*values}) < len(values):
            raise wrong(f"two rows have the same {what}")
    return entries


def _decoded(suffix: str, text: str) -> Any:
    if suffix == ".json":
        return json.loads(text)
    if suffix in (".yaml", ".yml"):
        import yaml  # late: an extra

        try:
            return yaml.safe_load(text)
        except yaml.YAMLError:
            raise ValueError("no YAML") from None
    return tomllib.loads(text)


def _digest(key: str) -> str:
    return hashlib.sha256(secret_bytes(key)).hexdigest()


def _quotas(entry: ClientEntry) -> tuple[float, ...]:
    return entry.max_in_flight, entry.requests_per_minute, entry.tokens_per_minute
