"""Reads how a model turns token states into embeddings and logits into scores.

Its files or the operator's option say it. Embedding models carry sentence-transformers files:
`modules.json` lists the steps, and the pooling step's `config.json` says which rows are taken.
Reading them blocks for a moment. Does not know what the engine can compute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from pdserve.errors import ConfigError
from pdserve.messages.request import Pooling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.card import ScoreActivation

__all__ = ["PoolerConfig", "PoolingOption", "read_pooler_config", "read_score_activation"]

PoolingOption = Literal["auto", "none", "mean", "last"]

_MODES: Final[Mapping[str, Pooling]] = {
    "mean_tokens": "mean",
    "mean": "mean",
    "lasttoken": "last",
    "last": "last",
}
_KNOWN: Final = ("Transformer", "Pooling", "Normalize")
_REMEDY: Final = "choose --pooling=mean or last, or serve it for text alone with --pooling=none"


class PoolerConfig(msgspec.Struct, frozen=True):
    """How a text becomes an embedding."""

    pooling: Pooling = ""
    """Which hidden states are pooled; empty: the model makes no embeddings."""
    normalize: bool = False
    """Embeddings are scaled to length 1."""
    dimensions: tuple[int, ...] = ()
    """Sizes an embedding may be cut to, as in `ModelCard.dimensions`."""


def read_pooler_config(path: Path, asked: PoolingOption) -> PoolerConfig:
    """Reads the pooling of the checkpoint in `path`; `asked` is one of the config's `POOLINGS`.

    Errors: `ConfigError` for broken files and, with `auto`, for steps that no engine here supports;
    the message names them.
    """
    if asked == "none":
        return PoolerConfig()
    modules = _modules(path)
    normalize = any(kind == "Normalize" for kind, _ in modules)
    pooling: Pooling = _pooling(path, modules) if asked == "auto" else asked
    if not pooling:
        return PoolerConfig()
    return PoolerConfig(pooling, normalize, _dimensions(path))


def _modules(path: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each step, in order; empty if the model has no `modules.json`."""
    listed = _read(path / "modules.json")
    if listed is None:
        return []
    try:
        return [(str(m["type"]).rpartition(".")[2], str(m.get("path", ""))) for m in listed]
    except (TypeError, KeyError, AttributeError):
        raise ConfigError(f"{path / 'modules.json'} is not a list of modules") from None


def _pooling(path: Path, modules: Sequence[tuple[str, str]]) -> Pooling:
    """The pooling that the model declares; empty if it declares none."""
    if not modules:
        return ""
    strange = [kind for kind, _ in modules if kind not in _KNOWN]
    if strange:
        raise ConfigError(
            f"{path / 'modules.json'}: no engine supports a {strange[0]} step; {_REMEDY}"
        )
    folders = [folder for kind, folder in modules if kind == "Pooling"]
    if len(folders) != 1 or ".." in PurePosixPath(folders[0]).parts:
        raise ConfigError(f"{path / 'modules.json'} does not name one folder of pooling; {_REMEDY}")
    file = path / folders[0].lstrip("/") / "config.json"
    config = _read(file)
    if not isinstance(config, Mapping):
        raise ConfigError(f"{file} is missing or holds no JSON object; {_REMEDY}")
    return _mode(file, config)


def _mode(file: Path, config: Mapping[str, Any]) -> Pooling:
    prefix = "pooling_mode_"
    modes = [name.removeprefix(prefix) for name in config if name.startswith(prefix)]
    modes = [mode for mode in modes if config[prefix + mode] is True]
    if isinstance(config.get("pooling_mode"), str):
        modes.append(config["pooling_mode"])
    if len(modes) != 1 or modes[0] not in _MODES:
        found = " and ".join(modes) or "nothing"
        raise ConfigError(
            f"{file}: the model pools by {found}, which no engine supports; {_REMEDY}"
        )
    return _MODES[modes[0]]


def read_score_activation(path: Path) -> ScoreActivation:
    """Reads which function of its logit a reranker's score is: the sigmoid, unless its
    sentence-transformers files say otherwise.

    Errors: `ConfigError` for broken files and for a function that is not supported.
    """
    for name in ("config_sentence_transformers.json", "config.json"):
        config = _read(path / name)
        if not isinstance(config, Mapping):
            continue
        nested = config.get("sentence_transformers")
        nested = nested if isinstance(nested, Mapping) else {}
        older = config.get("sbert_ce_default_activation_function")
        function = config.get("activation_fn") or nested.get("activation_fn") or older
        if function:
            return _activation(path / name, str(function))
    return "sigmoid"


def _activation(file: Path, function: str) -> ScoreActivation:
    known: Mapping[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
    found = known.get(function.rpartition(".")[2])
    if found is None:
        raise ConfigError(
            f"{file}: scores through {function} are not supported; known are {', '.join(known)}"
        )
    return found


def _dimensions(path: Path) -> tuple[int, ...]:
    """Sizes that a Matryoshka model declares its embeddings may be cut to."""
    config = _read(path / "config.json")
    if not isinstance(config, Mapping):
        return ()
    sizes = config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and sizes and all(type(n) is int and n > 0 for n in sizes):
        return tuple(sorted(sizes))
    return (0,) if config.get("is_matryoshka") is True else ()


def _read(file: Path) -> Any:
    """Reads a JSON file; None if it does not exist."""
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
