"""Divides a model among tensor-parallel ranks. Pure: it knows sizes and tensors, no processes.

The heads of q, k and v are divided, and the rows of gate and up. The products after them (o, down)
are divided by columns, so each rank computes a part of their sum. The output layer is divided by
rows. The embedding and the norms are on every rank. With more ranks than KV heads, several ranks
hold the same KV head (`transfer.copy_plan.heads_on`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pdserve.errors import ConfigError
from pdserve.transfer.copy_plan import PlanError, heads_on

if TYPE_CHECKING:
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.model_loader.weights import Param

__all__ = ["Shard", "check_division"]

_MOST_RANKS = 64


def check_division(config: ModelConfig, ranks: int) -> None:
    """Raise `ConfigError` if this model cannot be divided among so many ranks; it names the size or
    the kind of model, and the numbers of ranks that are possible."""
    if kind := _undivided_kind(config):
        raise ConfigError(
            f"--tp {ranks}: {kind} are not divided among ranks yet; leave out --tp, or use "
            "--engine vllm --engine-option tensor_parallel_size=N"
        )
    if problem := _indivisible(config, ranks):
        possible = [n for n in range(2, _MOST_RANKS + 1) if not _indivisible(config, n)]
        others = ", ".join(map(str, possible)) or "none"
        raise ConfigError(f"--tp {ranks}: {problem}; possible for this model: {others}")


def _undivided_kind(config: ModelConfig) -> str:
    if config.experts is not None:
        return f"experts ({config.family})"
    if config.whole_qk_norm:
        return f"models with a norm over all heads ({config.family})"
    if config.sinks:
        return f"attention sinks ({config.family})"
    return ""


def _indivisible(config: ModelConfig, ranks: int) -> str:
    """The first size that does not fit, in words; empty: all fit."""
    for name, size in (
        ("num_attention_heads", config.num_heads),
        ("intermediate_size", config.intermediate_size),
    ):
        if size % ranks:
            return f"{name} {size} is no multiple of {ranks}"
    try:
        heads_on(config.kv_heads, ranks, 0)
    except PlanError:
        return f"{ranks} ranks cannot hold num_key_value_heads {config.kv_heads} evenly"
    return ""


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a model that one rank holds."""

    whole: ModelConfig
    """The configuration of the whole model, which `check_division` has accepted."""
    rank: int
    ranks: int

    @property
    def config(self) -> ModelConfig:
        """The configuration by which this rank computes: its own heads and inner size."""
        whole = self.whole
        return replace(
            whole,
            num_heads=whole.num_heads // self.ranks,
            kv_heads=len(self.kv_heads),
            intermediate_size=whole.intermediate_size // self.ranks,
        )

    @property
    def kv_heads(self) -> range:
        """The model's KV heads that this rank holds."""
        return heads_on(self.whole.kv_heads, self.ranks, self.rank)

    @property
    def vocabulary(self) -> range:
        """The rows of the output layer that this rank holds; the last ranks may have fewer."""
        size = self.whole.vocab_size
        each = -(-size // self.ranks)
        return range(min(size, self.rank * each), min(size, (self.rank + 1) * each))

    def cut(self, param: Param, tensors: list[torch.Tensor]) -> tuple[Param, list[torch.Tensor]]:
        """This rank's part of a parameter and of its tensors. The parts are views: of a mapped
        file, only the bytes of the part are read."""
        name = param.key.rpartition(".")[2].removesuffix("_bias")
        bias = param.key.endswith("_bias")
        parts = tensors
        if name == "qkv":
            parts = self._heads(tensors)
        elif name == "gate_up":
            halves = tensors if len(tensors) == 2 else list(tensors[0].chunk(2))
            parts = [_rows(half, self._evenly(len(half))) for half in halves]
        elif name in ("o", "down") and not bias:
            (tensor,) = tensors
            columns = self._evenly(tensor.shape[1])
            parts = [tensor[:, columns.start : columns.stop]]
        elif name == "head":
            parts = [_rows(tensors[0], self.vocabulary)]
        stem = param.parts[0][0]
        return replace(param, parts=tuple((stem, tuple(part.shape)) for part in parts)), parts

    def _heads(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of q, k and v, which may be stored as one tensor."""
        whole, dim = self.whole, self.whole.head_dim
        if len(tensors) == 1:
            sizes = [whole.num_heads * dim, whole.kv_heads * dim, whole.kv_heads * dim]
            tensors = list(torch.split(tensors[0], sizes))
        held = self.kv_heads
        kv = range(held.start * dim, held.stop * dim)
        return [
            _rows(tensor, rows)
            for tensor, rows in zip(
                tensors, (self._evenly(whole.num_heads * dim), kv, kv), strict=True
            )
        ]

    def _evenly(self, size: int) -> range:
        each = size // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)


def _rows(tensor: torch.Tensor, rows: range) -> torch.Tensor:
    return tensor[rows.start : rows.stop]
