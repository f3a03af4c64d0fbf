# SPDX-License-Identifier: Apache-2.0
"""Weights of a running worker, replaced between two steps: prepared beside the old ones, then made active at
once.

An answer is computed by one version. With ``abort`` (what training loops expect) the requests that were begun
end with an error that says to send them again (409, ``weights_replaced``: a gateway must not continue such an
answer on another worker); with ``wait`` they end first, and later ones wait for them. The continuation of an
answer that another worker began names the weights of its beginning, and is refused with the same error where
others are active; so are the prompts and choices of an answer that have not begun when its others were
computed by the old version. In the same instant the worker's own index of prefixes is emptied and its blocks
in the store get the name of the new weights, so that no KV of the old version is reachable. The old weights
stay in memory, so a rollback is as quick. Two versions fit at a time: preparing a third drops the one that is
not active.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from msgspec import Meta, Struct

from mooncake import clock
from mooncake.connectors.store_link import StoreLink
from mooncake.errors import DeadlineExceeded, InvalidArgument, ModelError, Refusal
from mooncake.http import large_json
from mooncake.http.api_requests import read_body
from mooncake.http.openai import WEIGHTS_REPLACED, ApiError
from mooncake.inference.engine import Engine
from mooncake.inference.model import Decoder
from mooncake.inference.push_link import PushLink
from mooncake.inference.runner import TorchRunner
from mooncake.kvlayout import KvIdentity
from mooncake.log import get_logger
from mooncake.security.http_auth import PRINCIPAL, AdminKey

log = get_logger(__name__)

REPLACED = Refusal(
    WEIGHTS_REPLACED, "the weights were replaced while it was computed; send the request again"
)

MAX_BODY_BYTES = 64 << 10

FlipMode = Literal["abort", "wait"]
ShapeT = TypeVar("ShapeT", bound=Struct)


@dataclasses.dataclass(frozen=True)
class LoadedWeights:
    """Weights in memory. ``identity``: of their KV blocks in a store; None without one."""

    folder: str
    digest: str
    model: Decoder
    identity: KvIdentity | None


class FlipResult(Struct, frozen=True):
    """What a flip did: seconds until the requests before it had ended, seconds of the change itself."""

    digest: str
    waited_s: float
    changed_s: float


class WeightsFlip:
    """One change from a version to another, which the engine applies (``engine.QuietChange``)."""

    def __init__(
        self, ends_requests: Refusal | None, apply: Callable[[], None], notify: Callable[[], None]
    ) -> None:
        """``notify``: called on the engine's thread when it has ended."""
        self.ends_requests = ends_requests
        self._apply = apply
        self._notify = notify
        self.error: Exception | None = None
        self.changed_s = 0.0
        self.began_at = 0.0

    def apply(self) -> None:
        self.began_at = clock.monotonic()
        self._apply()
        self.changed_s = clock.monotonic() - self.began_at

    def ended(self, error: Exception | None) -> None:
        self.error = error
        self._notify()


class WeightVersions:
    """Versions of one worker's weights. Used on one event loop.

    Args:
        engine, runner, link: of the worker; ``link`` None without a store.
        active: what they compute with.
        load: reads a folder; called in a thread. Raises ModelError.
        on_active: called on the loop with the version that has become active.
    """

    def __init__(
        self,
        engine: Engine,
        runner: TorchRunner,
        link: StoreLink | PushLink | None,
        active: LoadedWeights,
        load: Callable[[Path], LoadedWeights],
        on_active: Callable[[LoadedWeights], None] = lambda weights: None,
    ) -> None:
        self._engine = engine
        self._runner = runner
        self._link = link
        self._load = load
        self._on_active = on_active
        self.active = active
        self.prepared: LoadedWeights | None = None
        self.previous: LoadedWeights | None = None
        self._one_at_a_time = asyncio.Lock()

    def state(self) -> WeightState:
        """Digests of the versions in memory."""
        prepared, previous = (one.digest if one is not None else "" for one in (self.prepared, self.previous))
        return WeightState(self.active.digest, prepared, previous)

    async def prepare(self, folder: Path) -> LoadedWeights:
        """Load the weights in ``folder`` beside the active ones; requests go on.

        Raises:
            ModelError: the folder is not usable, or its model has another shape.
        """
        async with self._one_at_a_time:
            self.prepared = self.previous = None
            found = await asyncio.to_thread(self._load, folder)
            shapes = [dataclasses.replace(one.model.config, eos_token_ids=()) for one in (found, self.active)]
            if shapes[0] != shapes[1]:
                raise ModelError(f"{folder} has a model of another shape; start a worker with it instead")
            self.prepared = found
            log.info("weights_prepared", folder=str(folder), digest=found.digest)
            return found

    async def flip(self, mode: FlipMode = "abort", timeout_s: float = 60.0) -> FlipResult:
        """Make the prepared version active; the active one becomes the previous one.

        Raises:
            InvalidArgument: nothing is prepared.
            DeadlineExceeded: requests did not end in time; nothing has changed.
            ModelError: the change failed; the old weights stay active.
        """
        # Looked up when it is this flip's turn: a flip or a prepare before it changes what is prepared.
        async with self._one_at_a_time:
            if self.prepared is None:
                raise InvalidArgument("weights", "none", "weights that were prepared first")
            return await self._activate(self.prepared, mode, timeout_s)

    async def rollback(self, mode: FlipMode = "abort", timeout_s: float = 60.0) -> FlipResult:
        """Make the previous version active again; the active one is then the prepared one.

        Raises:
            InvalidArgument: there is none any longer.
            DeadlineExceeded, ModelError: as for ``flip``.
        """
        async with self._one_at_a_time:
            if self.previous is None:
                raise InvalidArgument("weights", "none", "a version that was active before")
            return await self._activate(self.previous, mode, timeout_s)

    async def _activate(self, weights: LoadedWeights, mode: FlipMode, timeout_s: float) -> FlipResult:
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def apply() -> None:
            try:
                self._compute_with(weights)
            except Exception:
                # Both or none: KV of one version under the name of another would be a wrong answer.
                self._compute_with(self.active)
                raise

        def notify() -> None:
            loop.call_soon_threadsafe(done.set)

        reason = REPLACED if mode == "abort" else None
        flip = WeightsFlip(reason, apply, notify)
        began = clock.monotonic()
        self._engine.change_when_quiet(flip)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await done.wait()
        finally:
            is_withdrawn = not done.is_set() and self._engine.withdraw_change()
        if is_withdrawn:
            raise DeadlineExceeded(
                f"requests did not end within {timeout_s:g} s; the old weights stay active: try again, "
                "or with mode abort"
            )
        await done.wait()  # it was applied in the last moment
        if flip.error is not None:
            what = f"{type(flip.error).__name__}: {flip.error}"
            message = f"the weights could not be replaced ({what}); the old ones stay active"
            raise ModelError(message) from flip.error
        is_rollback = weights is self.previous
        old, self.active = self.active, weights
        self.prepared, self.previous = (old, None) if is_rollback else (None, old)
        self._on_active(weights)
        result = FlipResult(weights.digest, flip.began_at - began, flip.changed_s)
        log.info(
            "weights_replaced",
            digest=weights.digest,
            mode=mode,
            waited_s=result.waited_s,
            changed_s=result.changed_s,
        )
        return result

    def _compute_with(self, weights: LoadedWeights) -> None:
        self._runner.replace_model(weights.model)
        self._engine.weights = weights.digest
        if self._link is not None:
            assert weights.identity is not None
            self._link.replace_identity(weights.identity)


class PrepareRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Folder on the worker's host with weights of the same shape."""

    path: str


class FlipRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to requests that were begun, and how long the flip may wait for them."""

    mode: FlipMode = "abort"
    timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 60.0


class WeightState(Struct, frozen=True):
    """Digests of the versions in memory; empty for none."""

    active: str
    prepared: str
    previous: str


def add_weight_routes(app: FastAPI, versions: WeightVersions, key: AdminKey) -> None:
    """Add the endpoints of operators to a worker's application; each requires the admin key."""

    async def asked(http: Request, shape: type[ShapeT]) -> ShapeT:
        refused = key.refusal(http.headers, http.scope.get(PRINCIPAL))
        if refused is not None:
            raise ApiError(refused.status, refused.message, code=refused.code)
        body = await read_body(http, MAX_BODY_BYTES)
        try:
            return large_json.decode_as(body or b"{}", shape)
        except msgspec.MsgspecError as error:
            raise InvalidArgument("body", body[:80], f"fields of {shape.__name__} ({error})") from error

    def answer(value: Struct) -> Response:
        return Response(msgspec.json.encode(value), media_type="application/json")

    async def in_time(flip: Awaitable[FlipResult]) -> FlipResult:
        try:
            return await flip
        except DeadlineExceeded as error:
            raise ApiError(504, str(error), code=error.code) from error
        except ModelError as error:
            raise ApiError(500, str(error), code=error.code) from error

    @app.get("/weights")
    async def weights() -> Response:
        """Digests of the weights that are active, prepared, and previous (for a rollback)."""
        return answer(versions.state())

    @app.post("/weights/prepare")
    async def prepare(http: Request) -> Response:
        """Load weights of the same shape beside the active ones, from a folder of this host; admin key."""
        request = await asked(http, PrepareRequest)
        try:
            await versions.prepare(Path(request.path))
        except ModelError as error:
            raise InvalidArgument("path", request.path, f"a folder with usable weights ({error})") from error
        return answer(versions.state())

    @app.post("/weights/flip")
    async def flip(http: Request) -> Response:
        """Make the prepared weights active between two steps, with `mode` `abort` or `wait`; admin key."""
        request = await asked(http, FlipRequest)
        return answer(await in_time(versions.flip(request.mode, request.timeout_s)))

    @app.post("/weights/rollback")
    async def rollback(http: Request) -> Response:
        """Make the previous weights active again, as a flip does; admin key."""
        request = await asked(http, FlipRequest)
        return answer(await in_time(versions.rollback(request.mode, request.timeout_s)))
