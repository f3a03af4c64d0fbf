# SPDX-License-Identifier: Apache-2.0
"""``vllm_v1_proxy_server`` and ``mooncake_proxy``: the proxies that demos of disaggregated serving start.

Their flags, defaults and endpoints, in front of the gateway. The first takes hosts and ports separately and
forwards what a prefill engine answers; the second takes ``--prefill URL [BOOTSTRAP_PORT]`` as vLLM's proxy
for its MooncakeConnector does, or ``--prefill host:port ...`` as the XpYd demo does. In that form other hosts
reach it, as they do those demos; the first form listens on loopback. Other flags are passed to the gateway.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from mooncake.cli import main as mooncake_main
from mooncake.security import keep_upstream_defaults


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of either console script, and of ``python -m mooncake.vllm_v1_proxy_server``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    keep_upstream_defaults("mooncake_proxy")
    mooncake_main(["gateway", *gateway_flags(given, os.environ.get("OPENAI_API_KEY", ""))])


def gateway_flags(given: Sequence[str], api_key: str = "") -> list[str]:
    """Translate the proxy's flags to the gateway's."""
    parsed, rest = _parser().parse_known_args(given)
    prefill = [one for group in parsed.prefill or [] for one in group]
    decode = [one for group in parsed.decode or [] for one in group]
    host = parsed.host or ("0.0.0.0" if prefill or decode else "127.0.0.1")
    if not prefill and not decode:
        prefill = _paired("prefiller", parsed.prefiller_hosts, parsed.prefiller_ports)
        decode = _paired("decoder", parsed.decoder_hosts, parsed.decoder_ports)
    flags = ["--model", parsed.model, "--host", host, "--port", str(parsed.port)]
    flags += ["--scheduling", parsed.scheduling]
    if not any(flag.startswith("--protocol") for flag in rest):
        has_bootstrap = any(one.isdecimal() or one.startswith("http://") for one in prefill)
        flags += ["--protocol", "bootstrap" if has_bootstrap else "sequential"]
    if api_key:
        flags += ["--engine-api-key", api_key]
    for flag, found in (("--prefill", prefill), ("--decode", decode)):
        flags += [flag, *found] if found else []
    return flags + rest


def _paired(what: str, hosts: list[str], ports: list[int]) -> list[str]:
    if len(hosts) != len(ports):
        sys.exit(
            f"error: --{what}-hosts has {len(hosts)} values and --{what}-ports {len(ports)}, not equally many"
        )
    return [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description="A proxy in front of engines that prefill and engines that decode.",
        epilog="Further flags are those of `mooncake gateway`, which this starts.",
    )
    parser.add_argument("--host", help="default: 0.0.0.0 with --prefill or --decode, else 127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", "-m", default="model", help="model name; engines' own names work, too")
    parser.add_argument("--scheduling", default="round_robin")
    for side, port in (("prefiller", 8100), ("decoder", 8200)):
        parser.add_argument(f"--{side}-hosts", f"--{side}-host", nargs="+", default=["localhost"])
        parser.add_argument(f"--{side}-ports", f"--{side}-port", nargs="+", type=int, default=[port])
    parser.add_argument(
        "--prefill", "-p", nargs="+", action="append", metavar="INSTANCE", help="host:port, or URL [PORT]"
    )
    parser.add_argument("--decode", "-d", nargs="+", action="append", metavar="INSTANCE")
    return parser
