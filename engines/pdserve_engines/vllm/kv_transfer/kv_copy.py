"""Copies one rank's KV between vLLM's cache and staging blocks. Needs torch, imports no vLLM.

vLLM gives every layer a tensor `[block][head][token][content]`, in any strides. Staging blocks are
`[layer][k|v][head][token][dim]` with the heads of all ranks. How a head's content divides into k
and v depends on the attention back end:

    rows      each token has a row of k and then a row of v
    planes    the k of all tokens come first, then the v, packed for the processor

vLLM may divide its blocks for its kernels; a staging block is always a whole block of its manager.

Staging blocks are in host memory, which the rank maps, or on the rank's own device. There the
copies are work of the device, and each call waits for it: peers may read what was saved, and reuse
what was loaded, as soon as the call has returned.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.engine_core.staged_kv.pool import open_staging
from pdserve.errors import EngineError
from pdserve.transfer.copy_plan import heads_of
from pdserve_engines.vllm.kv_transfer.device_staging import synchronise, tensor_of

if TYPE_CHECKING:
    import mmap
    from collections.abc import Iterator, Sequence

    from pdserve.engine_core.staged_kv.pool import StagingHandle
    from pdserve.messages.transfer import RankKvLayout

__all__ = ["CacheForm", "HostMaps", "RankCopier", "layer_view", "staged_views"]

_CHUNK = 64
"""Most blocks copied at once: what is gathered on a device for a copy needs memory there."""


@dataclass(frozen=True, slots=True)
class CacheForm:
    """How one rank keeps its KV. All ranks of an engine have the same."""

    packing: str
    """`rows`, or `planes` and what the packing depends on."""
    layers: int
    heads: int
    """KV heads on this rank."""
    tokens: int
    """Tokens of a block of vLLM's manager."""
    dim: int
    itemsize: int
    blocks: int


def layer_view(cache: Any, form: CacheForm) -> Any:
    """A layer's cache as integers, `[block][k|v][head][part][token][dim]`: a block consists of
    `part`s, the blocks of vLLM's kernels. Shares the memory."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    cache = cache.view(integers[form.itemsize])
    parts = cache.shape[0] // form.blocks
    if form.packing == "rows":
        split = cache.unflatten(-1, (2, form.dim)).unflatten(0, (form.blocks, parts))
        return split.permute(0, 4, 2, 1, 3, 5)
    # A head's tokens are one run of memory here, whose halves are k and v.
    count, heads, tokens, _ = cache.shape
    split = cache.view(count, heads, 2, tokens, form.dim).unflatten(0, (form.blocks, parts))
    return split.permute(0, 3, 2, 1, 4, 5)


def staged_views(memory: Any, handle: StagingHandle, heads: range, parts: int) -> list[Any]:
    """This rank's heads of the staging blocks, for each layer, in the axes of `layer_view`.
    `memory`: a tensor of bytes."""
    import torch

    layout = handle.layout
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    shape = (handle.blocks, layout.layers, 2, layout.heads, layout.tokens, layout.dim)
    whole: Any = memory.view(integers[layout.itemsize]).view(shape)
    ours = whole[:, :, :, heads.start : heads.stop].unflatten(4, (parts, layout.tokens // parts))
    return [ours[:, layer] for layer in range(layout.layers)]


@dataclass(slots=True)
class _HostMap:
    memory: mmap.mmap
    whole: Any
    """All of it as a tensor of bytes."""
    pinned: bool
    """Whether the device's driver knows it: copies are direct then."""
    users: int = 0


class HostMaps:
    """Memory of the engine process that a rank has mapped. Each is mapped, and made known to the
    device, once for all of the rank's copiers."""

    def __init__(self) -> None:
        self._maps: dict[StagingHandle, _HostMap] = {}

    def open(self, handle: StagingHandle, device: Any) -> Any:
        """The memory as a tensor of bytes; `close` follows once nothing uses it. Raises
        `EngineError` if it is not there."""
        found = self._maps.get(handle)
        if found is None:
            found = self._maps[handle] = self._open(handle, device)
        found.users += 1
        return found.whole

    @staticmethod
    def _open(handle: StagingHandle, device: Any) -> _HostMap:
        import torch

        memory = open_staging(handle)
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        pinned = False
        if device.type == "cuda":
            pinned = int(_driver().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0)) == 0
        return _HostMap(memory, whole, pinned)

    def close(self, handle: StagingHandle) -> None:
        """One user has let go of it, and of every view."""
        found = self._maps[handle]
        found.users -= 1
        if found.users:
            return
        del self._maps[handle]
        if found.pinned:
            _driver().cudaHostUnregister(found.whole.data_ptr())
        found.whole = None
        found.memory.close()


class RankCopier:
    """Copies blocks of one rank. `map` comes first."""

    def __init__(
        self,
        caches: Sequence[Any],
        form: CacheForm,
        tp: int,
        rank: int,
        maps: HostMaps | None = None,
    ) -> None:
        """`caches`: vLLM's tensors, one per layer, in the model's order. `maps`: shared with the
        rank's other copiers."""
        self.form = form
        self._tp = tp
        self._rank = rank
        self._device = caches[0].device
        self._parts = caches[0].shape[0] // form.blocks
        self._caches = [layer_view(cache, form) for cache in caches]
        self._staged: list[Any] = []
        self._maps = maps or HostMaps()
        self._handle: StagingHandle | None = None
        self._writes = True

    def map(self, handle: StagingHandle) -> None:
        """Find the staging memory of the engine process, once. Raises `EngineError` if it is not
        there, `PlanError` if the heads cannot be divided."""
        if handle == self._handle:
            return
        self.close()
        layout = _rank_layout(handle.layout, self._tp, self._rank)
        heads = heads_of(layout)
        # If ranks hold the same head, one of them writes it.
        self._writes = self._tp <= layout.heads or self._rank % (self._tp // layout.heads) == 0
        memory = self._beside(handle) if handle.local else self._maps.open(handle, self._device)
        self._handle = handle
        self._staged = staged_views(memory, handle, heads, self._parts)

    def _beside(self, handle: StagingHandle) -> Any:
        """Staging memory on this rank's device."""
        memory = tensor_of(handle)
        if memory.device != self._device:
            raise EngineError(f"staging is on {memory.device}, and the KV on {self._device}")
        return memory

    def save(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the cache to staging blocks: (block, staging block). Returns when the
        bytes are there."""
        if not self._writes:
            return
        with self._settled():
            for some in _chunks(pairs):
                blocks, slots = self._indices(some)
                # Gathered on the device first, so that the device's wait is one for all layers.
                picked = [cache.index_select(0, blocks) for cache in self._caches]
                for staged, content in zip(self._staged, picked, strict=True):
                    staged.index_copy_(0, slots, content.to(staged.device))

    def load(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy staging blocks to blocks of the cache: (block, staging block). Returns when the
        staging blocks are not read any more."""
        with self._settled():
            for some in _chunks(pairs):
                blocks, slots = self._indices(some)
                for cache, staged in zip(self._caches, self._staged, strict=True):
                    content = staged.index_select(0, slots)
                    cache.index_copy_(0, blocks, content.to(self._device))

    @contextlib.contextmanager
    def _settled(self) -> Iterator[None]:
        """Wait in the end, also after an error, for copies from and to staging blocks on the
        device. Those of host memory have waited for themselves."""
        try:
            yield
        finally:
            if self._handle is not None and self._handle.local:
                synchronise(self._device)

    def _indices(self, pairs: Sequence[tuple[int, int]]) -> tuple[Any, Any]:
        """Raises IndexError for a block that does not exist: torch would read other memory."""
        import torch

        assert self._handle is not None, "the staging memory is not mapped"
        for block, slot in pairs:
            if not (0 <= block < self.form.blocks and 0 <= slot < self._handle.blocks):
                raise IndexError(f"there is no block {block} or no staging block {slot}")
        blocks = torch.tensor([block for block, _ in pairs], device=self._device)
        slots = torch.tensor([slot for _, slot in pairs], device=self._staged[0].device)
        return blocks, slots

    def close(self) -> None:
        """Unmap the staging memory. Idempotent."""
        self._staged = []
        handle, self._handle = self._handle, None
        if handle is not None and not handle.local:
            self._maps.close(handle)


def _driver() -> Any:
    from torch.cuda import cudart

    runtime: Any = cudart
    return runtime()


def _rank_layout(layout: RankKvLayout, tp: int, rank: int) -> RankKvLayout:
    return msgspec.structs.replace(layout, tp=tp, rank=rank)


def _chunks(pairs: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
    return [pairs[at : at + _CHUNK] for at in range(0, len(pairs), _CHUNK)]
