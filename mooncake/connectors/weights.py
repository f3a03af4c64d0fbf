# SPDX-License-Identifier: Apache-2.0
"""The identity of a model's weights: a digest of its folder.

All bytes of all weights count, and with them the files that change what is computed: configurations,
and the code of models that bring their own. Models that differ in a few rows (a vocabulary that was extended,
an adapter merged into some heads, pruned or edited weights) must not read each other's blocks, and no choice
of samples finds every such difference. Each host reads a model once for this (``digests.py``).

``is_sampled`` is a fast mode for users who know that they serve no two models that differ in some rows only:
it reads a few MB. With it, such models share blocks, and answers are wrong without an error.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mooncake import clock
from mooncake.connectors.digests import file_digest
from mooncake.errors import InvalidArgument, ModelError
from mooncake.log import get_logger

log = get_logger(__name__)

SAMPLES = 3
"""Samples per tensor in the fast mode: its beginning, its middle and its end."""

SAMPLE_BYTES = 4096

FILE_SAMPLES = 256
"""Samples per file of an unknown format."""

_TENSORS = ("*.safetensors",)
_OTHER_FORMATS = ("*.gguf", "*.bin", "*.pt", "*.pth")
_CONFIGURATION = ("config.json", "params.json", "*quant*.json", "adapter_config.json", "*.index.json")
_SMALL = (".json", ".py")
"""Files that are read whole in the fast mode, too."""

SAMPLED = "sampled_weights"
"""The option of an engine's extra configuration that selects the fast mode."""


def weights_of(
    model: str,
    owner: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    is_made_up: bool = False,
    is_sampled: bool = False,
) -> str:
    """A digest of the weights of ``model``, a folder or the name of one that the hub's client has here.

    For weights that can't be read (random ones, or from an unknown place) it is ``owner``, so that only
    engines with the same ``owner`` share blocks.
    """
    reason = "random weights"
    if not is_made_up:
        try:
            began = clock.monotonic()
            digest = folder_digest(_folder_of(model, revision, cache_dir), is_sampled, cache_dir)
            seconds = round(clock.monotonic() - began, 2)
            log.info("weights_hashed", model=model, digest=digest[:16], sampled=is_sampled, seconds=seconds)
            return digest
        except (ModelError, OSError, ValueError, ImportError) as error:
            reason = str(error)
    log.warning("weights_unknown", model=model, reason=reason, consequence="blocks are not shared")
    return owner


def is_sampled(extra: Mapping[str, Any]) -> bool:
    """Whether an engine's extra configuration selects the fast mode. Raises InvalidArgument."""
    value = extra.get(SAMPLED, False)
    if not isinstance(value, bool):
        raise InvalidArgument(SAMPLED, value, "true or false")
    if value:
        log.warning(SAMPLED, risk="models that differ in some rows of a tensor share blocks: wrong answers")
    return value


def _folder_of(model: str, revision: str | None, cache_dir: str | None) -> Path:
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download  # installed only where models are named by hub names

    return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))


def folder_digest(folder: Path, is_sampled: bool = False, cache_dir: str | None = None) -> str:
    """SHA-256 over all weights of ``folder`` (or of the one file it is), their configuration and their code.

    ``cache_dir``: the hub client's cache, with code that the configuration names in another repository.

    Raises:
        ModelError: there are no weights, or a file is damaged or changes.
        OSError: a file can't be read.
    """
    kind = "sampled" if is_sampled else "all"
    total = hashlib.sha256(f"mooncake-weights-2 {kind}\n".encode())
    for name, path in _files_of(folder, cache_dir):
        digest = _sampled(path) if is_sampled else file_digest(path)
        total.update(f"{name}\0{digest}\n".encode())
    return total.hexdigest()


def _files_of(folder: Path, cache_dir: str | None) -> list[tuple[str, Path]]:
    """(name, path) of each file that counts, in a fixed order. Raises ModelError."""
    if folder.is_file():
        return [(folder.name, folder)]
    files = [path for pattern in _TENSORS for path in sorted(folder.glob(pattern))]
    if not files:
        files = [path for pattern in _OTHER_FORMATS for path in sorted(folder.glob(pattern))]
    if not files:
        raise ModelError(f"{folder} has no weights ({', '.join(_TENSORS + _OTHER_FORMATS)})")
    files += [path for pattern in _CONFIGURATION for path in sorted(folder.glob(pattern))]
    named = {path.name: path for path in files}
    named |= {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    for repository in _code_of_others(folder):
        elsewhere = _folder_of(repository, None, cache_dir)
        named |= {f"{repository}/{path.name}": path for path in sorted(elsewhere.rglob("*.py"))}
    return list(named.items())


def _code_of_others(folder: Path) -> list[str]:
    """Repositories whose code ``config.json`` names (``auto_map: {AutoModel: owner/name--file.Class}``)."""
    path = folder / "config.json"
    if not path.is_file():
        return []
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not readable JSON ({error}); fetch the model again") from error
    named = config.get("auto_map") if isinstance(config, dict) else None
    values = list(named.values()) if isinstance(named, dict) else []
    flat = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return sorted({one.partition("--")[0] for one in flat if isinstance(one, str) and "--" in one})


def _sampled(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        total.update(f"{size}\n".encode())
        if path.suffix in _SMALL:
            total.update(file.read())
            return total.hexdigest()
        spans = _tensors(path, size) if path.suffix == ".safetensors" else [(0, size, FILE_SAMPLES)]
        for start, length, samples in spans:
            for offset in _places(length, samples):
                total.update(os.pread(file.fileno(), SAMPLE_BYTES, start + offset))
    return total.hexdigest()


def _places(length: int, samples: int) -> list[int]:
    """Offsets, evenly from the beginning to the last full sample."""
    last = max(0, length - SAMPLE_BYTES)
    return sorted({last * index // (samples - 1) for index in range(samples)})


def _tensors(path: Path, size: int) -> list[tuple[int, int, int]]:
    """(offset, bytes, samples) of the header and of each tensor of a safetensors file."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if not 0 < header_bytes <= size - 8:
            raise ModelError(f"{path} is damaged: its header says {header_bytes} of {size} bytes")
        header = json.loads(file.read(header_bytes))
    start = 8 + header_bytes
    spans = [(0, start, -(-start // SAMPLE_BYTES) + 1)]  # all of it
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            spans.append((start + begin, end - begin, SAMPLES))
    return spans
