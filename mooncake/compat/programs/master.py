# SPDX-License-Identifier: Apache-2.0
"""``mooncake_master``: our master behind the existing program's flags, defaults and log lines.

Only translates: flags, a flag file and ``--config_path`` become ``MasterSettings``. A flag without effect
causes one warning with the reason; one that is misspelt or out of range ends the program. A value that the
existing program accepts and that has no meaning here is replaced by the nearest one that has, with a warning.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import json
import os
import sys
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import mooncake
from mooncake import config
from mooncake.cli import print_and_exit, run_program
from mooncake.cli.role_command import run_until_stopped
from mooncake.compat.programs.gflags import LOGGING, split_flags
from mooncake.compat.programs.master_flags import BOOLEANS, FLAGS, LEAST, TRANSLATED, UNLIMITED_BYTES
from mooncake.errors import AddressInUse, InvalidArgument
from mooncake.log import get_logger, setup_logging
from mooncake.security import keep_upstream_defaults
from mooncake.store.settings import MasterSettings

log = get_logger(__name__)

SNAPSHOTS_VARIABLE = "MOONCAKE_SNAPSHOT_LOCAL_PATH"
REPORT_S = 10.0
HELP = """\
mooncake_master: keep the store's metadata (mooncake master, with the flags of the existing package).

Example: mooncake_master --rpc_port=50051 --enable_http_metadata_server=true --default_kv_lease_ttl=5s

Flags take one dash or two, underscores or hyphens, and their value after = or a space. Files with flags:
--flagfile (one per line), --config_path (JSON or YAML with the same names). ADMIN_API_KEY, when set, is the
key that changes by HTTP require.
"""


@dataclasses.dataclass(frozen=True)
class MasterOptions:
    """Settings and warnings that result from the flags."""

    settings: MasterSettings
    metadata: tuple[str, int] | None
    """Host and port of the HTTP metadata service, when this process serves it."""
    warnings: list[str]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the console script ``mooncake_master``."""
    command_line = sys.argv[1:] if arguments is None else list(arguments)
    if {"-h", "-help", "--help", "--helpfull", "--helpshort"} & set(command_line):
        print_and_exit("\n".join([HELP, *_help_lines()]))
    if {"-version", "--version"} & set(command_line):
        print_and_exit(f"mooncake_master {mooncake.__version__}")
    run_program(lambda: _run(command_line))


def _run(command_line: Sequence[str]) -> None:
    setup_logging(role="master")
    keep_upstream_defaults("mooncake_master")
    options = read(command_line, os.environ)
    for warning in options.warnings:
        log.warning("flag_without_effect", reason=warning)
    run_until_stopped(_serve, options)


async def _serve(options: MasterOptions) -> None:
    # Imported late: --help and flag errors should not wait for a web framework.
    from mooncake.compat.master import load_http
    from mooncake.store.server import serve

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(serve(options.settings, load_http))
            if options.metadata is not None:
                from mooncake.transfer.metadata_server import MetadataSettings
                from mooncake.transfer.metadata_server import serve as serve_metadata

                group.create_task(_naming_its_port(serve_metadata(MetadataSettings(*options.metadata))))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _naming_its_port(serving: Coroutine[Any, Any, None]) -> None:
    """Run the metadata service; an error of a port in use names its flag."""
    try:
        await serving
    except AddressInUse as error:
        raise AddressInUse(f"{error}: --http_metadata_server_port") from error


def read(command_line: Sequence[str], environment: Mapping[str, str]) -> MasterOptions:
    """Parse the command line.

    Raises:
        InvalidArgument: names the flag, the value and the allowed values.
    """
    given, warnings = split_flags(command_line, FLAGS.keys(), BOOLEANS, environment), list[str]()
    if given.get("config_path"):
        path = FLAGS["config_path"].kind.value("config_path", given["config_path"])
        given = {**_file(Path(path), warnings), **given}
    values = {name: flag.kind.value(name, given.get(name, flag.default)) for name, flag in FLAGS.items()}
    changed = {name for name in given if values[name] != FLAGS[name].kind.read(FLAGS[name].default)}
    warnings += [
        f"--{name}: {FLAGS[name].why_not}" for name in given if name in changed and not FLAGS[name].field
    ]
    _replace_values(values, warnings)
    fields = {flag.field: values[name] for name, flag in FLAGS.items() if flag.field not in ("", TRANSLATED)}
    fields["port"] = values["rpc_port"] if "rpc_port" in given and values["rpc_port"] else values["port"]
    _translate(values, given, environment, fields, warnings)
    fields = {name: value for name, value in fields.items() if value is not None}
    settings, _ = config.load(MasterSettings, fields, environment)
    metadata = None
    if values["enable_http_metadata_server"]:
        metadata = values["http_metadata_server_host"], values["http_metadata_server_port"]
    return MasterOptions(settings, metadata, warnings)


def _replace_values(values: dict[str, Any], warnings: list[str]) -> None:
    """Replace values that the existing program accepts and ``MasterSettings`` does not, by the nearest."""
    for name, least in LEAST.items():
        if not values[name]:
            warnings.append(f"--{name}: 0 counts as {least:g}{' s' if name in _SECONDS else ''} here")
            values[name] = least
    below = values["eviction_high_watermark_ratio"]
    if values["eviction_ratio"] >= below:
        warnings.append(f"--eviction_ratio: must be less than --eviction_high_watermark_ratio, {below:g}")
        values["eviction_ratio"] = _LARGEST_SHARE * below


_SECONDS = ("default_kv_lease_ttl", "client_ttl", "put_start_discard_timeout_sec")
_LARGEST_SHARE = 0.99
"""Share of the high watermark that an eviction frees at most."""


def _file(path: Path, warnings: list[str]) -> dict[str, str]:
    """Flags of a JSON or YAML file, as text; those on the command line override them.

    Unknown keys are ignored, as by the existing program, here with a warning.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(
            "--config_path", str(path), f"a readable JSON or YAML file ({error})"
        ) from error
    try:
        content = json.loads(text) if path.suffix == ".json" else read_yaml(text)
    except ValueError as error:
        raise InvalidArgument("--config_path", str(path), f"well-formed JSON or YAML ({error})") from error
    if not isinstance(content, dict):
        raise InvalidArgument("--config_path", str(path), "an object of flags and their values")
    flags = []
    for name, value in content.items():
        known = str(name).replace("-", "_")
        if known not in FLAGS and known not in LOGGING:
            close = difflib.get_close_matches(known, FLAGS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            warnings.append(f"{name} in {path} is unknown{hint}")
            continue
        if isinstance(value, dict | list) or value is None:
            raise InvalidArgument(f"{name} in {path}", value, "text, a number, true or false")
        flags.append(f"--{name}={str(value).lower() if isinstance(value, bool) else value}")
    try:
        return split_flags(flags, FLAGS.keys(), BOOLEANS)
    except InvalidArgument as error:
        raise InvalidArgument(f"{error.field} in {path}", error.value, error.allowed) from error


def read_yaml(text: str) -> Any:
    """Parse YAML. Raises ValueError when it is not well-formed."""
    import yaml  # imported late: only needed for such a file

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error


def _translate(
    values: Mapping[str, Any],
    given: Mapping[str, str],
    environment: Mapping[str, str],
    fields: dict[str, Any],
    warnings: list[str],
) -> None:
    """Set fields that depend on several flags or have another value in ``MasterSettings``."""
    if "put_start_release_timeout_sec" in given:
        # Theirs counts from the start of a put, ours from its deadline. Not set by default: memory also stays
        # unused for so long after a failover, and 10 minutes is long.
        late_s = values["put_start_release_timeout_sec"] - values["put_start_discard_timeout_sec"]
        fields["grace_s"] = max(0.0, late_s)
    if "client_ttl" not in given:
        fields["segment_ttl_s"] = None  # ours is shorter
    fields["report_s"] = REPORT_S if values["enable_metric_reporting"] else 0.0
    _translate_log(values, environment, fields, warnings)
    _translate_tiers(values, given, fields, warnings)
    if values["enable_ha"]:
        fields["election"] = _election(values)
    if values["global_file_segment_size"] < UNLIMITED_BYTES:
        fields["root_fs_size_bytes"] = values["global_file_segment_size"]
        if not values["root_fs_dir"]:
            warnings.append("--global_file_segment_size: used only with --root_fs_dir")
    if not values["kv_events_backend_id"]:
        fields["kv_events_backend"] = None
    if not values["enable_kv_events"]:
        fields["kv_events_endpoint"] = None
    elif not (values["kv_events_bind_endpoint"] and values["kv_events_backend_id"]):
        fields["kv_events_endpoint"] = None
        warnings.append("--enable_kv_events: needs --kv_events_bind_endpoint and --kv_events_backend_id")
    if values["enable_multi_tenants"] and values["tenant_quota_connector_type"] != "file":
        warnings.append("--tenant_quota_connector_type: quotas are kept in a file or set by HTTP")


def _translate_tiers(
    values: Mapping[str, Any], given: Mapping[str, str], fields: dict[str, Any], warnings: list[str]
) -> None:
    """Translate only flags that are given: the defaults differ, as here a node with an SSD uses it."""
    if {"promotion_on_hit", "promotion_admission_threshold"} & given.keys():
        is_on = values["promotion_on_hit"] or "promotion_on_hit" not in given
        fields["promote_after_hits"] = values["promotion_admission_threshold"] if is_on else 0
    if "offload_force_evict" in given:
        fields["evict_undemoted"] = values["offload_force_evict"]
    if "dynamic_replication_mode" in given:
        mode = values["dynamic_replication_mode"]
        is_on = mode == "enforce"
        fields["hot_uses_per_s"] = values["dynamic_replication_admission_qps_threshold"] if is_on else 0.0
        fields["max_hot_replicas"] = values["dynamic_replication_max_memory_replicas"]
        if mode == "observe":
            warnings.append("--dynamic_replication_mode: there is no observe mode; nothing is replicated")
    if not values["enable_multi_tenants"]:
        fields["strict_tenants"] = None
    elif values["tenant_quota_connector_type"] == "file":
        fields["tenants_file"] = values["tenant_quota_connector_uri"].removeprefix("file://") or None


def _translate_log(
    values: Mapping[str, Any], environment: Mapping[str, str], fields: dict[str, Any], warnings: list[str]
) -> None:
    requested = [
        name for name in ("enable_oplog", "enable_snapshot", "enable_snapshot_restore") if values[name]
    ]
    folder = values["snapshot_backup_dir"] or environment.get(SNAPSHOTS_VARIABLE, "")
    if requested and folder:
        fields["oplog"] = str(Path(folder) / f"{values['cluster_id']}.oplog")
    elif requested and not values["enable_ha"]:
        warnings.append(f"--{requested[0]}: nothing is kept without a folder; set --snapshot_backup_dir")
    elif folder:
        warnings.append("--snapshot_backup_dir: used only with --enable_snapshot or --enable_oplog")


def _election(values: Mapping[str, Any]) -> str:
    scheme = values["ha_backend_type"]
    if scheme == "k8s":
        place = values["ha_backend_connstring"].rpartition("://")[2] or values["pod_namespace"]
        if not place:
            allowed = "namespace/name of the Lease, or --pod_namespace, which --enable_ha needs"
            raise InvalidArgument("--ha_backend_connstring", "", allowed)
        return f"k8s://{place}"
    servers = values["ha_backend_connstring"] or (values["etcd_endpoints"] if scheme == "etcd" else "")
    if not servers:
        flag = "--etcd_endpoints" if scheme == "etcd" else "--ha_backend_connstring"
        raise InvalidArgument(flag, "", "host:port of the election server, which --enable_ha needs")
    hosts = [one.strip().rpartition("://")[2] for one in servers.replace(",", ";").split(";")]
    return f"{scheme}://" + ";".join(host.rstrip("/") for host in hosts if host)


def _help_lines() -> list[str]:
    lines = []
    for name, flag in FLAGS.items():
        effect = f"; no effect: {flag.why_not}" if flag.why_not else ""
        lines.append(f"  --{name}={flag.default}  ({flag.kind.allowed}{effect})")
    return lines
