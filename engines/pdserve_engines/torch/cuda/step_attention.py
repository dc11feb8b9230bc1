"""Computes the attention of one step on a GPU: decoding chunks by kernels, longer chunks by torch.

It is made once per step. All index arrays of the step travel to the device in one copy. Every
layer uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pdserve_engines.torch.cuda.decode_attention import DecodeInputs, ScoreRules, attend_decodes
from pdserve_engines.torch.cuda.decode_plan import list_items, split_batch
from pdserve_engines.torch.models.attention import PagedAttention
from pdserve_engines.torch.models.upload import upload_packed

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from pdserve_engines.torch.kv_pool import KvPool
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.models.forward_batch import ForwardBatch

__all__ = ["StepAttention"]


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
        self._pool, self._config = pool, config
        self._scale = (config.query_scalar or config.head_dim) ** -0.5
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
                    *(part for each in listed.values() for part in (each.items, each.first_items)),
                ],
                pool.tensor.device,
            )
        )
        rows, ends, tables, offsets = rest[:4]
        items = iter(rest[4:])
        self._inputs = {
            window: DecodeInputs(rows, ends, tables, offsets, next(items), next(items), each.splits)
            for window, each in listed.items()
        }
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
        out = qkv.new_empty((len(qkv), heads * dim))
        scales = self._pool.scales(index)
        rules = ScoreRules(self._scale, window, config.attention_cap, scales)
        attend_decodes(qkv, out, self._pool.tensor[:, index], self._inputs[window], rules)
        if self._prompts is not None:
            found = self._prompts.attend(index, queries[self._prompt_rows], window)
            out[self._prompt_rows] = found.flatten(1)
        return out
