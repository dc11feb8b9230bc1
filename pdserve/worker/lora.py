"""Reads the LoRA adapters that a worker serves: checks their directories and computes revisions.

A revision is a hash of the files that decide what an adapter computes. Two workers that serve other
files under one name have other revisions, and the cluster notices. Reading blocks for as long as
the weights take to read: call it in a thread. It does not interpret weights; engines do.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import ConfigError
from pdserve.messages.lora import LoraAdapter

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["check_names", "read_adapters"]

_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
_REST: Final = ("new_embeddings.safetensors", "new_embeddings.bin")
"""Files of older adapters that extend the vocabulary."""
_REVISION_BYTES: Final = 16
_CHUNK: Final = 1 << 20


class _Config(msgspec.Struct):
    """The part of `adapter_config.json` that is read here, with the keys of that file."""

    peft_type: str = "LORA"
    r: int = 0
    rank_pattern: dict[str, int] = {}


def check_names(loras: Mapping[str, str], served: Collection[str]) -> None:
    """Raises `ConfigError` if an adapter has a name of the model itself."""
    for name in loras:
        if name in served:
            raise ConfigError(f"lora {name!r}: the model itself is served under this name")


def read_adapters(loras: Mapping[str, str]) -> tuple[LoraAdapter, ...]:
    """Reads the adapters in these directories, in the order given.

    Errors: `ConfigError` names the adapter and what is wrong with its directory.
    """
    return tuple(_read(name, Path(path).expanduser()) for name, path in loras.items())


def _read(name: str, path: Path) -> LoraAdapter:
    files = _files(name, path)
    config = _config(name, path / _CONFIG)
    if config.peft_type != "LORA":
        raise ConfigError(
            f"lora {name!r}: {path / _CONFIG} describes a {config.peft_type} adapter, only LORA "
            "is served"
        )
    return LoraAdapter(
        name=name,
        path=str(path.resolve()),
        revision=_revision(name, files),
        rank=max(0, config.r, *config.rank_pattern.values()),
    )


def _files(name: str, path: Path) -> list[Path]:
    """The files that decide what the adapter computes, in a fixed order."""
    if not path.is_dir():
        raise ConfigError(
            f"lora {name!r}: there is no directory {str(path)!r}; an adapter of the hub has to be "
            "downloaded first"
        )
    if not (path / _CONFIG).is_file():
        raise ConfigError(f"lora {name!r}: {str(path)!r} has no {_CONFIG}")
    weights = next((path / each for each in _WEIGHTS if (path / each).is_file()), None)
    if weights is None:
        raise ConfigError(f"lora {name!r}: {str(path)!r} has no {_WEIGHTS[0]}")
    rest = [path / each for each in _REST if (path / each).is_file()]
    return [path / _CONFIG, weights, *rest]


def _config(name: str, file: Path) -> _Config:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Config)
    except OSError as error:
        raise ConfigError(f"lora {name!r}: {file} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"lora {name!r}: {file} is not valid: {error}") from None


def _revision(name: str, files: list[Path]) -> str:
    """Hashes names and contents."""
    whole = hashlib.blake2b(digest_size=_REVISION_BYTES)
    for file in files:
        try:
            content = _digest(file)
        except OSError as error:
            raise ConfigError(f"lora {name!r}: {file} cannot be read: {error.strerror}") from None
        whole.update(file.name.encode() + b"\0" + content)
    return whole.hexdigest()


def _digest(file: Path) -> bytes:
    """A file's hash, of fixed length. Weights may be larger than memory, so they are read in
    pieces."""
    state = hashlib.blake2b()
    with file.open("rb") as stream:
        while piece := stream.read(_CHUNK):
            state.update(piece)
    return state.digest()
