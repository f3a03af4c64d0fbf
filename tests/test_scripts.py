# SPDX-License-Identifier: Apache-2.0
"""The scripts of CI and of the night: every part runs, the worst decides, the end says what was tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "scripts").iterdir())
PARTS = ("sanitize", "install-servers", "test-clients", "test-image", "test-ray", "test-vllm")
MAKEFILE = """\
.venv/.installed-dev:
\t@exit {install}
check:
\t@echo checked; exit {check}
test:
\t@echo '7 passed, 2 skipped in 3.00s'
\t@printf '\\033[31m== 1 failed, 3 passed, 1 warning in 61.20s (0:01:01) ==\\033[0m\\n'; exit {test}
"""


def ci(
    folder: Path, *steps: str, install: int = 0, check: int = 0, test: int = 0, **parts: str
) -> tuple[int, str]:
    """Run ``.ci/run`` over doubles of what it calls; return the exit status and the output."""
    shutil.copytree(ROOT / ".ci", folder / ".ci")
    (folder / "scripts").mkdir()
    (folder / "Makefile").write_text(MAKEFILE.format(install=install, check=check, test=test))
    for name in PARTS:
        script = folder / "scripts" / name
        script.write_text("#!/bin/sh\n" + parts.get(name.replace("-", "_"), "exit 0\n"))
        script.chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if name != "VENV"}
    done = subprocess.run(
        [folder / ".ci" / "run", *steps], env=environment, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout


def test_one_failure_throws_nothing_away(tmp_path: Path) -> None:
    status, said = ci(tmp_path, check=2, test_vllm="echo '20 passed in 65.20s'\n", sanitize="exit 3\n")
    assert status == 3, "the worst"
    for line in ("check ", "sanitize ", "test ", "clients ", "vllm "):
        assert line in said.split("== steps")[1]
    assert "FAILED with 3" in said and said.count("FAILED") == 2


def test_it_ends_with_what_all_tests_came_to(tmp_path: Path) -> None:
    status, said = ci(tmp_path, test=1, test_clients="echo '13 passed in 40.00s'\n")
    last = said.strip().splitlines()[-1]
    assert status > 0 and last.startswith("1 failed, 23 passed, 2 skipped, 1 warning in ")


def test_packages_that_cannot_be_fetched_are_said_and_no_failure(tmp_path: Path) -> None:
    status, said = ci(tmp_path, "clients", test_clients="echo '== NOT TESTED: x' >&2; exit 77\n")
    assert status == 0 and "NOT TESTED: the packages could not be fetched" in said


def test_an_image_that_cannot_be_built_is_said_and_no_failure(tmp_path: Path) -> None:
    status, said = ci(tmp_path, "image", test_image="echo '== NOT TESTED: x' >&2; exit 77\n")
    assert status == 0 and "NOT TESTED: the image could not be built" in said


def test_without_an_installation_nothing_else_is_tried(tmp_path: Path) -> None:
    status, said = ci(tmp_path, install=1)
    assert status > 0 and "checked" not in said and said.strip().splitlines()[-1].startswith("no tests ran")


def test_an_unknown_step_is_an_error(tmp_path: Path) -> None:
    status, said = ci(tmp_path, "tests")
    assert status == 2 and "no step tests" in said


def test_a_night_goes_on_after_an_unknown_part_and_says_its_seed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    integrity = tmp_path / "scripts" / "integrity"
    integrity.write_text('#!/bin/sh\necho "integrity $*"\n')
    environment = {**os.environ, "VENV": sys.prefix, "SEED": "42", "SCALE": "0.01"}
    done = subprocess.run(
        [tmp_path / "scripts" / "nightly", "nonsense", "integrity"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "integrity --flips 10 --seed 42" in done.stdout
    assert "SEED=42 SCALE=0.01 scripts/nightly integrity" in done.stdout
    summary = done.stdout.split("== nightly")[1]
    assert "nonsense" in summary and "FAILED 2" in summary and "integrity   ok" in summary


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_a_program_that_its_shell_can_read(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    shell = "bash" if "bash" in path.read_text().splitlines()[0] else "sh"
    done = subprocess.run([shell, "-n", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_runs_in_the_environment_that_venv_names(script: str) -> None:
    assert ".venv/bin" not in (ROOT / "scripts" / script).read_text(), "${VENV:-.venv}/bin is meant"


PYTHON = """\
#!/bin/sh
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/bin/pip" && chmod +x "$3/bin/pip" ;;
  "-m pip")
    echo "$*" >> "$PIP_LOG"
    case "$*" in *--no-index*) exit 1 ;; esac
    case "$*" in *+cpu*) exit "$CPU_STATUS" ;; esac ;;
  "--version ") echo Python 3.12.0 ;;
esac
"""


def install(
    folder: Path, venv: str, cpu_status: int = 0, free_mib: int = 90_000
) -> tuple[int, str, list[str]]:
    """Run ``scripts/install`` with doubles of the programs that it calls; the status, the output, and pip's
    arguments."""
    programs = folder / "programs"
    programs.mkdir()
    (folder / "checkout" / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "install", folder / "checkout" / "scripts")
    (folder / "checkout" / "pyproject.toml").touch()
    df = f'#!/bin/sh\necho "$2" >> "$DF_LOG"; echo x; echo disk 1 1 {free_mib} 1% /\n'
    for name, text in {
        "python": PYTHON,
        "cxx": "#!/bin/sh\n",
        "df": df,
        "nvidia-smi": "#!/bin/sh\nexit 9\n",
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    done = subprocess.run(
        [folder / "checkout" / "scripts" / "install", "serve"],
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHON": str(programs / "python"),
            "CXX": str(programs / "cxx"),
            "VENV": venv,
            "PIP_LOG": str(folder / "pip.log"),
            "DF_LOG": str(folder / "df.log"),
            "CPU_STATUS": str(cpu_status),
        },
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    log = folder / "pip.log"
    return done.returncode, done.stdout + done.stderr, log.read_text().splitlines() if log.exists() else []


def test_a_host_without_a_gpu_gets_no_libraries_for_gpus_where_its_index_has_a_build_for_cpus(
    tmp_path: Path,
) -> None:
    status, said, calls = install(tmp_path, ".venv")
    assert status == 0, said
    assert not [
        call for call in calls if "torch==" in call and "+cpu" not in call and "--no-index" not in call
    ]


def test_the_torch_of_pypi_is_the_last_choice_and_said(tmp_path: Path) -> None:
    status, said, calls = install(tmp_path, ".venv", cpu_status=1)
    assert status == 0 and "which may bring several GB" in said
    assert [call.split("torch==")[1].split()[0] for call in calls if "torch==" in call] == [
        "2.13.0", "2.13.0+cpu", "2.13.0",
    ]  # fmt: skip


def test_the_free_space_is_that_of_the_disk_that_venv_names(tmp_path: Path) -> None:
    venv = tmp_path / "big" / "disk" / "venv"
    venv.parent.mkdir(parents=True)
    status, said, _ = install(tmp_path, str(venv), free_mib=100)
    assert status == 2 and f"100 MiB are free for {venv}" in said
    assert (tmp_path / "df.log").read_text().split() == [str(venv.parent)]
