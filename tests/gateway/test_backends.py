# SPDX-License-Identifier: Apache-2.0
"""The models that engines serve, as they are queried again; other facts are in ``test_any_engine.py``."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from mooncake.conductor.messages import InstanceStatus
from mooncake.gateway import backends as module
from mooncake.gateway.any_engine import settle_model
from mooncake.gateway.backends import Backends
from mooncake.gateway.worker_client import WorkerFailed
from mooncake.http.openai import ApiError, ModelCard
from mooncake.types import WorkerRole


class Engines:
    """Two engines, and a gateway in front of them whose clock a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served: dict[str, str] = {"e:1": "m-v1", "e:2": "m-v1"}
        """The model's name by engine; empty where the engine does not answer."""
        self.num_queries = 0
        self.owned_by = "vllm"
        self.now = 100.0
        self.backends = Backends(self, "", {})  # type: ignore[arg-type]
        self._gateway: Any = SimpleNamespace(
            settings=SimpleNamespace(model_name="alias", model="x/alias"),
            backends=self.backends,
            scheduling=self,
        )
        monkeypatch.setattr(module, "clock", SimpleNamespace(monotonic=lambda: self.now))

    async def status(self) -> list[InstanceStatus]:
        return [InstanceStatus(one, WorkerRole.DECODE, "ready", "", 0, 0, 0, 0) for one in self.served]

    async def models(self, instance: str, headers: Any = None) -> list[ModelCard]:
        self.num_queries += 1
        if not self.served[instance]:
            raise WorkerFailed(instance, "no answer")
        name = self.served[instance]
        return [ModelCard(id=name, created=0, root=name, owned_by=self.owned_by)]

    async def name_for(self, wanted: str = "alias") -> str:
        """The model's name that engines get for a request."""
        request: dict[str, Any] = {"model": wanted}
        await settle_model(self._gateway, request)
        return str(request["model"])


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Engines:
    return Engines(monkeypatch)


async def test_an_alias_follows_the_engines_name(engines: Engines) -> None:
    assert await engines.name_for() == "m-v1"
    engines.served |= {"e:1": "m-v2", "e:2": "m-v2"}
    assert await engines.name_for() == "m-v1" and engines.num_queries == 1, "at a limited rate"
    engines.now += 11.0
    assert await engines.name_for() == "m-v2" and engines.num_queries == 2
    engines.now += 11.0
    assert await engines.name_for("m-v2") == "m-v2" and engines.num_queries == 2, "a known name asks for none"


async def test_an_adapter_of_sglang_is_named_behind_its_model(engines: Engines) -> None:
    for owner in ("vllm", "sglang"):
        engines.owned_by, engines.now = owner, engines.now + 11.0
        for wanted in ("m-v1:sql", "alias:sql", "m-v2:sql", "m-v1:"):
            is_known = owner == "sglang" and wanted in ("m-v1:sql", "alias:sql")
            with contextlib.nullcontext() if is_known else pytest.raises(ApiError):
                assert await engines.name_for(wanted) == "m-v1:sql"
    request: dict[str, Any] = {"model": "alias:sql"}
    assert await settle_model(engines._gateway, request) == "sql", "blocks of an adapter are its own"


async def test_the_known_name_stays_while_no_engine_answers(engines: Engines) -> None:
    assert await engines.name_for() == "m-v1"
    engines.served |= {"e:1": "", "e:2": "m-v2"}
    engines.now += 11.0
    assert await engines.name_for() == "m-v2", "the next engine is asked"
    engines.served |= {"e:1": "", "e:2": ""}
    engines.now += 11.0
    assert await engines.name_for() == "m-v2"


async def test_an_instance_that_joins_has_the_models_queried(engines: Engines) -> None:
    assert await engines.name_for() == "m-v1"
    engines.served |= {"e:1": "m-v2"}
    engines.backends.joined("e:1")
    assert await engines.name_for() == "m-v2"
