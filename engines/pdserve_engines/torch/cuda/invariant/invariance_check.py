"""Compares rows that are computed alone with the same rows in company, while the engine loads.

The kernels' source says that both are equal to the bit. Whether a compiler and a device keep to it
is seen there alone, with the model's own sizes and random numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from pdserve_engines.torch.cuda.decode_attention import ScoreRules
from pdserve_engines.torch.cuda.invariant.experts import feed_routed
from pdserve_engines.torch.cuda.invariant.linear import ROWS, linear
from pdserve_engines.torch.cuda.invariant.tile_attention import TileInputs, attend_tiles, queries_of
from pdserve_engines.torch.cuda.kernel_comparison import KernelComparison, first_problem
from pdserve_engines.torch.models.upload import upload_packed

if TYPE_CHECKING:
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.settings import TorchSettings

__all__ = ["varying_kernel"]

_BLOCK: Final = 32
"""Tokens of a block."""
_LENGTH: Final = 70
"""Tokens of a prompt: more than a tile of keys."""
_EXPERTS: Final = 8


def varying_kernel(config: ModelConfig, settings: TorchSettings) -> str | None:
    """Which kernel's result for a row depends on other rows on this device; None if none does."""
    check = _Check(config, settings)
    return first_problem((check.products, check.experts, check.attention), _difference)


def _difference(found: tuple[torch.Tensor, torch.Tensor]) -> str:
    together, alone = found
    return "" if torch.equal(together, alone) else "computes a row otherwise beside other rows"


class _Check(KernelComparison):
    """Each method computes rows in company and alone."""

    def products(self) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._config.hidden_size
        x, weight = self._draw(ROWS + 2, hidden), self._draw(96, hidden)
        rows = [0, 5, ROWS + 1]
        alone = torch.cat([linear(x[row : row + 1], weight) for row in rows])
        return linear(x, weight)[rows], alone

    def experts(self) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, experts = self._config.hidden_size, self._config.experts
        if experts is None:
            return self._draw(0), self._draw(0)
        # Fewer than the model's, which may have gigabytes.
        few = replace(experts, count=max(_EXPERTS, experts.per_token))
        layer = {
            "router": self._draw(few.count, hidden),
            "experts_gate_up": self._draw(few.count * 2 * few.intermediate_size, hidden),
            "experts_down": self._draw(few.count * hidden, few.intermediate_size),
        }
        x = self._draw(3, hidden)
        alone = [feed_routed(few, layer, row.unsqueeze(0)) for row in x]
        return feed_routed(few, layer, x), torch.cat(alone)

    def attention(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of a prompt in one chunk, and one after the other."""
        config, dim = self._config, self._config.head_dim
        blocks = -(-_LENGTH // _BLOCK)
        pool = self._draw(blocks, 2, config.kv_heads, _BLOCK, dim).to(self._kv_dtype)
        qkv = self._draw(_LENGTH, (config.num_heads + 2 * config.kv_heads) * dim)
        found = []
        for most in (queries_of(config.num_heads, config.kv_heads, self._dtype.itemsize), 1):
            rows = np.arange(0, _LENGTH, most, dtype=np.int32)
            counts = np.minimum(_LENGTH - rows, most)
            arrays = [rows, rows + counts, counts, np.arange(blocks), np.zeros_like(rows)]
            inputs = upload_packed([each.astype(np.int32) for each in arrays], self._device)
            out = self._draw(_LENGTH, config.num_heads * dim)
            attend_tiles(qkv, out, pool, TileInputs(*inputs), ScoreRules(dim**-0.5))
            found.append(out)
        return found[0], found[1]
