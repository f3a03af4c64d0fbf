# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from mooncake import config
from mooncake.conductor.messages import Place
from mooncake.conductor.request_lifecycle import invalid_number
from mooncake.conductor.server import ConductorSettings
from mooncake.config import AlsoFrom, Port, Secret, Size
from mooncake.errors import InvalidArgument
from mooncake.gateway.epp import EppSettings
from mooncake.gateway.gateway import GatewaySettings
from mooncake.store.node.node import NodeSettings
from mooncake.store.settings import MasterSettings


class Color(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class ProbeSettings:
    """A role for these tests.

    Not in the summary.
    """

    host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    "Address to listen on."

    port: Port = 0
    "Port to listen on."

    pool_size_bytes: Annotated[int, Size, Meta(ge=4096)] = 2 << 30
    "Memory of the pool."

    timeout_s: Annotated[float, Meta(gt=0)] = 30.0
    "How long to wait."

    verbose: bool = False
    "Whether to say more."

    peers: tuple[str, ...] = ()
    "Who else is there."

    color: Color = Color.RED
    "Color of the probe."

    scheduling: Literal["cache_aware", "random"] = "cache_aware"
    """How to choose,
    over two lines."""

    model: Path = Path("/models/x")
    "Folder of the model."

    key: Annotated[str, Secret, AlsoFrom("PROBE_KEY")] = ""
    "Who may ask."

    limit_bytes: Annotated[int, Size] | None = None
    "No more than this."

    def __post_init__(self) -> None:
        if self.verbose and not self.peers:
            raise InvalidArgument("verbose", self.verbose, "true only with peers")


def load(
    flags: dict[str, Any] | None = None, environment: dict[str, str] | None = None, file: Path | None = None
) -> tuple[ProbeSettings, dict[str, str]]:
    return config.load(ProbeSettings, flags or {}, environment or {}, file)


def written(tmp_path: Path, text: str, name: str = "mooncake.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


def test_defaults_stand_alone() -> None:
    settings, origins = load()
    assert settings == ProbeSettings()
    assert set(origins.values()) == {"default"}


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = written(tmp_path, '[probe]\nhost = "f"\nport = 1\ntimeout_s = 1\n[other]\nx = 1\n')
    settings, origins = load(
        {"port": 3, "host": None}, {"MOONCAKE_PROBE_PORT": "2", "MOONCAKE_PROBE_HOST": "e"}, file
    )
    assert (settings.port, settings.host, settings.timeout_s) == (3, "e", 1.0)
    assert origins["port"] == "flag --port"
    assert origins["host"] == "environment MOONCAKE_PROBE_HOST"
    assert origins["timeout_s"] == f"file {file} [probe]"
    assert origins["verbose"] == "default"


def test_every_type_from_the_environment() -> None:
    given_names = {
        "POOL_SIZE": "64MiB",
        "TIMEOUT_S": "1.5",
        "VERBOSE": "yes",
        "PEERS": "a:1, b:2,",
        "COLOR": "blue",
        "SCHEDULING": "random",
        "MODEL": "~/m",
        "LIMIT": "1k",
    }
    settings, _ = load(environment={f"MOONCAKE_PROBE_{name}": value for name, value in given_names.items()})
    assert settings == ProbeSettings(
        pool_size_bytes=64 << 20,
        timeout_s=1.5,
        verbose=True,
        peers=("a:1", "b:2"),
        color=Color.BLUE,
        scheduling="random",
        model=Path("~/m").expanduser(),
        limit_bytes=1000,
    )


def test_every_type_from_json(tmp_path: Path) -> None:
    table = {
        "pool_size": 8192,
        "timeout_s": 2,
        "verbose": True,
        "peers": ["a"],
        "color": "blue",
        "limit": "2KiB",
    }
    settings, _ = load(file=written(tmp_path, json.dumps({"probe": table}), "mooncake.json"))
    assert settings == ProbeSettings(
        pool_size_bytes=8192, timeout_s=2.0, verbose=True, peers=("a",), color=Color.BLUE, limit_bytes=2048
    )


def test_the_existing_flat_json_gives_what_it_knows(tmp_path: Path) -> None:
    content = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "master_server_address": "m:1"}
    content |= {"global_segment_size": "4GB", "protocol": "tcp"}
    settings, origins = load(file=written(tmp_path, json.dumps(content), "mooncake.json"))
    assert settings == ProbeSettings(pool_size_bytes=4 * 10**9)
    assert origins["pool_size_bytes"].startswith("file ")


@pytest.mark.parametrize(("name", "expected"), [("c", ("/mnt/x", "c")), ("", ("/mnt/x", ""))])
def test_the_existing_flat_json_names_the_shared_directory(
    tmp_path: Path, name: str, expected: tuple[str, str]
) -> None:
    content = {"master_server_address": "m:1", "root_fs_dir": "/mnt/x", "cluster_id": name}
    file = written(tmp_path, json.dumps(content), "mooncake.json")
    settings, _ = config.load(NodeSettings, {}, {}, file)
    assert (settings.root_fs_dir, settings.cluster_id) == expected
    master, _ = config.load(MasterSettings, {}, {}, file)
    assert (master.root_fs_dir, master.cluster_id) == ("/mnt/x", name or "mooncake_cluster")


@pytest.mark.parametrize(
    "content",
    [
        {"global_segment_size": "4GB"},
        {"local_hostname": "h", "global_segment_size": "4GB"},
        {"protocol": "tcp", "metadata_server": "P2PHANDSHAKE", "global_segment_size": "4GB"},
    ],
)
def test_the_existing_flat_json_may_lack_the_address(tmp_path: Path, content: dict[str, str]) -> None:
    file = written(tmp_path, json.dumps(content), "mooncake.json")
    settings, origins = config.load(NodeSettings, {}, {}, file, ["node", "master"])
    assert settings.pool_size_bytes == 4 * 10**9
    assert origins["master"] == "default"


def test_a_wrong_file_is_named_by_what_names_it(tmp_path: Path) -> None:
    missing = tmp_path / "missing.toml"
    with pytest.raises(InvalidArgument, match=r"^MOONCAKE_CONFIG is '.*missing.toml'"):
        load(file=missing, environment={"MOONCAKE_CONFIG": str(missing)})
    with pytest.raises(InvalidArgument, match=r"^--config is '.*missing.toml'"):
        load(file=missing, environment={"MOONCAKE_CONFIG": str(tmp_path / "other.toml")})


def test_allowed_tables_are_listed_once_each(tmp_path: Path) -> None:
    file = written(tmp_path, "[nodde]\n")
    with pytest.raises(InvalidArgument) as caught:
        config.load(NodeSettings, {}, {}, file, ["log", "node", "master"])
    assert caught.value.allowed == "node, log, master (did you mean node?)"


def test_none_unsets_what_may_be_unset(tmp_path: Path) -> None:
    file = written(tmp_path, '[probe]\nlimit = "5MB"\n')
    assert load(file=file)[0].limit_bytes == 5_000_000
    assert load(environment={"MOONCAKE_PROBE_LIMIT": "none"}, file=file)[0].limit_bytes is None


def test_own_variable_beats_the_well_known_one() -> None:
    assert load(environment={"PROBE_KEY": "b"})[0].key == "b"
    settings, origins = load(environment={"PROBE_KEY": "b", "MOONCAKE_PROBE_KEY": "a"})
    assert (settings.key, origins["key"]) == ("a", "environment MOONCAKE_PROBE_KEY")


def test_a_kubernetes_service_link_is_not_a_port() -> None:
    assert load(environment={"MOONCAKE_PROBE_PORT": "tcp://10.1.2.3:50051"})[0].port == 0


@pytest.mark.parametrize(
    ("settings_class", "field"),
    [
        (MasterSettings, "kv_events_endpoint"),
        (MasterSettings, "kv_events_replay_endpoint"),
        (GatewaySettings, "pool_events"),
        (GatewaySettings, "pool_events_replay"),
        (GatewaySettings, "kv_events_listen"),
        (EppSettings, "pool_events"),
        (EppSettings, "pool_events_replay"),
        (EppSettings, "kv_events_listen"),
        (ConductorSettings, "pool_events"),
        (ConductorSettings, "pool_events_replay"),
        (ConductorSettings, "kv_events_listen"),
    ],
)
def test_an_endpoint_is_taken_from_the_environment(settings_class: type[Any], field: str) -> None:
    variable = f"MOONCAKE_{config.role_of(settings_class)}_{field}".upper()
    settings, origins = config.load(settings_class, {}, {variable: "tcp://10.0.0.1:5557"})
    assert (getattr(settings, field), origins[field]) == ("tcp://10.0.0.1:5557", f"environment {variable}")


@pytest.mark.parametrize("settings_class", [GatewaySettings, EppSettings])
def test_a_time_limit_that_the_conductor_would_refuse_is_named_at_start_up(settings_class: type[Any]) -> None:
    with pytest.raises(InvalidArgument, match="request_timeout_s"):
        config.load(settings_class, {"request_timeout_s": 1e9}, {})
    longest, _ = config.load(settings_class, {"request_timeout_s": 1e8}, {})
    assert invalid_number(Place("r", 1, lifetime_s=longest.request_timeout_s + 60.0)) is None


def test_endpoints_in_a_list_are_taken_from_the_environment() -> None:
    assert load(environment={"MOONCAKE_PROBE_PEERS": "tcp://a:1,tcp://b:2"})[0].peers == (
        "tcp://a:1",
        "tcp://b:2",
    )


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("PORT", "70000", "an integer from 0 to 65535"),
        ("PORT", "-1", "an integer from 0 to 65535"),
        ("PORT", "http", "an integer from 0 to 65535"),
        ("PORT", "1.5", "an integer from 0 to 65535"),
        ("PORT", "", "an integer from 0 to 65535"),
        ("POOL_SIZE", "64 parsecs", "a size from 4KiB, such as 64MiB, 256GB or 4096"),
        ("POOL_SIZE", "-4096", "a size from 4KiB, such as"),
        ("POOL_SIZE", "1KiB", "from 4KiB"),
        ("TIMEOUT_S", "0", "a number above 0"),
        ("TIMEOUT_S", "nan", "a number above 0"),
        ("TIMEOUT_S", "inf", "a number above 0"),
        ("TIMEOUT_S", "soon", "a number above 0"),
        ("VERBOSE", "maybe", "true or false"),
        ("COLOR", "green", "red, blue"),
        ("SCHEDULING", "worst", "cache_aware, random"),
        ("HOST", "", "text of at least 1 character"),
        ("LIMIT", "much", "a size, such as 64MiB, 256GB or 4096, or none"),
    ],
)
def test_a_bad_value_names_field_origin_value_and_range(variable: str, value: str, allowed: str) -> None:
    name = f"MOONCAKE_PROBE_{variable}"
    with pytest.raises(InvalidArgument) as caught:
        load(environment={name: value})
    message = str(caught.value)
    assert message.startswith(f"{variable.lower()} (environment {name}) is {value!r}; allowed: ")
    assert allowed in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[probe]\nprot = 1\n", ["key prot", "[probe]", "did you mean port?"]),
        ('[probe]\nport = "many"\n', ["port (file", "'many'", "from 0 to 65535"]),
        ("[probe]\nport = true\n", ["port (file", "True"]),
        ("[probe]\nhost = 5\n", ["host (file", "5", "text"]),
        ("[probe]\npeers = 5\n", ["peers (file", "a list"]),
        ("probe = 5\n", ["[probe]", "a table"]),
        ("[prob]\nport = 1\n", ["[prob]", "did you mean probe?"]),
        ("[probe\n", ["--config", "well-formed TOML"]),
    ],
)
def test_a_bad_file_names_file_and_place(tmp_path: Path, text: str, words: list[str]) -> None:
    file = written(tmp_path, text)
    with pytest.raises(InvalidArgument) as caught:
        config.load(ProbeSettings, {}, {}, file, known_roles=["probe", "other"])
    for word in [*words, str(file)]:
        assert word in str(caught.value)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    for file in (
        tmp_path / "none.toml",
        written(tmp_path, "{", "bad.json"),
        written(tmp_path, "[]", "list.json"),
    ):
        with pytest.raises(InvalidArgument, match=file.name):
            load(file=file)


def test_a_secret_is_hidden_everywhere() -> None:
    settings, origins = load(environment={"PROBE_KEY": "swordfish"})
    assert "swordfish" not in config.describe(settings, origins)
    assert "swordfish" not in config.render_docs([ProbeSettings], "# Settings")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:swordfish@h:1/0", "redis://(hidden)@h:1/0"),
        ("redis://:sword@fish@h:1", "redis://(hidden)@h:1"),
        ("http://swordfish@h,http://u:fish@i/a", "http://(hidden)@h,http://(hidden)@i/a"),
        ("http://h:1/a@b", "http://h:1/a@b"),
        ("model@2", "model@2"),
    ],
)
def test_a_password_within_a_url_is_hidden(url: str, shown: str) -> None:
    described = config.describe(*load({"host": url, "peers": ("plain", url)}))
    assert f'host = "{shown}" ' in described and f'peers = ["plain", "{shown}"]' in described


def test_a_check_over_several_fields_says_where_the_value_came_from() -> None:
    with pytest.raises(
        InvalidArgument, match=r"verbose \(flag --verbose\) is True; allowed: true only with peers"
    ):
        load({"verbose": True})


def test_a_misspelt_variable_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    load(environment={"MOONCAKE_PROBE_PROT": "1"})
    [record] = caplog.records
    assert record.__dict__["fields"] == {"name": "MOONCAKE_PROBE_PROT", "did_you_mean": "MOONCAKE_PROBE_PORT"}


def test_describe_can_be_loaded_again(tmp_path: Path) -> None:
    settings, origins = load({"peers": ("a", "b"), "port": 7, "verbose": True}, {"MOONCAKE_PROBE_HOST": "h"})
    text = config.describe(settings, origins)
    assert "# flag --port" in text
    assert "# environment MOONCAKE_PROBE_HOST" in text
    assert "# limit is not set" in text
    assert load(file=written(tmp_path, text))[0] == settings


def test_docs_have_a_row_per_field() -> None:
    text = config.render_docs([ProbeSettings], "# Settings\n")
    assert text.startswith("# Settings\n\n## [probe]\n\nA role for these tests.\n\n| flag |")
    assert (
        '| `--pool-size` | `MOONCAKE_PROBE_POOL_SIZE` | `"2GiB"` | Memory of the pool. Takes a size' in text
    )
    assert "How to choose, over two lines. Takes cache_aware, random." in text
    assert "Who may ask. Also read from `PROBE_KEY`." in text
    assert text.count("\n| `--") == len(config.options(ProbeSettings))


def test_a_field_without_a_sentence_is_a_bug() -> None:
    @dataclass(frozen=True)
    class MuteSettings:
        port: int = 0

    with pytest.raises(AssertionError, match="no sentence"):
        config.options(MuteSettings)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("256GB", 256 * 10**9),
        ("1.5 GB", 1_500_000_000),
        ("500gb", 500 * 10**9),
        ("16k", 16_000),
        ("2TiB", 2 << 40),
        ("10b", 10),
        (".5KiB", 512),
    ],
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert config.parse_size(text) == size_bytes


@given(st.integers(min_value=0, max_value=2**63))
def test_a_size_survives_being_written(size_bytes: int) -> None:
    assert config.parse_size(config.format_size(size_bytes)) == size_bytes


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert config.parse_size(text) >= 0


# -- included tables ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class CarrierSettings:
    """A part that several roles have."""

    hosts: tuple[str, ...] = ()
    "Where it listens."

    num_streams: Annotated[int, Meta(ge=1)] = 1
    "How many there are."


NO_CARRIER = CarrierSettings()


@dataclass(frozen=True)
class VesselSettings:
    """A role with such a part."""

    port: Port = 0
    "Port to listen on."

    carrier: CarrierSettings = NO_CARRIER


def test_a_settings_class_may_include_the_table_of_another(tmp_path: Path) -> None:
    file = written(tmp_path, '[vessel]\nport = 1\n[carrier]\nhosts = ["f"]\nnum_streams = 2\n')
    environment = {"MOONCAKE_CARRIER_HOSTS": "a,b"}
    settings, origins = config.load(VesselSettings, {}, environment, file, ["vessel", "carrier"])
    assert settings == VesselSettings(1, CarrierSettings(("a", "b"), 2))
    assert origins["carrier.hosts"] == "environment MOONCAKE_CARRIER_HOSTS"
    given = {"carrier": {"num_streams": "3", "hosts": None}}
    settings, origins = config.load(VesselSettings, given, environment, file)
    assert settings.carrier == CarrierSettings(("a", "b"), 3)
    assert origins["carrier.num_streams"] == "flag --carrier-num-streams"
    shown = config.describe_included(settings, origins)
    assert shown.splitlines()[0] == "[carrier]" and "num_streams = 3" in shown
    assert [option.field for option in config.options(VesselSettings)] == ["port"]
    with pytest.raises(InvalidArgument, match="num_streams"):
        config.load(VesselSettings, {}, {"MOONCAKE_CARRIER_NUM_STREAMS": "0"})


def test_the_environment_names_a_file(tmp_path: Path) -> None:
    assert config.named_file({"MOONCAKE_CONFIG": str(tmp_path)}) == tmp_path
    assert config.named_file({}) is None
