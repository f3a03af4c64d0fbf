# SPDX-License-Identifier: Apache-2.0
"""``kubectl kustomize`` makes of the rendered kustomizations what ``tests/kustomize.py`` makes of them.

The other tests of manifests use that module, so that they need no kubectl; these show that they may.
"""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake.cli.deploy import make_credentials
from tests import kustomize
from tests.cli.test_deploy import VARIANTS, written


def built(folder: Path) -> dict[tuple[str, str], Any]:
    """Every object that kubectl makes of a kustomization, by kind and name."""
    command = [os.environ["MOONCAKE_TEST_KUBECTL"], "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "a warning, of a field that is deprecated"
    found = list(yaml.safe_load_all(done.stdout))
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


@pytest.mark.parametrize("variant", VARIANTS)
def test_overlays_are_what_the_other_tests_read(variant: str, tmp_path: Path) -> None:
    folder = written(VARIANTS[variant], tmp_path)
    overlays = sorted((folder / "kubernetes" / "overlays").iterdir())
    assert len(overlays) >= 3
    for overlay in overlays:
        ours = {(one["kind"], one["metadata"]["name"]): one for one in kustomize.build(overlay)}
        assert built(overlay) == ours, overlay.name


def test_secrets_have_the_files_and_nothing_of_the_authority(tmp_path: Path) -> None:
    folder = written(VARIANTS["default"], tmp_path) / "secrets"
    make_credentials(folder)
    found = built(folder)
    names = {name for _, name in found}
    assert names == {"mooncake-tls", "mooncake-prometheus", "mooncake-clients", "mooncake-admin"}
    given = {
        (name, key): base64.b64decode(value)
        for (_, name), one in found.items()
        for key, value in one["data"].items()
    }
    assert given["mooncake-admin", "ADMIN_API_KEY"] == (folder / "admin.key").read_bytes()
    for name, key in given.keys() - {("mooncake-admin", "ADMIN_API_KEY")}:
        assert given[name, key] == (folder / key).read_bytes()
    assert (folder / "ca.key").read_bytes() not in given.values()
