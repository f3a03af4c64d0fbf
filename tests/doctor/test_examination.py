# SPDX-License-Identifier: Apache-2.0
"""Which servers an examination reads, and with which scheme."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mooncake.cli.certs import CertsSettings, make
from mooncake.doctor import examination
from mooncake.doctor.examination import Examination
from mooncake.doctor.facts import Facts, Trouble
from mooncake.doctor.settings import DoctorSettings
from mooncake.rpc.client import split_address
from mooncake.security import Identity, SecuritySettings
from tests.contract.metadata_servers import has_ipv6
from tests.doctor.test_engine_probe import a_server, models
from tests.doctor.test_gateway_probe import DETAILS, ROW, STATUS

PAGES: dict[str, Any] = {"/v1/models": models("vllm", "m")}


async def examined(canaries: bool = False, **settings: Any) -> Facts:
    return await Examination(DoctorSettings(canaries=canaries, timeout_s=5.0, **settings)).run()


@pytest.fixture
def cluster_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cluster's certificate in the environment of the doctor."""
    make(CertsSettings(folder=tmp_path))
    cert, key, authority = (str(tmp_path / name) for name in ("node.pem", "node.key", "ca.pem"))
    identity = Identity(SecuritySettings(tls_cert=cert, tls_key=key, tls_ca=authority))
    monkeypatch.setattr(examination, "tool_identity", lambda: identity)


@pytest.mark.usefixtures("cluster_tls")
async def test_a_plain_engine_may_be_named_where_the_cluster_has_tls() -> None:
    async with a_server(PAGES) as server:
        facts = await examined(engine=(server.address,))
        assert facts.engines[0].reach.is_fine and facts.engines[0].models == ("m",)
        facts = await examined(engine=(server.url.replace("http:", "https:"),))
        assert facts.engines[0].reach.trouble is Trouble.TLS, "the operator wrote https"
        facts = await examined(engine=(server.url,))
        assert facts.engines[0].reach.is_fine


@pytest.mark.usefixtures("cluster_tls")
async def test_a_plain_engine_that_starts_later_is_read_by_the_next_examination() -> None:
    async with a_server(PAGES) as server:
        address = server.address
    one = Examination(DoctorSettings(canaries=False, engine=(address,)))
    assert (await one.run()).engines[0].reach.trouble is Trouble.REFUSED
    async with a_server(PAGES, port=split_address(address)[1]):
        assert (await one.run()).engines[0].reach.is_fine


async def test_instances_that_never_answered_are_not_read() -> None:
    async with a_server(PAGES) as engine, a_server(PAGES) as spare:
        rows = [
            {**ROW, "instance": engine.address, "has_answered": True},
            {**ROW, "instance": spare.address, "has_answered": False, "health": "starting"},
        ]
        status = {**STATUS, **DETAILS, "instances": rows}
        async with a_server({**PAGES, "/status": status}) as gateway:
            facts = await examined(url=gateway.url)
            assert [one.address for one in facts.engines] == [engine.address]
            facts = await examined(url=gateway.url, engine=(spare.address,))
            assert [(one.address, one.role) for one in facts.engines] == [
                (engine.address, "decode"),
                (spare.address, "decode"),
            ], "it was named"


async def test_engines_with_addresses_of_ipv6() -> None:
    if not has_ipv6():
        pytest.skip("this machine has no IPv6")
    async with a_server(PAGES, host="::1") as named, a_server(PAGES, host="::1") as listed:
        assert named.address.startswith("[::1]:")
        status = {
            **STATUS,
            **DETAILS,
            "instances": [{**ROW, "instance": listed.address, "has_answered": True}],
        }
        async with a_server({**PAGES, "/status": status}, host="::1") as gateway:
            facts = await examined(True, url=gateway.url, engine=(named.address,))
    assert [one.address for one in facts.engines] == [named.address, listed.address]
    assert all(one.reach.is_fine and one.first is not None and one.max_files for one in facts.engines)
    assert not facts.not_examined


async def test_addresses_of_instances_that_no_engine_can_have() -> None:
    """Whatever the gateway lists, the examination goes on."""
    strange = ["", "a", "a:99999", "[::1:80", "a b:1"]
    async with a_server(PAGES) as engine:
        # One is listed by its URL, which has another address than its text.
        names = [*strange, engine.url, engine.address.replace("127.0.0.1", "LocalHost")]
        status = {
            **STATUS,
            **DETAILS,
            "instances": [{**ROW, "instance": one, "has_answered": True} for one in names],
        }
        async with a_server({**PAGES, "/status": status}) as gateway:
            facts = await examined(True, url=gateway.url)
    assert [where for where, _ in facts.not_examined] == strange
    assert len(facts.engines) == 2 and all(one.reach.is_fine for one in facts.engines)
