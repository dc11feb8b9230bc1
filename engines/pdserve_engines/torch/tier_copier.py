"""Copies KV blocks between a pool on a GPU and the host arena of the lower tiers.

It copies in a stream of its own, from a thread beside the core's, so that steps go on meanwhile.
The arena is page-locked, without which copies are slow and not asynchronous. A block that is copied
out was computed by a step that has ended (`TorchExecutor` settles such steps), and one that is
copied in is in no plan before the copy has ended, or the step waits for it on the host before it
launches what reads it (`StepPlan.gate`): so the streams need no events between them.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from pdserve.kv.storage import BlockMemory

__all__ = ["TorchTierCopier"]

_log = logging.getLogger(__name__)


class TorchTierCopier:
    """A `kv.tiers.jobs.BlockCopier` for a tensor of blocks on any device."""

    def __init__(self, blocks: torch.Tensor, arena: BlockMemory) -> None:
        """`blocks`: the pool, one row per block. The arena's frames have a block's size."""
        self._device = blocks.device
        self._blocks = blocks.reshape(len(blocks), -1).view(torch.uint8)
        self._view = arena.view()
        self._frames = torch.frombuffer(self._view, dtype=torch.uint8).view(arena.num_blocks, -1)
        self._stream: torch.cuda.Stream | None = None
        self._pinned = False
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._pinned = self._pin(arena)

    def _pin(self, arena: BlockMemory) -> bool:
        """Page-lock the arena; False, with a warning, where the system does not allow it."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        failed = int(runtime.cudaHostRegister(self._frames.data_ptr(), arena.size, 0))
        if failed:
            _log.warning(
                "the host tier of %d bytes cannot be page-locked (CUDA error %d): copies to and "
                "from it are slow; raise the limit of locked memory (ulimit -l)",
                *(arena.size, failed),
            )
        return not failed

    def copy_out(self, blocks: Sequence[int], frames: Sequence[int]) -> None:
        """Copy device blocks to frames; returns when the bytes are there."""
        self._copy(self._frames, frames, self._blocks, blocks)

    def copy_in(
        self,
        frames: Sequence[int],
        blocks: Sequence[int],
        span: tuple[int, int] | None = None,
    ) -> None:
        """Copy frames to device blocks, or the bytes `span` of each; returns when steps may read
        them."""
        begin, end = (0, self._blocks.shape[1]) if span is None else span
        self._copy(self._blocks[:, begin:end], blocks, self._frames[:, begin:end], frames)

    def _copy(
        self, target: torch.Tensor, to: Sequence[int], source: torch.Tensor, from_: Sequence[int]
    ) -> None:
        with torch.inference_mode(), self._in_stream():
            for there, here in zip(to, from_, strict=True):
                target[there].copy_(source[here], non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def _in_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def close(self) -> None:
        """Unlock the arena and let go of both memories. No copy is under way. Idempotent."""
        if self._pinned:
            self._pinned = False
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(self._frames.data_ptr())
        self._blocks = self._frames = torch.empty(0)
        self._view.release()
