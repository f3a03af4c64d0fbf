# SPDX-License-Identifier: Apache-2.0
"""Folders of this package that are not as pip leaves them: what the error says, and which command it names.

Every import runs in a process of its own, over a copy of the package, without what ``.pth`` files add.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mooncake
from aliases import wheels
from mooncake.installation import REINSTALL, check_folder, why_no_native

PACKAGE = Path(mooncake.__file__).parent
THEIRS = "mooncake-transfer-engine-non-cuda"
EXTENSION_MODULES = ("engine.so", "store.so")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Folder with a copy of the package: what an installation without its native extension leaves."""
    folder = tmp_path / "site"
    shutil.copytree(PACKAGE, folder / "mooncake", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def imported(site: Path, module: str, *more: Path) -> tuple[int, str]:
    """Exit status of the import, and what it printed or the last line of its error."""
    libraries = [entry for entry in sys.path if entry.endswith("site-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [site, *more, *libraries]))}
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import {module}; print({module}.__file__)"],
        env=environment, cwd=site, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, (done.stdout or done.stderr).strip().splitlines()[-1]


def lay_over(site: Path, name: str, version: str, files: tuple[str, ...]) -> None:
    """Another distribution's extension modules, with the record that pip keeps of them."""
    for file in files:
        (site / "mooncake" / file).write_bytes(b"\x7fELF")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"mooncake/{file},,\n" for file in files))


def test_ours_over_theirs(site: Path) -> None:
    lay_over(site, THEIRS, "0.3.13.post1", EXTENSION_MODULES)
    status, error = imported(site, "mooncake")
    assert status == 1 and error.startswith("ImportError: ")
    assert f"{site}/mooncake has files of mooncake-serving and of {THEIRS} 0.3.13.post1 (engine.so" in error
    assert f"`pip uninstall -y {THEIRS}`" in error and REINSTALL in error


def test_theirs_over_ours(site: Path) -> None:
    """Their ``__init__.py`` took the place of ours, so the store says it."""
    lay_over(site, THEIRS, "0.3.13.post1", EXTENSION_MODULES)
    (site / "mooncake" / "__init__.py").write_text('"""Another package."""\n')
    assert imported(site, "mooncake")[0] == 0
    status, error = imported(site, "mooncake.store")
    assert status == 1 and f"of {THEIRS} 0.3.13.post1 (engine.so, store.so)" in error


def test_without_a_record_of_the_other_the_usual_name_is_said(site: Path) -> None:
    (site / "mooncake" / "engine.cpython-311-x86_64-linux-gnu.so").write_bytes(b"")
    status, error = imported(site, "mooncake")
    assert status == 1 and "of another distribution (engine.cpython" in error
    assert "`pip uninstall -y mooncake-transfer-engine`" in error


def test_theirs_was_uninstalled_and_took_files_of_ours(site: Path) -> None:
    (site / "mooncake" / "__init__.py").unlink()
    status, error = imported(site, "mooncake.store")
    assert status == 1 and "has no __init__.py" in error and REINSTALL in error


def test_an_alias_is_no_other_distribution(site: Path) -> None:
    for made in wheels.write_aliases(site):
        shutil.unpack_archive(made, site, "zip")
    assert list(site.glob("mooncake_transfer_engine-*.dist-info"))
    assert imported(site, "mooncake.store") == (0, f"{site}/mooncake/store/__init__.py")


def test_a_package_in_a_zip_file_is_not_checked(site: Path, tmp_path: Path) -> None:
    shutil.make_archive(str(tmp_path / "bundle"), "zip", site)
    archive = tmp_path / "bundle.zip"
    shutil.rmtree(site / "mooncake")
    status, where = imported(site, "mooncake", archive)
    assert (status, where) == (0, f"{archive}/mooncake/__init__.py")


def test_a_bundle_s_folder_without_modules_is_not_checked(tmp_path: Path) -> None:
    """As PyInstaller makes it: the modules are in an archive, extensions and data in the folder."""
    (tmp_path / "_native.cpython-311-x86_64-linux-gnu.so").touch()
    (tmp_path / "sim").mkdir()
    check_folder(str(tmp_path))


def test_a_folder_that_can_not_be_listed_is_not_checked(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_folder(str(site / "missing"))

    def refused(folder: str) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", folder)

    monkeypatch.setattr(os, "listdir", refused)
    check_folder(str(site / "mooncake"))
    assert "which has no native extension" in why_no_native(str(site / "mooncake"))


TRANSFER = ("mooncake.transfer", "mooncake.transfer.transports.tcp", "mooncake.engine")


@pytest.mark.parametrize("module", TRANSFER)
def test_no_native_extension_and_no_checkout(site: Path, module: str) -> None:
    status, error = imported(site, module)
    assert status == 1 and error == (
        f"ImportError: mooncake was imported from {site}/mooncake, which has no native extension. {REINSTALL}"
    )


def test_an_extension_for_another_python(site: Path) -> None:
    (site / "mooncake" / "_native.cpython-399-x86_64-linux-gnu.so").write_bytes(b"")
    status, error = imported(site, "mooncake.transfer")
    assert status == 1 and "(_native.cpython-399-x86_64-linux-gnu.so) is built for another Python" in error
    assert sys.implementation.cache_tag in error and REINSTALL in error


def test_a_checkout_that_is_not_built(site: Path, tmp_path: Path) -> None:
    (site / "CMakeLists.txt").touch()
    installed = tmp_path / "installed" / "mooncake"
    installed.mkdir(parents=True)
    (installed / "_native.cpython-311-x86_64-linux-gnu.so").touch()
    status, error = imported(site, "mooncake.transfer", installed.parent)
    assert status == 1 and f"imported from the checkout {site}, in which" in error
    assert f"that is installed in {installed}, start Python in another folder, or as `python -P`" in error
    assert f"run `make serve` or scripts/install in it, then {site}/.venv/bin/python" in error


def test_what_needs_no_native_extension_imports_without(site: Path) -> None:
    assert imported(site, "mooncake.sim")[0] == 0


def test_the_check_imports_nothing_that_is_slow() -> None:
    script = "import sys; import mooncake.installation; print(*sys.modules)"
    words = [sys.executable, "-S", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True, cwd=PACKAGE.parent, timeout=60)
    modules = set(done.stdout.split())
    assert "mooncake.installation" in modules, done.stderr
    assert not modules & {"importlib.metadata", "pathlib", "email", "shutil"}
