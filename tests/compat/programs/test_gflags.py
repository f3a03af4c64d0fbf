# SPDX-License-Identifier: Apache-2.0
"""Forms of a flag on the command line."""

from __future__ import annotations

import pytest

from mooncake.compat.programs.gflags import parse_flags
from mooncake.errors import InvalidArgument

DEFAULTS = {"block_size": 65536, "mode": "initiator", "auto_discovery": False, "enable_ha": True}


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        (["-block_size=1"], {"block_size": 1}),
        (["--block_size=1"], {"block_size": 1}),
        (["--block-size", "1"], {"block_size": 1}),
        (["-block-size", "-1"], {"block_size": -1}),
        (["--mode="], {"mode": ""}),
        (["--auto_discovery"], {"auto_discovery": True}),
        (["--auto-discovery", "--mode=x"], {"auto_discovery": True, "mode": "x"}),
        (["--auto_discovery", "yes"], {"auto_discovery": True}),
        (["--auto_discovery=0"], {"auto_discovery": False}),
        (["--noenable_ha", "--enable-ha", "false"], {"enable_ha": False}),
        (["--noenable-ha"], {"enable_ha": False}),
        (["--v=1", "-logtostderr", "--minloglevel", "2", "--mode", "target"], {"mode": "target"}),
        (["--mode=a", "--", "anything"], {"mode": "a"}),
    ],
)
def test_every_form(arguments: list[str], changed: dict[str, object]) -> None:
    assert parse_flags(arguments, DEFAULTS) == DEFAULTS | changed


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--blok_size=1"], "--block_size?"),
        (["--nonsense"], "flag"),
        (["target"], "argument"),
        (["--block_size=many"], "whole number"),
        (["--block_size"], "a value"),
        (["--auto_discovery=perhaps"], "true or false"),
    ],
)
def test_invalid_flags(arguments: list[str], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why.replace("?", r"\?")):
        parse_flags(arguments, DEFAULTS)
