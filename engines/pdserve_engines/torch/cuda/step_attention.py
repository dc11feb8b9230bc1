"""Computes the attention of one step on a GPU: decoding chunks by kernels, longer chunks by torch.

It is made once per step. All index arrays of the step travel to the device in one copy. Every
layer uses it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pdserve_engines.torch.cuda.decode_attention import DecodeInputs, ScoreRules, attend_decodes
from pdserve_engines.torch.cuda.decode_plan import list_items, split_batch
from pdserve_engines.torch.models.attention import PagedAttention
from pdserve_engines.torch.models.upload import upload_packed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from pdserve_engines.torch.cuda.decode_plan import WorkItems
    from pdserve_engines.torch.kv_pool import KvPool
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.models.forward_batch import ForwardBatch, Int32s

__all__ = ["DecodeAttention", "LayerAttention", "StepAttention", "StepInputs"]


class LayerAttention(Protocol):
    """Attention of a step's sequences, one layer after the other."""

    def attend(self, index: int, qkv: torch.Tensor) -> torch.Tensor:
        """The attention of layer `index`: `[T, (heads + 2 * kv_heads) * head_dim]` to `[T, heads *
        head_dim]`. Keys and values of the step are in the pool already."""
        ...


class StepInputs(LayerAttention, Protocol):
    """What a forward pass with kernels reads of a step, in int32 on the pool's device."""

    @property
    def positions(self) -> torch.Tensor:
        """`[T]`."""
        ...

    @property
    def blocks(self) -> torch.Tensor:
        """`[T]` the block of each token; -1: padding, which stores nothing."""
        ...

    @property
    def rows(self) -> torch.Tensor:
        """`[R]` rows whose hidden state is wanted."""
        ...


class DecodeAttention:
    """Attention of decoding sequences, in every layer of a step."""

    def __init__(
        self, pool: KvPool, config: ModelConfig, inputs: Mapping[int | None, DecodeInputs]
    ) -> None:
        """`inputs`: by window of the layer."""
        self._pool, self._config, self._inputs = pool, config, inputs
        self._scale = (config.query_scalar or config.head_dim) ** -0.5

    def attend(self, index: int, qkv: torch.Tensor) -> torch.Tensor:
        """The attention of layer `index`, in the sequences' rows of `[T, heads * head_dim]`. Other
        rows hold anything."""
        config, window = self._config, self._config.window(index)
        out = qkv.new_empty((len(qkv), config.num_heads * config.head_dim))
        scales = self._pool.scales(index)
        rules = ScoreRules(self._scale, window, config.attention_cap, scales)
        attend_decodes(qkv, out, self._pool.tensor[:, index], self._inputs[window], rules)
        return out


class StepAttention:
    """A step's index tensors, in int32 on the pool's device."""

    tokens: torch.Tensor
    """`[T]` token ids."""
    positions: torch.Tensor
    """`[T]`."""
    blocks: torch.Tensor
    """`[T]` the block of each token."""
    rows: torch.Tensor
    """`[R]` rows whose hidden state is wanted."""

    def __init__(
        self,
        batch: ForwardBatch,
        pool: KvPool,
        config: ModelConfig,
        windows: Iterable[int | None],
        dtype: torch.dtype,
    ) -> None:
        """`windows`: those of all layers, None for a layer that sees all tokens. `dtype`: that of
        the queries."""
        self._config = config
        split = split_batch(batch)
        self._decodes = len(split.decodes)
        lengths = batch.starts[split.decodes] + 1
        listed = {window: list_items(lengths, window) for window in windows}
        self.tokens, self.positions, self.blocks, self.rows, self._prompt_rows, *rest = (
            upload_packed(
                [
                    batch.tokens,
                    batch.positions,
                    batch.blocks(pool.layout.block_size).astype(np.int32),
                    batch.rows,
                    split.prompt_rows,
                    batch.offsets[split.decodes],
                    lengths,
                    batch.tables,
                    batch.table_offsets[split.decodes],
                    *itertools.chain.from_iterable(map(_uploaded, listed.values())),
                ],
                pool.tensor.device,
            )
        )
        common, items = rest[:4], iter(rest[4:])
        inputs = {
            window: DecodeInputs(*common, *itertools.islice(items, 3), splits=each.splits)
            for window, each in listed.items()
        }
        self._attention = DecodeAttention(pool, config, inputs)
        self._prompts = None
        if split.prompts is not None:
            self._prompts = PagedAttention(
                split.prompts,
                pool,
                config.groups,
                listed,
                config.query_scalar,
                config.attention_cap,
                dtype=dtype,
            )

    def attend(self, index: int, qkv: torch.Tensor) -> torch.Tensor:
        """The attention of layer `index`: `[T, (heads + 2 * kv_heads) * head_dim]` to `[T, heads *
        head_dim]`. Keys and values of the step are in the pool already."""
        config = self._config
        heads, dim, window = config.num_heads, config.head_dim, config.window(index)
        queries = qkv.view(len(qkv), -1, dim)[:, :heads]
        if self._prompts is not None and not self._decodes:
            return self._prompts.attend(index, queries, window).flatten(1)
        out = self._attention.attend(index, qkv)
        if self._prompts is not None:
            found = self._prompts.attend(index, queries[self._prompt_rows], window)
            out[self._prompt_rows] = found.flatten(1)
        return out


def _uploaded(items: WorkItems) -> tuple[Int32s, Int32s, Int32s]:
    """In the order of `DecodeInputs`."""
    return items.items, items.first_items, items.count
