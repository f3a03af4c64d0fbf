# SPDX-License-Identifier: Apache-2.0
"""vLLM's command line, as far as a connector has to read it.

A connector is not given the port of its engine's HTTP server, by which other engines name it. All processes
of an engine share the command line, and vLLM takes options from a YAML file (``--config``) as well, those of
the command line first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import yaml  # a dependency of vLLM

VLLM_PORT = 8000
"""Port of vLLM's HTTP server without ``--port``."""


def http_port(command_line: Sequence[str]) -> int:
    """Port of vLLM's HTTP server: on the command line, else in its configuration file, else the default."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--port", type=int)
    parser.add_argument("--config", default="")
    try:
        found = parser.parse_known_args(list(command_line))[0]
    except SystemExit:  # vLLM has refused it, or the program is another
        return VLLM_PORT
    if found.port is not None:
        return int(found.port)
    return _port_in_file(found.config) if found.config else VLLM_PORT


def _port_in_file(path: str) -> int:
    try:
        with open(path, encoding="utf-8") as file:
            options = yaml.safe_load(file)
        return int(options["port"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):  # as above, or the file names no port
        return VLLM_PORT
