# SPDX-License-Identifier: Apache-2.0
"""Commands run in this process: starting one takes ten times as long as what it does."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

from mooncake.cli import main

Run = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def mooncake(capsys: pytest.CaptureFixture[str]) -> Run:
    """``mooncake(*words)`` runs a command; returns its exit status and output."""

    def call(*words: str) -> CompletedProcess[str]:
        with pytest.raises(SystemExit) as exit:
            main(words)
        assert isinstance(exit.value.code, int), exit.value.code
        return CompletedProcess(words, exit.value.code, *capsys.readouterr())

    return call
