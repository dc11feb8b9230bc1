"""Resolves `--model` to a local directory that holds a checkpoint.

The value is empty (the bundled model), a directory, or a hub id. Deciding which is pure; only
`fetch` does I/O, and the download runs in a child process (`pdserve.worker.download`) that can be
stopped at any moment. `card.py` and the engine interpret the files.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pdserve
from pdserve.errors import ConfigError

ProgressFn = Callable[[str, float | None], None]
"""Called with (stage in words, fraction 0..1 or None)."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
BUNDLED = "bundled"
"""Folder in the package, and the name under which the bundled model is served."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A directory to load from, and the name it is served by unless the operator gives another."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model to download, or to find in the cache, before it can be loaded."""

    repo: str
    revision: str | None = None

    @property
    def name(self) -> str:
        return self.repo


def locate(model: str) -> LocalModel | HubModel:
    """Decides whether `model` is the bundled model, a directory or a hub id.

    Errors: `ConfigError` when it is neither a usable directory nor a possible hub id.
    """
    if not model:
        return _bundled()
    path = Path(model).expanduser()
    if path.exists():
        return LocalModel(_checked(path.resolve()), path.resolve().name)
    if model.startswith(("/", "./", "../", "~")) or not _HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model {model!r}: no such directory (for a hub model write organisation/name)"
        )
    repo, _, revision = model.partition("@")
    return HubModel(repo, revision or None)


async def fetch(hub: HubModel, on_progress: ProgressFn, cache_dir: str = "") -> LocalModel:
    """Downloads `hub` unless the cache has it; returns its local directory.

    Errors: `ConfigError` with cause and remedy. Cancellation: the download stops; complete files
    stay in the cache and the next call resumes.
    """
    command = [sys.executable, "-m", "pdserve.worker.download", hub.repo, hub.revision or ""]
    child = await asyncio.create_subprocess_exec(
        *command, cache_dir, str(os.getpid()), stdout=asyncio.subprocess.PIPE
    )
    try:
        answer = await _follow(child, on_progress)
        await child.wait()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if "path" in answer:
        return LocalModel(_checked(Path(answer["path"])), hub.name)
    raise ConfigError(answer.get("error") or f"the download of {hub.repo} ended unexpectedly")


async def _follow(child: asyncio.subprocess.Process, on_progress: ProgressFn) -> dict[str, str]:
    """Passes the child's progress lines on; its last line is the result."""
    assert child.stdout is not None
    answer: dict[str, str] = {}
    async for line in child.stdout:
        message = json.loads(line)
        if "stage" in message:
            on_progress(message["stage"], message["fraction"])
        else:
            answer = message
    return answer


def _bundled() -> LocalModel:
    """The model inside the package."""
    folder = Path(pdserve.__file__).parent / BUNDLED
    if (folder / "config.json").is_file():
        return LocalModel(_checked(folder), BUNDLED)
    raise ConfigError(
        "this installation carries no bundled model: name one with --model DIRECTORY or "
        "--model organisation/name"
    )


def _checked(path: Path) -> Path:
    """Returns `path` if it looks like a checkpoint directory; else raises `ConfigError`."""
    if not path.is_dir():
        remedy = _GGUF if path.suffix == ".gguf" else "give the directory that holds it"
        raise ConfigError(f"model {str(path)!r} is a file: {remedy}")
    for name in ("config.json", "tokenizer.json"):
        instead = path / "tekken.json" if name == "tokenizer.json" else path / name
        if not (path / name).is_file() and not instead.is_file():
            raise ConfigError(f"model directory {str(path)!r} has no {name}{_hint(path, name)}")
    return path


_GGUF = (
    "GGUF files are not supported, give a Hugging Face checkpoint of the model, a directory with "
    "config.json and model.safetensors"
)


def _hint(path: Path, missing: str) -> str:
    """Suggests what the operator probably meant."""
    if any(path.glob("*.gguf")):
        return f": {_GGUF}"
    if missing == "config.json" and (path / "adapter_config.json").is_file():
        return (
            ": it holds a LoRA adapter, which is not served by itself: give its base model with "
            "--model and the adapter with --lora NAME=DIR if the engine computes adapters, else "
            "merge it into its base model (peft's merge_and_unload) and give the result"
        )
    if missing == "config.json" and (path / "params.json").is_file():
        return (
            ": it is in Mistral's own format: give the same model as a Hugging Face checkpoint, "
            "with config.json and model.safetensors"
        )
    if missing == "tokenizer.json" and (tiktoken := _tiktoken(path)):
        return (
            f": {tiktoken} alone is not supported: give a tokenizer.json of the same "
            "vocabulary, as converted checkpoints on the hub have"
        )
    inner = sorted(child.parent.name for child in path.glob("*/config.json"))
    if missing == "config.json" and inner:
        return f": did you mean {str(path / inner[0])!r}?"
    pieces = sorted(path.glob("tokenizer.model*"))
    if missing == "tokenizer.json" and pieces:
        found = pieces[0].name
        copy = "" if found == "tokenizer.model" else "copy it to tokenizer.model, then "
        return (
            f": convert {found} first, with transformers and sentencepiece installed: {copy}"
            f"python -c 'from transformers import AutoTokenizer as T; "
            f'T.from_pretrained("{path}").save_pretrained("{path}")\''
        )
    return ": a Hugging Face checkpoint directory is needed"


def _tiktoken(path: Path) -> str:
    """The tiktoken vocabulary of the checkpoint, in words; empty if it has none."""
    for found in (path / "tiktoken.model", *sorted(path.glob("*.tiktoken"))):
        if found.is_file():
            return found.name
    # A download brings no such file, but this one names the class that reads it.
    config = path / "tokenizer_config.json"
    if config.is_file() and b"tiktoken" in config.read_bytes().lower():
        return "a tiktoken vocabulary"
    return ""
