# SPDX-License-Identifier: Apache-2.0
"""Which tests may be skipped, for which reason; a run that is strict fails when any other test is skipped.

A skip is easily overlooked: a server that could not be installed, or a package that is missing, leaves a
green run that has tested less than it did yesterday. ``ALLOWED`` names every skip that is accepted, by the
file, by the text of its reason, and by why the test can't run where it is skipped. A run is strict with
``--strict-skips`` or where ``CI`` is set in the environment, as ``.ci/run`` does; elsewhere, on a machine
without the servers, the other skips are listed at the end and the run stays green. It works with xdist: the
reports of the workers arrive at the process that started them, which alone decides.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Allowed:
    """Skips of the test files ``files`` (a pattern) whose reason matches ``reason`` (another)."""

    files: str
    reason: str
    why: str
    unless: str = ""
    "The environment variable that declares that these tests can run here; then they may not be skipped."


ALLOWED = (
    Allowed(
        r"e2e/test_console\.py",
        r"no Chromium here: run scripts/install-servers",
        "the console's pages are tested in Debian's Chromium, which scripts/install-servers installs",
        unless="CI",
    ),
    Allowed(
        r"contract/test_(transports|leaks)\.py|transfer/transports/test_rdma\.py",
        r"RDMA device|libibverbs",
        "RDMA needs a card or soft-RoCE in a kernel of its own; scripts/test-rdma runs them in a VM",
    ),
    Allowed(
        r"transfer/test_nvmeof\.py",
        r"no NVMe over Fabrics target here",
        "the target needs a kernel of its own; scripts/test-nvmeof runs them in a VM",
        unless="MOONCAKE_NVMEOF_TARGET",
    ),
    Allowed(
        r"native/test_native\.py",
        r"scripts/sanitize has run these tests",
        "a step of .ci/run before this one has run them, under sanitizers",
    ),
    Allowed(
        r"contract/test_transports\.py",
        r"cuda runs over a test double of its driver only",
        "there is no GPU; scripts/test-cuda runs the contract on one",
    ),
    Allowed(
        r"connectors/test_(cuda_device|peer_push)\.py|inference/test_(runner|layer_graphs)\.py",
        r"NOT RUN: (torch has no CUDA device here|no GPU)",
        "there is no GPU; the doubles show the order of copies, and scripts/test-cuda runs these on one",
    ),
    Allowed(
        r"vllm/.*",
        r"vLLM is not in this environment",
        "vLLM has an environment of its own; scripts/test-vllm builds it and runs them, in CI too",
        unless="MOONCAKE_VLLM_ENV",
    ),
    Allowed(
        r"vllm/test_apis\.py",
        r"(anthropic|openai) is not in this environment",
        "the clients come with vLLM 0.32; another version may not require them",
    ),
    Allowed(
        r"ray/.*",
        r"Ray is not in this environment",
        "Ray is 260 MB that nothing else needs; scripts/test-ray fetches it and runs them, at night too",
        unless="MOONCAKE_RAY_ENV",
    ),
    Allowed(
        r"image/.*",
        r"MOONCAKE_TEST_ENGINE names no container engine",
        "an image takes minutes and root; scripts/test-image builds it and runs them, at night too",
        unless="MOONCAKE_TEST_ENGINE",
    ),
    Allowed(
        r"upstream_clients/test_real_(clients|plugins)\.py",
        r"MOONCAKE_TEST_CLIENTS names no folder",
        "the published packages are fetched by scripts/test-clients, which runs them, in CI too",
        unless="MOONCAKE_TEST_CLIENTS",
    ),
    Allowed(
        r"gateway/test_processes\.py",
        r"MOONCAKE_TEST_ENVOY names no program",
        "Envoy has a folder of its own, since its package has a module of the same name as its messages",
        unless="MOONCAKE_TEST_ENVOY",
    ),
    Allowed(
        r"bench/test_hit_rate\.py",
        r"no data/traces beside or above the project",
        "the published traces are not ours to keep in the repository",
    ),
    Allowed(
        r"transfer/transports/test_shm\.py",
        r"only root can become another user",
        "a process that is not root cannot change its user",
    ),
    Allowed(
        r"bench/test_report\.py",
        r"only root with tc makes network namespaces",
        "a process that is not root, or a container's, cannot make one",
    ),
    Allowed(
        r"hosts/test_hosts\.py",
        r"NOT RUN: no hosts can be made here",
        "a process that is not root, or a container's, cannot make namespaces",
    ),
    Allowed(
        r"http/test_server\.py|contract/test_metadata\.py|(compat/)?transfer/test_engine\.py",
        r"no IPv6|no ::1",
        "the kernel of this machine has no IPv6, which no installation changes",
    ),
    Allowed(
        r"transfer/transports/test_rdma\.py|compat/transfer/test_engine\.py",
        r"this machine has (an RDMA device|RDMA devices)",
        "the case is a machine without such devices",
    ),
)


def excuse(file: str, reason: str, environment: Mapping[str, str]) -> Allowed | None:
    """The reason to accept this skip, or None. ``file`` is relative to the folder ``tests``."""
    for allowed in ALLOWED:
        is_meant = re.fullmatch(allowed.files, file) and re.search(allowed.reason, reason)
        if is_meant and not (allowed.unless and environment.get(allowed.unless)):
            return allowed
    return None


class Skips:
    """The plugin: collects skips; a strict session fails for those without an excuse."""

    def __init__(self, is_strict: bool, tests: Path) -> None:
        self._is_strict = is_strict
        self._tests = tests
        self.unexcused: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._look_at(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._look_at(report)

    def _look_at(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped:
            return
        found: Any = report.longrepr
        reason = str(found[2]) if isinstance(found, tuple) else str(found)
        # A shared function that skips lies in another file than the test, which the node's name begins with.
        path = Path(report.nodeid.split("::")[0])
        file = path.as_posix().removeprefix(f"{self._tests.name}/")
        if excuse(file, reason, os.environ) is None:
            self.unexcused.append(f"{report.nodeid}: {reason}")

    # Before the terminal's own, whose summary says how the session ended.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if (
            self.unexcused
            and self._is_strict
            and session.exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.unexcused:
            return
        title = "skipped and not on the list of tests/skips.py"
        terminalreporter.section(f"ERROR: {title}" if self._is_strict else title, red=self._is_strict)
        for line in self.unexcused:
            terminalreporter.line(line)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--strict-skips",
        action="store_true",
        help="fail when a test is skipped that tests/skips.py does not excuse; implied where CI is set",
    )


def register(config: pytest.Config) -> None:
    """Register in the process that reports; a worker of xdist passes its reports on."""
    if hasattr(config, "workerinput"):
        return
    is_strict = bool(config.getoption("--strict-skips")) or os.environ.get("CI", "") not in ("", "0", "false")
    config.pluginmanager.register(Skips(is_strict, Path(__file__).parent), "mooncake-skips")
