"""Compares the kernels with torch's operations on the device, before a model relies on them.

It computes a few rows of random numbers with the model's own sizes. So a GPU, driver or Triton for
which a kernel does not compile or computes something else is found while the engine loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn import functional

from pdserve_engines.torch.cuda.add_norm import add_norm
from pdserve_engines.torch.cuda.decode_attention import DecodeInputs, ScoreRules, attend_decodes
from pdserve_engines.torch.cuda.decode_plan import SEGMENT, list_items
from pdserve_engines.torch.cuda.gated_activation import gated_activation
from pdserve_engines.torch.cuda.kernel_comparison import KernelComparison, first_problem
from pdserve_engines.torch.cuda.rotate_store import rotate_store
from pdserve_engines.torch.models.upload import upload_packed

if TYPE_CHECKING:
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.settings import TorchSettings

__all__ = ["failing_kernel"]

_BLOCK: Final = 32
"""Tokens of a block."""
_LENGTHS: Final = (1, SEGMENT + 3)
"""Keys of the sequences: one segment, and several."""
_NEAR: Final = {torch.float32: 1e-4}
_ROUNDED: Final = 3e-2
"""Largest difference, by dtype and for the others; the numbers are about one."""


def failing_kernel(config: ModelConfig, settings: TorchSettings) -> str | None:
    """Which kernel fails on this device, and how; None if none does."""
    check = _Check(config, settings)
    allowed = _NEAR.get(settings.dtype, _ROUNDED)

    def problem(difference: float) -> str:
        return "" if difference < allowed else f"differs from torch by {difference:.1g}"

    return first_problem((check.norm, check.activation, check.attention), problem)


class _Check(KernelComparison):
    """Each method computes something in both ways and returns the largest difference."""

    def norm(self) -> float:
        size = self._config.hidden_size
        x, delta, weight = self._draw(2, size), self._draw(2, size), self._draw(size)
        total = x + delta
        expected = functional.rms_norm(total.float(), (size,), weight.float(), 1e-5)
        return max(_apart(add_norm(x, delta, weight, 1e-5), expected), _apart(x, total))

    def activation(self) -> float:
        gate_up = self._draw(2, 2 * self._config.intermediate_size)
        gate, up = gate_up.float().chunk(2, dim=-1)
        gelu = self._config.gelu
        active = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
        return _apart(gated_activation(gate_up, gelu=gelu), active * up)

    def attention(self) -> float:
        """Stores the keys of two sequences token by token, and attends from the last ones."""
        config, dim = self._config, self._config.head_dim
        counts = [-(-length // _BLOCK) for length in _LENGTHS]
        pool = self._draw(sum(counts) + 1, 2, config.kv_heads, _BLOCK, dim)
        pool = pool.fill_(torch.nan).to(self._kv_dtype)
        tables = np.arange(len(pool) - 1, dtype=np.int32)[::-1] + 1
        starts = np.cumsum([0, *counts], dtype=np.int32)[:-1]
        positions = np.concatenate([np.arange(each, dtype=np.int32) for each in _LENGTHS])
        offsets = np.repeat(starts, _LENGTHS)
        listed = list_items(np.array(_LENGTHS, np.int32), None)
        arrays = [positions, tables[offsets + positions // _BLOCK], np.cumsum(_LENGTHS) - 1]
        arrays += [np.array(_LENGTHS), tables, starts]
        arrays += [listed.items, listed.first_items, listed.count]
        places, blocks, *inputs = upload_packed(
            [each.astype(np.int32) for each in arrays], self._device
        )
        width = (config.num_heads + 2 * config.kv_heads) * dim
        qkv = self._draw(len(positions), width)
        angles = self._draw(len(positions), dim // 2).float()
        table = torch.stack((angles.cos(), angles.sin()), dim=1)
        expected = self._attended(qkv.float(), table[places])
        rotate_store(qkv, table, places, blocks, pool)
        out = self._draw(len(qkv), config.num_heads * dim)
        # More items than programs of a head, as in a graph.
        decodes = DecodeInputs(*inputs, splits=listed.splits, programs=2)
        attend_decodes(qkv, out, pool, decodes, ScoreRules(dim**-0.5))
        return _apart(out[decodes.rows], expected)

    def _attended(self, qkv: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """The attention of each sequence's last token, in float32."""
        config = self._config
        heads = qkv.view(len(qkv), -1, config.head_dim)
        split = config.num_heads + config.kv_heads
        cosine, sine = table.unsqueeze(1).unbind(2)
        first, second = heads[:, :split].chunk(2, dim=-1)
        turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        found, end = [], 0
        for length in _LENGTHS:
            own = slice(end, end + length)
            end += length
            keys, values = (
                part.to(self._kv_dtype)
                .float()
                .transpose(0, 1)
                .repeat_interleave(config.groups, dim=0)
                for part in (turned[own, config.num_heads :], heads[own, split:])
            )
            query = turned[end - 1, : config.num_heads].unsqueeze(1)
            found.append(functional.scaled_dot_product_attention(query, keys, values).flatten())
        return torch.stack(found)


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a part of the larger number where that is more than one."""
    near = (found.float() - expected.float()).abs() / expected.float().abs().clamp_min(1)
    return float(near.max())
