"""Whose numbers a KV cache holds: a digest of a model's folder that is cheap for 140 GB.

Every tensor counts with its name, shape and some of its bytes, so that a fine-tuned model, which changes
a little of everything, and one with some layers exchanged are both told apart; what is read is a few MB.
Our own worker hashes all bytes once and remembers it (``inference.weights``); engines that others start
again and again on other hosts should not wait for that.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from mooncake.errors import ModelError
from mooncake.log import get_logger

log = get_logger(__name__)

SAMPLES = 3
"""Places in a tensor that are looked at: its beginning, its middle and its end."""

SAMPLE_BYTES = 4096

FILE_SAMPLES = 256
"""Places in a file whose inside we don't know."""

_TENSORS = ("*.safetensors",)
_OTHER_FORMATS = ("*.gguf", "*.bin", "*.pt", "*.pth")
_CONFIGURATION = ("config.json", "*quant*.json", "adapter_config.json")


def weights_of(
    model: str,
    owner: str,
    *,
    revision: str | None = None,
    cache_dir: str | None = None,
    is_made_up: bool = False,
) -> str:
    """A digest of the weights of ``model``, a folder or the name of one that the hub's client has here.

    Weights that can't be looked at (made up, or from a place we don't know) are nobody else's: then it is
    ``owner``, and blocks are shared by nobody but those who say the same.
    """
    reason = "random weights"
    if not is_made_up:
        try:
            return sampled_digest(_folder_of(model, revision, cache_dir))
        except (ModelError, OSError, ValueError, ImportError) as error:
            reason = str(error)
    log.warning("weights_unknown", model=model, reason=reason, consequence="blocks are not shared")
    return owner


def _folder_of(model: str, revision: str | None, cache_dir: str | None) -> Path:
    path = Path(model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download  # only who names a model by its hub name has it

    return Path(snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True))


def sampled_digest(folder: Path) -> str:
    """SHA-256 over samples of all weights of ``folder`` (or of the one file it is) and their configuration.

    Raises:
        ModelError: there are no weights, or a file is damaged.
    """
    if folder.is_file():
        return _digest([folder])
    files = [path for pattern in _TENSORS for path in sorted(folder.glob(pattern))]
    if not files:
        files = [path for pattern in _OTHER_FORMATS for path in sorted(folder.glob(pattern))]
    if not files:
        raise ModelError(f"{folder} has no weights ({', '.join(_TENSORS + _OTHER_FORMATS)})")
    return _digest(files + [path for pattern in _CONFIGURATION for path in sorted(folder.glob(pattern))])


def _digest(files: list[Path]) -> str:
    total = hashlib.sha256(b"mooncake-weights-1")
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            total.update(f"{path.name} {size}\n".encode())
            if path.suffix == ".json":
                total.update(file.read())
                continue
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
