"""The kernels in torch operations, for whole engines on CPUs.

Triton's interpreter takes seconds for a hundred tokens. What a kernel reads on the device, these
read from the same tensors.

A call while a graph is captured becomes part of it, like a launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from pdserve_engines.torch.cuda import decode_plan, kernel_model, step_attention
from pdserve_engines.torch.cuda.invariant import invariant_model
from pdserve_engines.torch.models.experts import feed_few
from tests.engines.torch.cuda.graphs.recorded import RecordedGraph

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from pdserve_engines.torch.cuda.decode_attention import DecodeInputs, ScoreRules
    from pdserve_engines.torch.cuda.invariant.tile_attention import TileInputs
    from pdserve_engines.torch.cuda.rotate_store import HeadNorms

__all__ = ["use_torch_kernels"]


def use_torch_kernels(patch: pytest.MonkeyPatch) -> None:
    """Let `KernelModel` compute with these."""
    patch.setattr(kernel_model, "add_norm", launched(add_norm))
    patch.setattr(kernel_model, "gated_activation", launched(gated_activation))
    patch.setattr(kernel_model, "rotate_store", launched(rotate_store))
    patch.setattr(step_attention, "attend_decodes", launched(attend_decodes))
    patch.setattr(invariant_model, "linear", launched(functional.linear))
    patch.setattr(invariant_model, "attend_tiles", launched(attend_tiles))
    patch.setattr(invariant_model, "feed_routed", feed_few)


def launched(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, as part of the graph that is captured, if one is."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        graph = RecordedGraph.capturing
        if graph is None:
            return kernel(*args, **kwargs)
        return graph.launch(kernel, args, kwargs)

    return launch


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    if delta is not None:
        x += delta
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def gated_activation(gate_up: torch.Tensor, *, gelu: bool = False) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return (functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)) * up


def rotate_store(
    qkv: torch.Tensor,
    table: torch.Tensor | None,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    pool: torch.Tensor,
    norms: HeadNorms | None = None,
    kv_scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    assert kv_scales == (1.0, 1.0), "FP8 is tested with the kernels themselves"
    _, _, kv_heads, block_size, dim = pool.shape
    heads = qkv.view(len(qkv), -1, dim)
    split = heads.shape[1] - kv_heads
    turned = heads[:, :split]
    if norms is not None:
        count = split - kv_heads
        turned[:, :count] = functional.rms_norm(turned[:, :count], (dim,), norms.query, norms.eps)
        turned[:, count:] = functional.rms_norm(turned[:, count:], (dim,), norms.key, norms.eps)
    if table is not None:
        cosine, sine = table[positions].unsqueeze(1).unbind(2)
        first, second = turned.chunk(2, dim=-1)
        turned.copy_(
            torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        )
    stored = blocks >= 0
    where, places = blocks[stored].long(), (positions[stored] % block_size).long()
    pool[where, 0, :, places] = turned[stored, split - kv_heads :]
    pool[where, 1, :, places] = heads[stored, split:]


def attend_decodes(
    qkv: torch.Tensor,
    out: torch.Tensor,
    pool: torch.Tensor,
    inputs: DecodeInputs,
    rules: ScoreRules,
) -> None:
    _, _, kv_heads, block_size, dim = pool.shape
    heads = out.shape[1] // dim
    items = inputs.items[: int(inputs.count)].tolist()
    for sequence in {item[0] for item in items}:
        begins = [begin for owner, begin in items if owner == sequence]
        first, end = inputs.first_items[sequence : sequence + 2].tolist()
        assert [item[0] for item in items[first:end]] == [sequence] * len(begins)
        length, row = int(inputs.lengths[sequence]), int(inputs.rows[sequence])
        lowest = max(0, length - rules.window) if rules.window is not None else 0
        seen = torch.tensor(
            [
                token
                for begin in begins
                for token in range(max(begin, lowest), min(begin + decode_plan.SEGMENT, length))
            ]
        )
        table = inputs.tables[int(inputs.table_offsets[sequence]) :]
        blocks, places = table[seen // block_size].long(), seen % block_size
        keys, values = (
            pool[blocks, which, :, places].transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
            for which in (0, 1)
        )
        query = qkv[row].view(-1, 1, dim)[:heads]
        scores = query @ keys.transpose(1, 2) * rules.scale
        if rules.cap is not None:
            scores = rules.cap * torch.tanh(scores / rules.cap)
        out[row] = (scores.softmax(-1) @ values).flatten()


def attend_tiles(
    qkv: torch.Tensor,
    out: torch.Tensor,
    pool: torch.Tensor,
    inputs: TileInputs,
    rules: ScoreRules,
) -> None:
    _, _, kv_heads, block_size, dim = pool.shape
    heads = out.shape[1] // dim
    for tile, (row, end, count) in enumerate(
        zip(inputs.rows.tolist(), inputs.ends.tolist(), inputs.counts.tolist(), strict=True)
    ):
        if not end:
            continue
        token = torch.arange(end)
        table = inputs.tables[int(inputs.table_offsets[tile]) :]
        blocks, places = table[token // block_size].long(), token % block_size
        keys, values = (
            pool[blocks, which, :, places].transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
            for which in (0, 1)
        )
        query = qkv[row : row + count].view(count, -1, dim)[:, :heads].transpose(0, 1)
        last = torch.arange(end - count, end)[:, None]
        seen = token <= last
        if rules.window is not None:
            seen &= token > last - rules.window
        values = values.masked_fill(~seen.any(0)[None, :, None], 0)
        scores = query @ keys.transpose(1, 2) * rules.scale
        if rules.cap is not None:
            scores = rules.cap * torch.tanh(scores / rules.cap)
        scores = scores.masked_fill(~seen, -torch.inf)
        out[row : row + count] = (scores.softmax(-1) @ values).transpose(0, 1).flatten(1)
