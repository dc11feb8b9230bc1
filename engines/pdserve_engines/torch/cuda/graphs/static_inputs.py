"""Holds what graphs read of a step at fixed addresses: token ids, positions, blocks, work items.

A graph is captured with these tensors, and every step writes its own numbers into them before the
replay, in one copy. Rows without a sequence are padding: their block is -1, so they write no KV,
and no work item is theirs, so they read none.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from pdserve_engines.torch.cuda.decode_attention import DecodeInputs
from pdserve_engines.torch.cuda.decode_plan import list_items, most_items
from pdserve_engines.torch.cuda.step_attention import DecodeAttention
from pdserve_engines.torch.models.upload import ALIGNED, upload_into

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve_engines.torch.cuda.decode_plan import WorkItems
    from pdserve_engines.torch.cuda.step_attention import LayerAttention
    from pdserve_engines.torch.kv_pool import KvPool
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.models.forward_batch import ForwardBatch, Int32s

__all__ = ["Capacity", "StaticInputs", "StaticStep"]

_SHARED: Final = 2
"""Most tokens of a step's sequences, for each token of the pool: shared blocks count anew."""
_NO_BLOCK: Final = -1
"""Block of a row that stores nothing, as `rotate_store` knows it."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step that graphs compute. It sets the memory that they take."""

    rows: int
    items: int
    """Work items of one window."""
    blocks: int
    """Entries of all block tables."""

    @classmethod
    def of(cls, rows: int, num_blocks: int, block_size: int, max_model_len: int) -> Capacity:
        """That of `rows` sequences over a pool. Where they share more blocks than graphs have room
        for, steps are launched without one."""
        tokens = min(_SHARED * num_blocks * block_size, rows * max_model_len)
        return cls(rows, most_items(tokens, rows), tokens // block_size + rows)


class StaticInputs:
    """The tensors, for the largest batch. Smaller batches use their beginnings."""

    def __init__(
        self,
        capacity: Capacity,
        windows: Iterable[int | None],
        pool: KvPool,
        config: ModelConfig,
        programs: int,
    ) -> None:
        """`windows`: those of all layers. `programs`: those that fill the device."""
        self._capacity, self._windows = capacity, tuple(windows)
        self._pool, self._config = pool, config
        self._programs = max(1, programs // config.kv_heads)
        rows, device = capacity.rows, pool.tensor.device
        sizes = [rows] * 5
        for _ in self._windows:
            sizes += [2 * capacity.items, rows + 1, 1]
        # The block tables come last: only what is used of them is copied.
        starts = itertools.accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0)
        self._starts = list(starts)
        self._whole = torch.zeros(
            self._starts[-1] + capacity.blocks, dtype=torch.int32, device=device
        )
        # Captures launch what is captured, too.
        self._view(2, rows).fill_(_NO_BLOCK)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)

    def step(self, rows: int) -> StaticStep:
        """The inputs of the first `rows` rows."""
        common = [self._view(place, rows) for place in range(5)]
        tokens, positions, blocks, lengths, offsets = common
        tables = self._whole[self._starts[-1] :]
        inputs: dict[int | None, DecodeInputs] = {}
        for number, window in enumerate(self._windows):
            first = 5 + 3 * number
            inputs[window] = DecodeInputs(
                rows=self._rows[:rows],
                lengths=lengths,
                tables=tables,
                table_offsets=offsets,
                items=self._view(first, 2 * self._capacity.items).view(-1, 2),
                first_items=self._view(first + 1, rows + 1),
                count=self._view(first + 2, 1),
                splits=True,
                programs=self._programs,
            )
        attention = DecodeAttention(self._pool, self._config, inputs)
        return StaticStep(tokens, positions, blocks, self._rows[:rows], attention, inputs)

    def fill(self, batch: ForwardBatch) -> bool:
        """Copy the numbers of `batch` to the device; it has one token for each sequence. False:
        it is larger than the capacity, nothing is copied."""
        lengths = batch.starts + 1
        listed = {window: list_items(lengths, window) for window in self._windows}
        if not self._fits(batch, listed):
            return False
        packed = np.zeros(self._starts[-1] + len(batch.tables), np.int32)
        blocks = batch.blocks(self._pool.layout.block_size).astype(np.int32)
        fields: list[Int32s] = [
            batch.tokens,
            batch.positions,
            blocks,
            lengths,
            batch.table_offsets[:-1],
        ]
        for each in listed.values():
            fields += [each.items.reshape(-1), each.first_items, each.count]
        packed[self._starts[2] :][: self._capacity.rows] = _NO_BLOCK
        for start, field in zip(self._starts, [*fields, batch.tables], strict=True):
            packed[start : start + len(field)] = field
        for number, each in enumerate(listed.values()):
            start = self._starts[6 + 3 * number]
            packed[start + len(lengths) : start + self._capacity.rows + 1] = len(each.items)
        upload_into(packed, self._whole[: len(packed)])
        if batch.fed is not None:
            tokens = self._view(0, len(batch.tokens))
            tokens.copy_(batch.fill(tokens))
        return True

    def _fits(self, batch: ForwardBatch, listed: Mapping[int | None, WorkItems]) -> bool:
        most = self._capacity
        items = max(len(each.items) for each in listed.values())
        return (
            len(batch.starts) <= most.rows
            and items <= most.items
            and (len(batch.tables) <= most.blocks)
        )

    def _view(self, place: int, size: int) -> torch.Tensor:
        start = self._starts[place]
        return self._whole[start : start + size]


@dataclass(frozen=True, slots=True)
class StaticStep:
    """A step's inputs as `KernelModel` reads them; `StepAttention` is the other kind."""

    tokens: torch.Tensor
    positions: torch.Tensor
    blocks: torch.Tensor
    rows: torch.Tensor
    """All of them: `[R]`, like the others."""
    attention: LayerAttention
    inputs: Mapping[int | None, DecodeInputs]
    """Those of the attention, by window. Rows of padding have no keys."""

    def attend(self, index: int, qkv: torch.Tensor) -> torch.Tensor:
        """As `StepAttention.attend`. Rows of padding hold anything."""
        return self.attention.attend(index, qkv)
