"""Reads a checkpoint's classification head, which makes scores of a prompt's last hidden state.

A `…ForSequenceClassification` checkpoint stores one. A reranker that was published as a language
model judges by the logits of one token, or by the difference of two ("yes" and "no"): the rows of
these tokens in the output layer are its head. sentence-transformers' files name the tokens, or the
engine option `classifier_from_token` does. It knows neither requests nor steps.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, Final

import torch

from pdserve.errors import ConfigError, UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.config_keys import parse_json

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.model_loader.safetensors_reader import Checkpoint

__all__ = ["ClassificationHead", "read_head", "without_output_layer"]

WEIGHT: Final = "score.weight"
_BIAS: Final = "score.bias"
_PLAIN_LOGITS: Final = frozenset({"llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"})
"""Families whose logits are the output layer's products, neither scaled nor capped."""


@dataclass(frozen=True, slots=True)
class ClassificationHead:
    """A linear layer from a hidden state to the logits of the labels, in float32 on the host."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    stored: bool = True
    """False: it is made of rows of the output layer, so the model generates text, too."""

    @property
    def num_labels(self) -> int:
        return len(self.weight)

    @property
    def identity(self) -> bytes:
        """A digest that tells heads apart."""
        return hashlib.sha256(self.weight.numpy().tobytes()).digest()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of a hidden state in float32 on the host."""
        return torch.nn.functional.linear(hidden, self.weight, self.bias)


def read_head(
    directory: Path, checkpoint: Checkpoint, config: ModelConfig, tokens: Sequence[str]
) -> ClassificationHead | None:
    """The head of the checkpoint in `directory`; None if it has none. Takes a stored head out of
    `checkpoint.entries`, which then hold the model alone.

    `tokens`: what `classifier_from_token` names, the last one for "relevant". Raises
    `UnsupportedCheckpoint` and `ConfigError`.
    """
    if WEIGHT in checkpoint.entries:
        if tokens:
            raise ConfigError(
                "engine option classifier_from_token: the checkpoint has a classification head "
                f"({WEIGHT}) already"
            )
        return _stored_head(checkpoint, config)
    if config.classifier:
        raise UnsupportedCheckpoint(
            f"tensors do not fit config.json: {WEIGHT}, the classification head, is missing"
        )
    ids = [_token_id(directory, token) for token in tokens] or _named_ids(directory)
    return _derived_head(checkpoint, config, ids) if ids else None


def without_output_layer(config: ModelConfig) -> ModelConfig:
    """The configuration of a model whose checkpoint stores a head instead of an output layer."""
    return replace(config, tied=True, headless=True)


def _stored_head(checkpoint: Checkpoint, config: ModelConfig) -> ClassificationHead:
    weight = checkpoint.tensor(WEIGHT).float().clone()
    if weight.dim() != 2 or weight.shape[1] != config.hidden_size:
        raise UnsupportedCheckpoint(
            f"tensors do not fit config.json: {WEIGHT} has shape {list(weight.shape)}, expected "
            f"[labels, {config.hidden_size}]"
        )
    bias = checkpoint.tensor(_BIAS).float().clone() if _BIAS in checkpoint.entries else None
    if bias is not None and bias.shape != weight.shape[:1]:
        raise UnsupportedCheckpoint(
            f"tensors do not fit config.json: {_BIAS} has shape {list(bias.shape)}, expected "
            f"[{len(weight)}]"
        )
    for name in (WEIGHT, _BIAS):
        checkpoint.entries.pop(name, None)
    return ClassificationHead(weight, bias)


def _derived_head(
    checkpoint: Checkpoint, config: ModelConfig, ids: Sequence[int]
) -> ClassificationHead:
    """A head of one label: the row of the last token, less that of the token before it."""
    if config.family not in _PLAIN_LOGITS:
        raise ConfigError(
            f"a classification head cannot be made of the output layer of a {config.family} model"
        )
    name = "model.embed_tokens.weight" if config.tied else "lm_head.weight"
    if name not in checkpoint.entries:
        raise UnsupportedCheckpoint(
            f"{name} is missing: a classification head is made of the output layer"
        )
    table = checkpoint.tensor(name)
    if max(ids) >= len(table):
        raise UnsupportedCheckpoint(f"{name} has {len(table)} rows, and no token {max(ids)}")
    rows = [table[token].float() for token in ids]
    weight = rows[0] if len(rows) == 1 else rows[1] - rows[0]
    return ClassificationHead(weight.unsqueeze(0).clone(), stored=False)


# ---------------------------------------------------------------- which tokens


def _token_id(directory: Path, token: str) -> int:
    from tokenizers import Tokenizer

    try:
        found: int | None = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(
            token
        )
    except Exception as error:  # the library raises a plain `Exception` for every reason
        raise ConfigError(
            f"engine option classifier_from_token: tokenizer.json cannot be used: {error}"
        ) from None
    if found is None:
        raise ConfigError(
            f"engine option classifier_from_token: {token!r} is no token of the vocabulary; write "
            "it as tokenizer.json does"
        )
    return found


def _named_ids(directory: Path) -> list[int]:
    """The tokens of sentence-transformers' `LogitScore` step, the last one for "relevant"; empty
    without one."""
    folder = next((path for kind, path in _modules(directory) if kind == "LogitScore"), None)
    if folder is None:
        return []
    if ".." in PurePosixPath(folder).parts:
        raise UnsupportedCheckpoint(f"{directory / 'modules.json'}: {folder} is outside the model")
    file = directory / folder.lstrip("/") / "config.json"
    config = _read(file)
    if not isinstance(config, dict):
        raise UnsupportedCheckpoint(f"{file} is missing or holds no JSON object")
    given = [config.get(name) for name in ("false_token_id", "true_token_id")]
    ids = [token for token in given if token is not None]
    if given[1] is None or not all(type(token) is int and token >= 0 for token in ids):
        raise UnsupportedCheckpoint(f"{file}: true_token_id and false_token_id must be token ids")
    return ids


def _modules(directory: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each sentence-transformers step. `worker.pooling` reports a broken list."""
    listed = _read(directory / "modules.json")
    if not isinstance(listed, list):
        return []
    return [
        (str(each.get("type", "")).rpartition(".")[2], str(each.get("path", "")))
        for each in listed
        if isinstance(each, dict)
    ]


def _read(file: Path) -> Any:
    try:
        return parse_json(file.read_bytes())
    except (OSError, ValueError):
        return None
