# SPDX-License-Identifier: Apache-2.0
"""The peer that is commanded: folders below its root only, versions and loads that survive a restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mooncake.errors import AccessDenied, InvalidArgument, StorageError
from mooncake.p2p import P2pSettings
from mooncake.p2p import messages as m
from mooncake.p2p.daemon import STATE, P2pDaemon, SavedVersion
from mooncake.rpc import AsyncClient
from mooncake.security import NODES, Identity, Role, SecuritySettings
from mooncake.security.keys import format_secret
from tests.p2p.peers import contents, elements_of, running, write_model
from tests.waiting import until


@contextlib.asynccontextmanager
async def serving(
    root: Path, *peers: str, identity: Identity | None = None, **settings: Any
) -> AsyncIterator[P2pDaemon]:
    os.makedirs(root, exist_ok=True)
    daemon = P2pDaemon(P2pSettings(port=0, root=str(root), peers=peers, **settings), identity)
    await daemon.start()
    try:
        yield daemon
    finally:
        await daemon.close()


async def ask(daemon: P2pDaemon, message: Any, identity: Identity | None = None) -> Any:
    client = AsyncClient(daemon.store.address, m.REPLIES, is_patient=False, identity=identity, servers=NODES)
    try:
        return await client.call(message, 60.0)
    finally:
        await client.close()


def commands(folder: str) -> list[Any]:
    """Those that name a folder."""
    return [m.CommandRegister("m", folder, 0, ""), m.CommandGet("m", folder, "", 0), m.AskProgress(folder)]


async def loaded(daemon: P2pDaemon, folder: str) -> m.LoadProgress:
    async def is_done() -> bool:
        found = await ask(daemon, m.AskProgress(folder))
        return bool(found.is_complete or found.error)

    await until(is_done, "the load")
    found = await ask(daemon, m.AskProgress(folder))
    assert isinstance(found, m.LoadProgress)
    return found


async def test_register_get_and_drop_by_command(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a" / "model")
    async with serving(tmp_path / "a") as one, serving(tmp_path / "b", one.store.address) as two:
        version = (await ask(one, m.CommandRegister("m", "model", 0, ""))).version
        assert version.number == 1
        reply = await ask(two, m.CommandGet("m", "deep/copy", "", 0))
        assert reply.version.digest == version.digest
        assert (await loaded(two, "deep/copy")).is_complete
        assert contents(tmp_path / "b" / "deep" / "copy") == contents(source)
        assert (await ask(two, m.CommandGet("absent", "x", "", 0))).code == "absent"
        assert (await ask(two, m.AskProgress("nothing"))).code == "absent"
        assert (await ask(two, m.CommandDrop("m", "", True))).digests == [version.digest]
        assert not (tmp_path / "b" / "deep" / "copy").exists()


@pytest.mark.parametrize(
    "folder", ["", ".", "..", "../b", "/etc", "a/../..", STATE, f"{STATE}/deltas", "link/x"]
)
async def test_folders_outside_of_the_root_are_refused(tmp_path: Path, folder: str) -> None:
    async with serving(tmp_path / "a") as daemon:
        (tmp_path / "a" / "link").symlink_to("/etc")
        for message in commands(folder):
            with pytest.raises(InvalidArgument, match="below"):
                await ask(daemon, message)


@pytest.mark.parametrize("folder", ["a\0b", "x" * 5000], ids=["nul", "long"])
async def test_a_folder_that_no_disk_can_have_is_refused(tmp_path: Path, folder: str) -> None:
    async with running(1) as (one,):
        await one.register("m", write_model(tmp_path / "model"))
        async with serving(tmp_path / "a", one.address) as daemon:
            for message in commands(folder):
                with pytest.raises(InvalidArgument, match="folder"):
                    await ask(daemon, message)
            with pytest.raises(InvalidArgument, match="folder"):
                await daemon.store.get("m", tmp_path / folder)


async def test_a_load_that_is_dropped_with_its_files_leaves_none(tmp_path: Path) -> None:
    async with running(1, limit_rate_bytes=300_000) as (one,):
        info = await one.register("m", write_model(tmp_path / "model"))
        async with serving(tmp_path / "b", one.address) as daemon:
            await ask(daemon, m.CommandGet("m", "copy", "", 0))
            await until((tmp_path / "b" / "copy.partial" / "chunks").exists)
            assert (await ask(daemon, m.CommandDrop("m", "", True))).digests == [info.digest]
            assert os.listdir(tmp_path / "b") == [STATE]


async def test_a_load_that_is_dropped_does_not_begin_again_where_its_files_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        raise StorageError(f"{folder}: Permission denied")

    monkeypatch.setattr("mooncake.p2p.daemon.remove_partial", fail)
    async with running(1, limit_rate_bytes=300_000) as (one,):
        await one.register("m", write_model(tmp_path / "model"))
        async with serving(tmp_path / "b", one.address) as daemon:
            await ask(daemon, m.CommandGet("m", "copy", "", 0))
            with pytest.raises(StorageError, match="Permission denied"):
                await ask(daemon, m.CommandDrop("m", "", True))
        async with serving(tmp_path / "b", one.address) as daemon:
            assert isinstance(await ask(daemon, m.AskProgress("copy")), m.Declined)


@pytest.mark.parametrize("change", [b"", b"x"], ids=["whole", "changed"])
async def test_a_process_that_ends_between_a_load_and_its_record(tmp_path: Path, change: bytes) -> None:
    """The folder has its name, and the state still says that it is being loaded."""
    source, root = write_model(tmp_path / "model"), tmp_path / "b"
    async with running(1) as (one,):
        info = await one.register("m", source)
        async with serving(root, one.address) as daemon:
            await ask(daemon, m.CommandGet("m", "copy", "", 0))
            assert (await loaded(daemon, "copy")).is_complete
    saved = SavedVersion("m", 1, info.digest, "copy", is_loaded=True)
    (root / STATE / "versions").write_bytes(msgspec.json.encode([saved]))
    (root / STATE / f"manifest-{info.digest}").unlink(missing_ok=True)
    with (root / "copy" / "tokenizer" / "vocab.json").open("ab") as file:
        file.write(change)
    for _ in range(2):
        async with serving(root) as daemon:
            assert [held.info().digest for held in daemon.store.held] == ([] if change else [info.digest])
            assert all(held.is_loaded for held in daemon.store.held)


async def test_a_link_that_leads_out_of_the_root_is_not_served(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a" / "model")
    (tmp_path / "secret").write_text("secret")
    (source / "innocent").symlink_to(tmp_path / "secret")
    async with serving(tmp_path / "a") as daemon:
        with pytest.raises(InvalidArgument, match="leads out"):
            await ask(daemon, m.CommandRegister("m", "model", 0, ""))
        (source / "innocent").unlink()
        (source / "inside").symlink_to(source / "tokenizer" / "vocab.json")
        assert (await ask(daemon, m.CommandRegister("m", "model", 0, ""))).version.number == 1


async def test_a_restart_finds_versions_and_drops_changed_ones(tmp_path: Path) -> None:
    first = write_model(tmp_path / "a" / "first")
    second = write_model(tmp_path / "a" / "second", elements_of(first) ^ 1)
    async with serving(tmp_path / "a") as daemon:
        await ask(daemon, m.CommandRegister("m", "first", 0, ""))
        await ask(daemon, m.CommandRegister("m", "second", 0, ""))
    (first / "tokenizer" / "vocab.json").touch()  # other times, same content
    with (second / "model.safetensors").open("r+b") as file:
        file.write(b"x")
    async with serving(tmp_path / "a") as daemon:
        (version,) = (await ask(daemon, m.AskVersions("", False, ""))).versions
        assert (version.name, version.number, version.num_have) == ("m", 1, version.num_chunks)


async def test_a_change_before_a_later_command_is_noticed_after_a_restart(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a" / "model")
    write_model(tmp_path / "a" / "other", elements_of(source) ^ 1)
    async with serving(tmp_path / "a") as daemon:
        await ask(daemon, m.CommandRegister("m", "model", 0, ""))
        with (source / "model.safetensors").open("r+b") as file:
            file.seek(1 << 20)
            file.write(b"changed")
        await ask(daemon, m.CommandRegister("n", "other", 0, ""))
    async with serving(tmp_path / "a") as daemon:
        assert [one.name for one in (await ask(daemon, m.AskVersions("", False, ""))).versions] == ["n"]


async def test_a_load_that_is_dropped_stays_dropped(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(1, limit_rate_bytes=300_000) as (one,):
        info = await one.register("m", source)
        async with serving(tmp_path / "b", one.address) as daemon:
            await ask(daemon, m.CommandGet("m", "copy", "", 0))
            await until((tmp_path / "b" / "copy.partial" / "chunks").exists)
            assert (await ask(daemon, m.CommandDrop("m", "", False))).digests == [info.digest]
            assert (await ask(daemon, m.CommandDrop("m", "", False))).digests == []
        assert (tmp_path / "b" / STATE / "versions").read_text() == "[]"


async def test_a_load_that_crashes_says_so_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "model")

    async def crash(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    async with running(1) as (one,):
        await one.register("m", source)
        async with serving(tmp_path / "b", one.address) as daemon:
            monkeypatch.setattr(daemon.store, "get", crash)
            await ask(daemon, m.CommandGet("m", "copy", "", 0))
            assert "internal error" in (await loaded(daemon, "copy")).error
            await until(lambda: (tmp_path / "b" / STATE / "versions").read_text() == "[]")
            assert (await ask(daemon, m.CommandDrop("m", "", False))).digests == []


async def test_a_restart_goes_on_with_a_load(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(1, limit_rate_bytes=3_000_000) as (one,):
        await one.register("m", source)
        async with serving(tmp_path / "b", one.address) as daemon:
            await ask(daemon, m.CommandGet("m", "copy", "", 0))
            await until((tmp_path / "b" / "copy.partial" / "chunks").exists)
            await until(lambda: (tmp_path / "b" / "copy.partial" / "chunks").stat().st_size >= 8)
        assert not (tmp_path / "b" / "copy").exists()
        async with serving(tmp_path / "b", one.address) as daemon:
            assert (await loaded(daemon, "copy")).is_complete
        assert contents(tmp_path / "b" / "copy") == contents(source)


async def test_a_load_that_fails_says_why(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(1, limit_rate_bytes=1_000_000) as (one,):
        await one.register("m", source)
        async with serving(tmp_path / "b", one.address, stall_s=1.0) as daemon:
            await ask(daemon, m.CommandGet("m", "copy", "", 0))
            await until((tmp_path / "b" / "copy.partial" / "chunks").exists)
            await one.close()
            assert "at no known peer" in (await loaded(daemon, "copy")).error


async def test_damaged_state_is_named(tmp_path: Path) -> None:
    async with serving(tmp_path / "a"):
        pass
    (tmp_path / "a" / STATE / "versions").write_text("nonsense")
    with pytest.raises(StorageError, match="versions is damaged"):
        async with serving(tmp_path / "a"):
            pass


async def test_one_process_has_a_root(tmp_path: Path) -> None:
    async with serving(tmp_path / "a"):
        with pytest.raises(InvalidArgument, match="no other process"):
            async with serving(tmp_path / "a"):
                pass
    with pytest.raises(InvalidArgument, match="root"):
        P2pDaemon(P2pSettings())


async def test_with_a_key_only_members_load_and_only_administrators_command(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(format_secret(bytes(32)))
    key.chmod(0o600)
    settings = SecuritySettings(cluster_key_file=str(key))
    node, admin, client = (Identity(settings, role) for role in (Role.NODE, Role.ADMIN, Role.CLIENT))
    write_model(tmp_path / "a" / "model")
    async with serving(tmp_path / "a", identity=node) as one:
        assert (await ask(one, m.CommandRegister("m", "model", 0, ""), admin)).version
        for identity in (node, client):
            with pytest.raises(AccessDenied):
                await ask(one, m.CommandDrop("m", "", False), identity)
        with pytest.raises(AccessDenied):
            await ask(one, m.AskVersions("", False, ""), client)
        with pytest.raises(AccessDenied):
            await ask(one, m.AskVersions("", False, ""), Identity())
        async with serving(tmp_path / "b", one.store.address, identity=node) as two:
            found = await asyncio.wait_for(two.store.get("m", tmp_path / "b" / "copy"), 60.0)
            assert found is not None


async def test_a_second_folder_of_a_version_is_loaded_and_reported(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a" / "model")
    async with serving(tmp_path / "a") as one, serving(tmp_path / "b", one.store.address) as two:
        await ask(one, m.CommandRegister("m", "model", 0, ""))
        for folder in ("first", "second"):
            await ask(two, m.CommandGet("m", folder, "", 0))
            assert (await loaded(two, folder)).is_complete
        assert contents(tmp_path / "b" / "second") == contents(source)


async def test_two_commands_at_once_begin_one_load(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model")
    async with running(1, limit_rate_bytes=3_000_000) as (one,):
        await one.register("m", source)
        async with serving(tmp_path / "b", one.address) as daemon:
            found = await asyncio.gather(
                *(ask(daemon, m.CommandGet("m", "copy", "", 0)) for _ in range(3)), return_exceptions=True
            )
            assert sum(isinstance(one, m.Registered) for one in found) == 1
            assert sum(isinstance(one, InvalidArgument) for one in found) == 2
            assert (await loaded(daemon, "copy")).is_complete


async def test_few_reasons_of_failed_loads_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake.p2p.daemon.MAX_REMEMBERED", 2)
    source = write_model(tmp_path / "model")

    async def fail(*_: object, **__: object) -> None:
        raise StorageError("no disk")

    async with running(1) as (one,):
        await one.register("m", source)
        async with serving(tmp_path / "b", one.address) as daemon:
            monkeypatch.setattr(daemon.store, "get", fail)
            for folder in ("a", "b", "c", "a"):
                await ask(daemon, m.CommandGet("m", folder, "", 0))
                assert (await loaded(daemon, folder)).error == "no disk"
            assert (await ask(daemon, m.AskProgress("c"))).error == "no disk"
            assert (await ask(daemon, m.AskProgress("b"))).code == "absent"
