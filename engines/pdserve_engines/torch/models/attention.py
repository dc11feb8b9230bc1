"""Computes attention over paged KV in torch operations: write, gather, scaled dot product.

In a layer with a sliding window only the blocks that some query can see are gathered. It works on
every torch device. Queries of one KV head's group are folded into the query axis, so no KV head is
repeated in memory. Decoding sequences that share blocks may have more context together than the
pool has room for: they are then computed in groups. It knows blocks and positions, not sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch.nn import functional

from pdserve_engines.torch.fp8_kv import round_rows, widen
from pdserve_engines.torch.models.attention_sinks import with_sink_key, with_sinks
from pdserve_engines.torch.models.capped_attention import attend_capped
from pdserve_engines.torch.models.upload import upload

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve_engines.torch.kv_pool import KvPool
    from pdserve_engines.torch.models.forward_batch import ForwardBatch

GATHERED: Final = 2
"""Most tokens that a group gathers, for each token of the pool. `kv_budget` keeps that much memory
free. Without shared blocks it is never reached: padding at most doubles the tokens."""


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks that attend together: `n` sequences of `count` queries over `length` keys each. The
    keys begin with the first block that the queries see."""

    rows: torch.Tensor
    """`[n * count]` rows of the batch."""
    n: int
    count: int
    length: int
    heads: torch.Tensor
    """`[2 * n * kv_heads * blocks]` rows of `KvPool.heads`: all keys, then all values."""
    mask: torch.Tensor | None
    """True where a query may look, or what is added to its scores; broadcasts to
    `[n, kv_heads, groups * count, length]`."""
    causal: bool = False
    """One chunk whose queries look at all keys up to their own; it has no mask."""


class PagedAttention:
    """One step's index tensors, made once and used by every layer."""

    def __init__(
        self,
        batch: ForwardBatch,
        pool: KvPool,
        groups: int,
        windows: Iterable[int | None] = (None,),
        query_scalar: float | None = None,
        cap: float | None = None,
        *,
        sinks: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`windows`: those of all layers, None for a layer that sees all tokens. Scores are divided
        by the root of `query_scalar`; None: of the head's dimension. Then they are bounded by
        `cap`. `sinks`: whether heads have them. `dtype`: that of the queries; None: the pool's."""
        self._pool = pool
        self._layout = layout = pool.layout
        self._groups = groups
        self._scale = (query_scalar or pool.layout.head_dim) ** -0.5
        self._cap = cap
        self._sinks = sinks
        self._device = pool.tensor.device
        self._dtype = dtype or pool.tensor.dtype
        self._skips = cap is None and _skips_hidden_keys(self._device, self._dtype)
        self._block_heads = layout.num_layers * 2 * layout.kv_heads
        self._slots = self._slot_index(batch)
        self._clear_fresh_blocks(batch)
        most = GATHERED * pool.num_blocks * layout.block_size
        together = _group_chunks(batch, layout.block_size, most)
        self._plans = {
            window: [self._group(batch, chunks, window) for chunks in together]
            for window in windows
        }

    def write(self, layer: int, rows: torch.Tensor) -> None:
        """Store `[T, 2 * kv_heads, head_dim]` of the batch's own tokens: the keys of all heads,
        then their values."""
        if self._pool.is_fp8:
            rows = round_rows(rows, self._pool.scales(layer))
        rows = rows.reshape(-1, self._layout.head_dim)
        self._pool.tokens[layer].index_copy_(0, self._slots, rows)

    def attend(
        self,
        layer: int,
        queries: torch.Tensor,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`[T, heads, head_dim]` queries, which see `window` tokens, to outputs of that shape.
        `sinks`: `[heads]`, if the heads have them."""
        groups = self._plans[window]
        if len(groups) == 1:
            return self._attend_group(layer, groups[0], queries, sinks)
        out = torch.empty_like(queries)
        for group in groups:
            out[group.rows] = self._attend_group(layer, group, queries[group.rows], sinks)
        return out

    def _attend_group(
        self, layer: int, group: _Group, queries: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        dim = self._layout.head_dim
        keys, values = self._gather(layer, group)
        if sinks is not None:
            queries = with_sinks(queries, sinks, self._scale)
            keys, values = with_sink_key(keys, values)
        attend = self._attend_causal if group.causal else self._attend_folded
        return attend(group, queries, keys, values)[..., :dim]

    def _attend_folded(
        self, group: _Group, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        kv_heads, dim = self._layout.kv_heads, queries.shape[-1]
        folded = queries.reshape(group.n, group.count, kv_heads, self._groups, dim)
        folded = folded.permute(0, 2, 3, 1, 4).reshape(group.n, kv_heads, -1, dim)
        if self._cap is not None:
            out = attend_capped(folded, keys, values, group.mask, self._scale, self._cap)
        else:
            out = functional.scaled_dot_product_attention(
                folded, keys, values, attn_mask=group.mask, scale=self._scale
            )
        out = out.view(group.n, kv_heads, self._groups, group.count, dim)
        return out.permute(0, 3, 1, 2, 4).reshape(queries.shape)

    def _attend_causal(
        self, group: _Group, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        heads, length = queries.transpose(0, 1).unsqueeze(0), keys.shape[2]
        square = group.count == length
        # Only GPUs come here, and the import brings torch's compiler: a second at each start.
        from torch.nn.attention.bias import causal_lower_right

        out = functional.scaled_dot_product_attention(
            heads,
            keys,
            values,
            attn_mask=None if square else causal_lower_right(group.count, length),
            is_causal=square,
            scale=self._scale,
            enable_gqa=self._groups > 1,
        )
        return out[0].transpose(0, 1)

    def _gather(self, layer: int, group: _Group) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, each `[n, kv_heads, length, head_dim]`."""
        kv_heads, dim = self._layout.kv_heads, self._layout.head_dim
        rows = self._pool.heads[layer].index_select(0, group.heads)
        keys, values = rows.view(2, group.n, kv_heads, -1, dim)[:, :, :, : group.length].unbind()
        if self._pool.is_fp8:
            key_scale, value_scale = self._pool.scales(layer)
            return widen(keys, key_scale, self._dtype), widen(values, value_scale, self._dtype)
        return keys, values

    def _clear_fresh_blocks(self, batch: ForwardBatch) -> None:
        """Zero the blocks that this step begins and does not fill. Masked slots are multiplied by
        zero, so an infinite value left by an earlier owner would still reach this sequence."""
        size = self._layout.block_size
        counts = np.diff(batch.offsets)
        ends = np.repeat(batch.starts + counts, counts)
        fresh = (batch.positions % size == 0) & (batch.positions + size > ends)
        if fresh.any():
            blocks = upload(batch.blocks(size)[fresh], self._device)
            self._pool.clear(blocks)

    def _slot_index(self, batch: ForwardBatch) -> torch.Tensor:
        """Rows of `KvPool.tokens` for each token's keys, then its values."""
        layout = self._layout
        first = batch.blocks(layout.block_size) * self._block_heads * layout.block_size
        first += batch.positions % layout.block_size
        heads = np.arange(2 * layout.kv_heads) * layout.block_size
        return upload((first[:, None] + heads).reshape(-1), self._device)

    def _group(self, batch: ForwardBatch, chunks: list[int], window: int | None) -> _Group:
        counts = np.diff(batch.offsets)
        count = int(counts[chunks[0]])
        starts = batch.starts[chunks]
        skipped = _blocks_before(starts, window, self._layout.block_size)
        starts = starts - skipped * self._layout.block_size
        longest = int(starts.max()) + count
        width = -(-longest // self._layout.block_size)
        # Short tables are padded with their own first block: memory that exists, masked out below.
        table = np.empty((len(chunks), width), np.int64)
        for row, chunk in enumerate(chunks):
            first = batch.table_offsets[chunk] + skipped[row]
            ids = batch.tables[first : batch.table_offsets[chunk + 1]]
            table[row, : len(ids)] = ids
            table[row, len(ids) :] = ids[0]
        within = np.arange(2 * self._layout.kv_heads).reshape(2, 1, -1, 1)
        heads = table[:, None, :] * self._block_heads + within
        rows = np.concatenate(
            [np.arange(batch.offsets[chunk], batch.offsets[chunk + 1]) for chunk in chunks]
        )
        narrow = window is not None and longest > window
        causal = self._skips and count > 1 and not narrow
        return _Group(
            rows=upload(rows.astype(np.int64), self._device),
            n=len(chunks),
            count=count,
            length=longest,
            heads=upload(heads.reshape(-1), self._device),
            mask=None if causal else self._mask(starts, count, longest, window if narrow else None),
            causal=causal,
        )

    def _mask(
        self, starts: np.ndarray, count: int, length: int, window: int | None
    ) -> torch.Tensor | None:
        """`starts`: positions of the first queries, counted from the first gathered key. `window`:
        None if it hides no key."""
        if count == 1 and (starts + 1 == length).all() and window is None:
            return None
        first = upload(starts.astype(np.int64), self._device)
        last = (first[:, None] + torch.arange(count, device=self._device))[:, :, None]
        keys = torch.arange(length, device=self._device)
        mask = keys <= last
        if window is not None:
            mask &= keys > last - window
        if self._sinks:
            mask = functional.pad(mask, (1, 0), value=True)
        mask = mask[:, None].repeat(1, 1, self._groups, 1)
        if count == 1 and self._device.type == "cuda":
            # Otherwise every layer makes this of the mask again. A prompt's would be too large.
            return _bias(mask, self._dtype)
        return mask


def _skips_hidden_keys(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether causal attention without a mask is the better way there: kernels that skip hidden
    keys and share a group's keys take half precision on a GPU only."""
    return device.type == "cuda" and dtype != torch.float32


def _bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores in place of the mask: 0 or minus infinity. Its rows are aligned, as
    the kernel that takes them needs it."""
    length = mask.shape[-1]
    room = mask.new_zeros((*mask.shape[:-1], -(-length // 16) * 16), dtype=dtype)
    return room[..., :length].masked_fill_(~mask, -torch.inf)


def _blocks_before(starts: np.ndarray, window: int | None, block_size: int) -> np.ndarray:
    """Number of whole blocks before everything that queries from `starts` on can see."""
    if window is None:
        return np.zeros_like(starts)
    blocks: np.ndarray = np.maximum(starts - (window - 1), 0) // block_size
    return blocks


def _group_chunks(batch: ForwardBatch, block_size: int, most: int) -> list[list[int]]:
    """Group single-token chunks of similar length; every longer chunk is a group by itself.

    Similar means the same power of two, so that padding at most doubles what is gathered. `most`:
    most tokens that a group may gather.
    """
    buckets: dict[int, list[int]] = {}
    groups: list[list[int]] = []
    for chunk, count in enumerate(np.diff(batch.offsets)):
        if count > 1:
            groups.append([chunk])
        else:
            buckets.setdefault(int(batch.starts[chunk]).bit_length(), []).append(chunk)
    for bucket in buckets.values():
        widths = (batch.starts[bucket] // block_size + 1) * block_size
        groups += _split(bucket, widths, most)
    return groups


def _split(chunks: list[int], widths: np.ndarray, most: int) -> Iterator[list[int]]:
    """Split `chunks` into parts of at most `most` tokens, each padded to its widest chunk; a part
    has at least one chunk."""
    part: list[int] = []
    widest = 0
    for chunk, width in zip(chunks, widths.tolist(), strict=True):
        if part and max(widest, width) * (len(part) + 1) > most:
            yield part
            part, widest = [], 0
        part.append(chunk)
        widest = max(widest, width)
    yield part
