# SPDX-License-Identifier: Apache-2.0
"""What stands around the package: its version, the tools' versions, hooks and the workflow of CI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

import mooncake
from aliases import wheels

ROOT = Path(__file__).parent.parent


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def requirement_names(lines: list[str]) -> set[str]:
    names = (re.match(r"[A-Za-z0-9_.-]+", line) for line in lines)
    return {match[0].lower() for match in names if match is not None}


def test_the_version_has_one_source() -> None:
    found = project()
    assert "version" not in found["project"] and "version" in found["project"]["dynamic"]
    source = ROOT / found["tool"]["scikit-build"]["metadata"]["version"]["input"]
    assert f'__version__ = "{mooncake.__version__}"' in source.read_text()
    assert f"## {mooncake.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_wheel_has_the_module_beside_the_package() -> None:
    """`scripts/test-wheel` imports it from there."""
    packages = project()["tool"]["scikit-build"]["wheel"]["packages"]
    assert packages == ["mooncake", "mooncake_vllm_adaptor"]
    assert all((ROOT / package / "__init__.py").exists() for package in packages)


def test_tools_are_pinned_to_exact_versions() -> None:
    lines = [line for line in (ROOT / "constraints-tools.txt").read_text().splitlines() if line[:1].isalpha()]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    tools = requirement_names(project()["project"]["optional-dependencies"]["dev"])
    assert {"mypy", "pytest", "ruff"} <= requirement_names(lines) <= tools


def test_supported_pythons_are_those_that_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    job = workflow["jobs"]["run"]
    versions = job["strategy"]["matrix"]["python"]
    classified = re.findall(r"Python :: (3\.\d+)$", "\n".join(project()["project"]["classifiers"]), re.M)
    assert versions == classified
    assert project()["project"]["requires-python"] == f">={versions[0]}"
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run", "scripts/test-wheel"]


def test_hooks_call_scripts_of_this_repository() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [one["repo"] for one in repositories] == ["local"], "hooks fetch nothing"
    for hook in repositories[0]["hooks"]:
        script = ROOT / hook["entry"].split()[0]
        assert hook["language"] == "system" and os.access(script, os.X_OK), hook["id"]


def test_every_source_names_its_licence() -> None:
    """As the REUSE specification has it, so that a file that is copied elsewhere still says what it is."""
    folders = ["mooncake", "mooncake_vllm_adaptor", "tests", "bench", "examples", "native", "scripts"]
    folders += ["aliases", ".ci"]
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    sources = [
        path
        for path in files
        if path.suffix in {".py", ".pyi", ".cpp", ".h"} or path.parent.name == "scripts"
    ]
    assert len(sources) > 700
    bare = [
        str(path.relative_to(ROOT))
        for path in sources
        if path.stat().st_size and "SPDX-License-Identifier: Apache-2.0" not in path.read_text()[:200]
    ]
    assert not bare


def test_the_existing_names_install_this_package(tmp_path: Path) -> None:
    """With a stand-in for our own wheel; `scripts/test-wheel` does it with the real one."""
    dist, target = tmp_path / "dist", tmp_path / "target"
    dist.mkdir()
    wheels.write_aliases(dist)
    wheels.write_wheel(dist, "mooncake-serving", mooncake.__version__, [])
    lines = ["mooncake-transfer-engine>=0.3.9", f"mooncake-transfer-engine-non-cuda=={wheels.LEVEL}"]
    words = ["--disable-pip-version-check", "--no-index", "--find-links", str(dist), "--target", str(target)]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-cache-dir", *words, *lines],
        env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {one.name: one.version for one in metadata.distributions(path=[str(target)])}
    alias = f"{wheels.LEVEL}+serving.{mooncake.__version__}"
    assert found == {
        "mooncake-serving": mooncake.__version__,
        "mooncake-transfer-engine": alias,
        "mooncake-transfer-engine-non-cuda": alias,
    }
    assert not (target / "mooncake").exists(), "an alias has no module"
    aliases = [one for one in metadata.distributions(path=[str(target)]) if one.name in wheels.NAMES]
    extras = project()["project"]["optional-dependencies"]
    for one in aliases:
        line = f"mooncake-serving[cli,gateway]=={mooncake.__version__}"
        assert one.requires == [line], "the existing package's programs need the extras"
    assert {"cli", "gateway"} <= set(extras)


BASE_ONLY = """
import re, sys
from importlib import metadata

names = [re.match("[A-Za-z0-9_.-]+", line)[0].lower() for line in sys.argv[1].split(";")]
missing = {"starlette", "uvicorn", "fastapi", "aiohttp", "httptools", "pydantic", "zmq", "xxhash"}
missing |= {"typer", "rich", "yaml", "grpc", "torch", "transformers", "cryptography", "opentelemetry"}
missing -= set(names)

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import mooncake.engine, mooncake.mooncake_config, mooncake.buffer_pool, mooncake.async_store
import mooncake.store as store
for name in dir(store):
    getattr(store, name)
import mooncake_vllm_adaptor
store = store.MooncakeDistributedStore()
print(store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "carrier pigeon", "", "127.0.0.1:9"))
"""


def test_the_store_and_the_engine_need_the_base_dependencies_only() -> None:
    needed = ";".join(project()["project"]["dependencies"])
    done = subprocess.run(
        [sys.executable, "-c", BASE_ONLY, needed], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.split()) == (0, ["-600"]), done.stderr


def test_an_alias_names_the_level_that_the_benches_compare_with() -> None:
    assert f'"mooncake-transfer-engine-non-cuda=={wheels.LEVEL}"' in (ROOT / "bench/vllm.py").read_text()


def test_aliases_of_another_level_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in wheels.write_aliases(tmp_path, "0.3.10.post2")]
    again = wheels.write_aliases(tmp_path, "0.3.10.post2")
    assert first == [path.read_bytes() for path in again] and len(again) == len(wheels.NAMES)
    assert all("-0.3.10.post2+serving." in path.name for path in again)
