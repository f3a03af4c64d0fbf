# SPDX-License-Identifier: Apache-2.0
"""The port of vLLM's HTTP server, wherever vLLM reads it from."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake.connectors.vllm.command_line import VLLM_PORT, http_port


@pytest.mark.parametrize(
    ("command_line", "port"),
    [
        ([], VLLM_PORT),
        (["serve", "M", "--port", "8200"], 8200),
        (["serve", "M", "--port=8200", "--portable", "1"], 8200),
        (["serve", "M", "--port", "many"], VLLM_PORT),
        (["serve", "M", "--config", "FILE"], 8300),
        (["serve", "M", "--config", "FILE", "--port", "8200"], 8200),
        (["--port", "8200", "--config", "FILE"], 8200),
        (["serve", "M", "--config", "NONE"], VLLM_PORT),
    ],
)
def test_the_port_is_that_of_the_command_line_then_of_the_file(
    tmp_path: Path, command_line: list[str], port: int
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("model: M\nport: 8300\nkv-transfer-config:\n  kv_role: kv_both\n")
    assert http_port([str(file) if one == "FILE" else one for one in command_line]) == port


@pytest.mark.parametrize("content", ["model: M", "", "- port", "port: many", "port:", "{", "8300"])
def test_a_file_without_a_port_leaves_vllm_s_default(tmp_path: Path, content: str) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(content)
    assert http_port(["serve", "M", "--config", str(file)]) == VLLM_PORT
