# SPDX-License-Identifier: Apache-2.0
"""What ``kubectl kustomize`` makes of a folder, for the few fields that our kustomizations use.

Resources of other folders and files, the namespace, and patches of one object by kind and name: maps are
merged, lists of things with names by name, and other lists are replaced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]
WITHOUT_NAMESPACE = {"Namespace"}
FIELDS = {"apiVersion", "kind", "namespace", "resources", "patches"}


def build(folder: Path) -> list[Manifest]:
    """Every object of the kustomization in ``folder``."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert kustomization.keys() <= FIELDS, "a field that this module does not know"
    found: list[Manifest] = []
    for name in kustomization["resources"]:
        path = folder / name
        found += build(path) if path.is_dir() else manifests(path)
    for patch in kustomization.get("patches", []):
        (change,) = manifests(folder / patch["path"])
        (at,) = [
            number
            for number, one in enumerate(found)
            if (one["kind"], one["metadata"]["name"]) == (change["kind"], change["metadata"]["name"])
        ]
        found[at] = merged(found[at], change)
    for one in found:
        if one["kind"] not in WITHOUT_NAMESPACE:
            one["metadata"]["namespace"] = kustomization["namespace"]
            for subject in one.get("subjects", []):
                subject.setdefault("namespace", kustomization["namespace"])
    names = [(one["kind"], one["metadata"]["name"]) for one in found]
    assert len(names) == len(set(names)), "an object stands twice"
    return found


def manifests(path: Path) -> list[Manifest]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def merged(old: Any, change: Any) -> Any:
    """``old`` with a strategic merge patch."""
    if isinstance(old, dict) and isinstance(change, dict):
        return {**old, **{name: merged(old.get(name), value) for name, value in change.items()}}
    if isinstance(old, list) and isinstance(change, list) and all(_has_name(one) for one in [*old, *change]):
        changes = {one["name"]: one for one in change}
        kept = [merged(one, changes.pop(one["name"], one)) for one in old]
        return kept + list(changes.values())
    return change


def _has_name(one: Any) -> bool:
    return isinstance(one, dict) and "name" in one
