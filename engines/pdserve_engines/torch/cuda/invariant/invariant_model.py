"""Computes the forward pass so that a row's result does not depend on the rest of the batch.

Norms, rotary embeddings and gates are those of `kernel_model`, which compute each row by itself;
products, attention and experts are those of this folder. `exactness` says what follows from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import triton

from pdserve_engines.torch.cuda.decode_attention import ScoreRules
from pdserve_engines.torch.cuda.invariant.experts import feed_routed
from pdserve_engines.torch.cuda.invariant.linear import linear
from pdserve_engines.torch.cuda.invariant.query_tiles import list_tiles
from pdserve_engines.torch.cuda.invariant.tile_attention import (
    TileInputs,
    attend_tiles,
    queries_of,
)
from pdserve_engines.torch.cuda.kernel_model import KernelModel
from pdserve_engines.torch.models.upload import upload_packed

if TYPE_CHECKING:
    from pdserve_engines.torch.cuda.graphs.static_inputs import StaticStep
    from pdserve_engines.torch.kv_pool import KvPool
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.models.base import LayersDoneFn
    from pdserve_engines.torch.models.forward_batch import ForwardBatch

__all__ = ["InvariantModel"]


class InvariantModel(KernelModel):
    """Implements `base.ForwardModel`."""

    @property
    def kernels(self) -> str:
        return f"triton (invariant) on {self._device}, {self._threads} threads"

    @property
    def exact(self) -> str:
        # Another architecture, another compiler or another rounding gives other last bits.
        names = [_architecture(self._device), "triton", triton.__version__]
        names.append(str(self._dtype).removeprefix("torch."))
        if self._kv_dtype != self._dtype:
            names[-1] += f", KV {str(self._kv_dtype).removeprefix('torch.')}"
        return " ".join(["invariant", *names])

    def forward(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> torch.Tensor:
        assert self._pool is not None, "bind comes before forward"
        step = InvariantStep(batch, self._pool, self._config, self._dtype)
        return self._compute(step, batch.fill(step.tokens), after)

    def decode(self, step: StaticStep) -> torch.Tensor:
        assert self._pool is not None, "bind comes before decode"
        # All windows have the same sequences; padding has no keys.
        decodes = next(iter(step.inputs.values()))
        tiles = TileInputs(
            decodes.rows,
            decodes.lengths,
            torch.ones_like(decodes.rows),
            decodes.tables,
            decodes.table_offsets,
        )
        attention = TileAttention(self._pool, self._config, tiles)
        return self._compute(replace(step, attention=attention), step.tokens)

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return linear(x, weight, bias)

    def _experts(self, layer: dict[str, torch.Tensor], normed: torch.Tensor) -> torch.Tensor:
        assert self._config.experts is not None
        return feed_routed(self._config.experts, layer, normed)


class TileAttention:
    """Attention of tiles of queries, in every layer of a step."""

    def __init__(self, pool: KvPool, config: ModelConfig, inputs: TileInputs) -> None:
        self._pool, self._config, self._inputs = pool, config, inputs
        self._scale = (config.query_scalar or config.head_dim) ** -0.5

    def attend(self, index: int, qkv: torch.Tensor) -> torch.Tensor:
        """The attention of layer `index`, in the tiles' rows of `[T, heads * head_dim]`."""
        config = self._config
        out = qkv.new_empty((len(qkv), config.num_heads * config.head_dim))
        rules = ScoreRules(
            self._scale, config.window(index), config.attention_cap, self._pool.scales(index)
        )
        attend_tiles(qkv, out, self._pool.tensor[:, index], self._inputs, rules)
        return out


class InvariantStep:
    """A step's index tensors, as those of `StepAttention`."""

    tokens: torch.Tensor
    """`[T]` token ids."""
    positions: torch.Tensor
    blocks: torch.Tensor
    rows: torch.Tensor

    def __init__(
        self, batch: ForwardBatch, pool: KvPool, config: ModelConfig, dtype: torch.dtype
    ) -> None:
        """`dtype`: that of the queries."""
        tiles = list_tiles(batch, queries_of(config.num_heads, config.kv_heads, dtype.itemsize))
        self.tokens, self.positions, self.blocks, self.rows, *listed = upload_packed(
            [
                batch.tokens,
                batch.positions,
                batch.blocks(pool.layout.block_size).astype("int32"),
                batch.rows,
                tiles.rows,
                tiles.ends,
                tiles.counts,
                batch.tables,
                tiles.table_offsets,
            ],
            pool.tensor.device,
        )
        self._attention = TileAttention(pool, config, TileInputs(*listed))

    def attend(self, index: int, qkv: torch.Tensor) -> torch.Tensor:
        """As `StepAttention.attend`."""
        return self._attention.attend(index, qkv)


def _architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
