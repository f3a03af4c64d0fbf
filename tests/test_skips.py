# SPDX-License-Identifier: Apache-2.0
"""A strict run fails for a skip that is not on the list, with xdist and without; other runs list it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import ALLOWED, excuse

ROOT = Path(__file__).parent.parent
CONFTEST = """
import importlib.util, sys

spec = importlib.util.spec_from_file_location("skips_of_the_suite", {path!r})
skips = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(skips)
pytest_addoption = skips.add_option


def pytest_configure(config):
    skips.register(config)
"""
SKIPPING = """
import pytest


def test_passes():
    pass


def test_needs_a_server():
    pytest.skip("etcd is not installed, so metadata in etcd was NOT TESTED")
"""
WITHOUT_A_MODULE = """
import pytest

pytest.importorskip("no_such_module_at_all", reason="no_such_module_at_all is not installed")
"""
EXCUSED = """
import pytest


def test_passes():
    pass


@pytest.mark.skip(reason="no data/traces beside or above the project")
def test_of_a_trace():
    pass
"""


def ran(folder: Path, *flags: str, ci: str = "", **files: str) -> subprocess.CompletedProcess[str]:
    """Run pytest over ``files`` (a test's name and its text), with only this plugin of ours."""
    tests = folder / "tests"
    (tests / "bench").mkdir(parents=True)
    (tests / "conftest.py").write_text(CONFTEST.format(path=str(ROOT / "tests" / "skips.py")))
    for name, text in files.items():
        (tests / "bench" / f"{name}.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"CI": ci} if ci else {}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"]
    command += ["--import-mode=importlib", *flags, "tests"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_skip_without_an_excuse_fails_a_strict_run(tmp_path: Path, workers: str) -> None:
    done = ran(tmp_path, "--strict-skips", "-n", workers, test_servers=SKIPPING)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "ERROR: skipped and not on the list" in done.stdout
    assert "tests/bench/test_servers.py::test_needs_a_server" in done.stdout and "NOT TESTED" in done.stdout
    assert "1 passed, 1 skipped" in done.stdout


def test_ci_in_the_environment_makes_a_run_strict(tmp_path: Path) -> None:
    assert ran(tmp_path, ci="true", test_servers=SKIPPING).returncode == 1


def test_a_newcomer_s_run_lists_the_skip_and_stays_green(tmp_path: Path) -> None:
    done = ran(tmp_path, test_servers=SKIPPING)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped and not on the list" in done.stdout and "ERROR" not in done.stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_file_that_skips_itself_as_a_whole_is_seen(tmp_path: Path, workers: str) -> None:
    done = ran(tmp_path, "--strict-skips", "-n", workers, test_absent=WITHOUT_A_MODULE, test_hit_rate=EXCUSED)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no_such_module_at_all is not installed" in done.stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_excused_skip_is_no_failure(tmp_path: Path, workers: str) -> None:
    done = ran(tmp_path, "--strict-skips", "-n", workers, test_hit_rate=EXCUSED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not on the list" not in done.stdout


def test_a_failure_stays_a_failure(tmp_path: Path) -> None:
    done = ran(tmp_path, test_servers=SKIPPING + "\n\ndef test_fails():\n    assert False\n")
    assert done.returncode == 1 and "1 failed" in done.stdout


def test_an_excuse_ends_where_the_test_can_run() -> None:
    reason = "MOONCAKE_TEST_CLIENTS names no folder with the clients' packages"
    assert excuse("upstream_clients/test_real_clients.py", reason, {}) is not None
    assert (
        excuse("upstream_clients/test_real_clients.py", reason, {"MOONCAKE_TEST_CLIENTS": "/somewhere"})
        is None
    )
    assert excuse("store/test_master.py", reason, {}) is None, "the reason of another file excuses nothing"
    assert excuse("upstream_clients/test_real_clients.py", "x", {}) is None


def test_every_excuse_is_about_files_that_exist() -> None:
    files = [path.relative_to(ROOT / "tests").as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    for allowed in ALLOWED:
        assert any(re.fullmatch(allowed.files, file) for file in files), allowed
        assert allowed.why
