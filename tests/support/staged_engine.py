"""A small engine that schedules itself and keeps KV in a layout of its own, for tests.

Its KV is divided by heads among "ranks", each with an array per layer, tokens before heads. Every
token's KV depends on the one before it, and the next token is a hash of all KV read back from the
ranks. So a wrong head, block or token changes the output. `reference` computes the same without
blocks. It has a prefix cache, computes prompts in chunks, and counts the tokens it computes. With a
CUDA driver its staging blocks are in device memory; its ranks are then all in this process.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b, shake_128
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pdserve.clock import ManualClock
from pdserve.engine_core.kit import ChoiceOutput
from pdserve.engine_core.staged_kv.core import StagedCore
from pdserve.engine_core.staged_kv.pool import StagingHandle, StagingPool, open_staging
from pdserve.engine_core.staged_kv.port import HeldFrames
from pdserve.errors import ConfigError, Overloaded
from pdserve.kv.block_pool import BlockPool
from pdserve.messages.engine import EngineCapabilities, EngineSpec, EngineStats, LoadProgress
from pdserve.messages.request import GenerateRequest, TokenLogprob
from pdserve.messages.tiers import CachedSource
from pdserve.messages.transfer import RankKvLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import numpy.typing as npt

    from pdserve.clock import Clock
    from pdserve.engine_core.staged_kv.port import StagedBlocks
    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.tiers import SourceName
    from pdserve.transfer.cuda.driver import CudaDriver

    Bytes2 = npt.NDArray[np.uint8]

LAYERS, HEADS, DIM, ITEM = 2, 4, 3, 2
_ROW = DIM * ITEM
_TOKEN = LAYERS * 2 * HEADS * _ROW
"""Bytes of KV per token."""
VOCAB = 97


def create() -> ToyEngine:
    """The engine's entry point."""
    return ToyEngine(ManualClock())


class DeviceBlocks:
    """Device memory as `StagingMemory`."""

    local = 1

    def __init__(self, driver: CudaDriver, size: Bytes) -> None:
        self._driver = driver
        self.address = driver.allocate(size)
        self._open = True

    def read(self, at: int, size: Bytes) -> bytes:
        return self._driver.read(self.address + at, size)

    def write(self, at: int, data: bytes) -> None:
        self._driver.write(self.address + at, data)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._driver.free(self.address)


class HostBlocks:
    """Staging memory of the host, mapped as a process of its own would."""

    def __init__(self, handle: StagingHandle) -> None:
        self._map = open_staging(handle)

    def read(self, at: int, size: Bytes) -> bytes:
        return self._map[at : at + size]

    def write(self, at: int, data: bytes) -> None:
        self._map[at : at + len(data)] = data

    def close(self) -> None:
        self._map.close()


class Rank:
    """One rank process: its heads of every layer, as [blocks][tokens][heads][k|v][dim]."""

    def __init__(self, blocks: int, tokens: int, heads: range) -> None:
        self.heads = heads
        shape = (blocks, tokens, len(heads), 2, _ROW)
        self.cache: list[Bytes2] = [np.full(shape, 0xEE, np.uint8) for _ in range(LAYERS)]
        self._staged: HostBlocks | DeviceBlocks | None = None
        self._tokens = tokens

    def write(self, block: int, token: int, content: Bytes2) -> None:
        """Store one token's KV: [layer][head][k|v][dim]."""
        for layer, cache in enumerate(self.cache):
            cache[block, token] = content[layer, self.heads.start : self.heads.stop]

    def read(self, block: int, token: int) -> list[Bytes2]:
        """One token's KV by layer."""
        return [cache[block, token] for cache in self.cache]

    def map(self, handle: StagingHandle, device: DeviceBlocks | None) -> None:
        """Reach the staging memory; `device`: what the handle's number stands for."""
        assert bool(handle.local) == (device is not None)
        self._staged = device or HostBlocks(handle)

    def close(self) -> None:
        """Let go of the staging memory; a device's belongs to the engine."""
        if isinstance(self._staged, HostBlocks):
            self._staged.close()
        self._staged = None

    def stage(self, block: int, slot: int, *, out: bool) -> None:
        """Copy this rank's heads of a block to a staging block, or back."""
        assert self._staged is not None
        run = self._tokens * _ROW
        for layer, cache in enumerate(self.cache):
            for kv in (0, 1):
                ours = cache[block, :, :, kv].transpose(1, 0, 2)
                at = (((slot * LAYERS + layer) * 2 + kv) * HEADS + self.heads.start) * run
                if out:
                    self._staged.write(at, ours.tobytes())
                else:
                    content = self._staged.read(at, len(self.heads) * run)
                    ours[:] = np.frombuffer(content, np.uint8).reshape(ours.shape)


@dataclass(eq=False)
class _Sequence:
    handle: int
    request: GenerateRequest
    output: ChoiceOutput
    salt: str
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    started: bool = False
    copied: int = 0
    """Leading blocks that need not be copied to staging any more."""
    load: StagedBlocks | None = None
    prefill: StagedBlocks | None = None

    @property
    def tokens(self) -> list[int]:
        return list(self.request.prompt) + self.output.tokens


class ToyEngine(StagedCore):
    """The engine. Options: `blocks`, `tp`, `staging` (blocks), `frames` (of a host tier), `compat`.

    A test says what is in the frames (`store`), and what would come from disk (`on_disk`)."""

    def __init__(self, clock: Clock, device: CudaDriver | None = None) -> None:
        super().__init__(clock)
        self._device = device
        self.computed_tokens = 0
        self.broken_loads: set[int] = set()
        """Staging blocks that cannot be read."""
        self.on_step: Callable[[], None] = lambda: None
        self.on_host: dict[bytes, int] = {}
        """Blocks in frames: the region's block of each, by name."""
        self.on_disk: set[bytes] = set()
        """Those of them that count as read from disk."""
        self.frame_holds: Counter[int] = Counter()
        self.frame_hits: list[CachedSource] = []
        self._running: list[_Sequence] = []

    # ------------------------------------------------------------------ the kit

    def open(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        progress(LoadProgress(stage="building a toy"))
        usual = {"blocks": "64", "tp": "1", "staging": "32", "frames": "0", "compat": "toy"}
        options = usual | spec.options
        self._budget, self._size = spec.max_batch_tokens, spec.block_size
        blocks, tp = int(options["blocks"]), int(options["tp"])
        self.cache = BlockPool(blocks, self._size)
        width = HEADS // tp
        self.ranks = [
            Rank(blocks, self._size, range(rank * width, (rank + 1) * width)) for rank in range(tp)
        ]
        self._options = options
        return EngineCapabilities(
            engine="toy",
            model_type="toy",
            dtype="float16",
            device="cpu",
            max_model_len=spec.max_model_len or 256,
            vocab_size=VOCAB,
            block_size=self._size,
            num_blocks=blocks,
            block_bytes=_TOKEN * self._size,
            max_batch_tokens=spec.max_batch_tokens,
            max_sequences=spec.max_sequences,
            compat_hash=options["compat"],
        )

    def make_staging(self, spec: EngineSpec) -> StagingPool:
        if self._options["staging"] == "no":
            raise ConfigError("a toy without staging")
        layout = RankKvLayout(
            content=self._options["compat"],
            layers=LAYERS,
            heads=HEADS,
            tokens=self._size,
            dim=DIM,
            itemsize=ITEM,
        )
        blocks, memory = int(self._options["staging"]), None
        if self._device is not None:
            memory = DeviceBlocks(self._device, blocks * _TOKEN * self._size)
        frames = int(self._options["frames"])
        self.staging = StagingPool(layout, blocks, memory, frames=frames)
        for rank in self.ranks:
            rank.map(self.staging.handle(), memory)
        return self.staging

    def add(self, handle: int, request: GenerateRequest) -> None:
        if request.prompt[0] == VOCAB - 1:
            raise Overloaded("the toy takes no such prompt")
        for choice in request.live:
            now = self.clock.now()
            output = ChoiceOutput(handle, choice, request, now, self._capabilities.max_model_len)
            self._running.append(_Sequence(handle, request, output, request.cache_salt))

    def drop(self, handle: int) -> None:
        for sequence in [one for one in self._running if one.handle == handle]:
            self._end(sequence)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def shutdown(self) -> int:
        if not hasattr(self, "cache"):
            return 0
        for rank in self.ranks:
            rank.close()
        self.cache.check()
        return self.cache.counts().used

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(super().stats(), computed_tokens=self.computed_tokens)

    # ------------------------------------------------------------------ staged KV

    def cached_blocks(self, request: GenerateRequest) -> int:
        return len(self._match(list(request.prompt) + request.given, request.cache_salt))

    def hold_prefix(self, request: GenerateRequest) -> list[int]:
        found = self._match(list(request.prompt) + request.given, request.cache_salt)
        self.cache.acquire(found)
        return found

    def release_prefix(self, blocks: Sequence[int]) -> None:
        self.cache.release(blocks)

    def store(self, request: GenerateRequest, blocks: int) -> None:
        """Copy leading blocks of a cached prompt to frames, and forget it on the device."""
        found = self._match(list(request.prompt), request.cache_salt)[:blocks]
        assert len(found) == blocks
        names = _names(list(request.prompt), self._size, request.cache_salt)
        for name, block in zip(names, found, strict=False):
            slot = self.staging.blocks.num_blocks + len(self.on_host)
            for rank in self.ranks:
                rank.stage(block, slot, out=True)
            self.on_host[name] = slot
        self.cache.clear()

    def bring_frames(self, request: GenerateRequest) -> frozenset[bytes]:
        return frozenset(self.on_disk)

    def hold_frames(
        self, request: GenerateRequest, first: int, read: Collection[bytes]
    ) -> HeldFrames:
        tokens = list(request.prompt) + request.given
        names = _names(tokens, self._size, request.cache_salt)[: (len(tokens) - 1) // self._size]
        here = [name for name in names[first:] if name in self.on_host]
        blocks = tuple(self.on_host[name] for name in here)
        self.frame_holds.update(blocks)
        counts: Counter[SourceName] = Counter("disk" if one in read else "host" for one in here)
        sources = (CachedSource(name, n * self._size) for name, n in counts.items())
        return HeldFrames(blocks, tuple(sources))

    def release_frames(self, blocks: Sequence[int]) -> None:
        self.frame_holds.subtract(blocks)

    def loaded_frames(self, sources: Sequence[CachedSource]) -> None:
        self.frame_hits += sources

    def load_staged(self, handle: int, request: GenerateRequest, blocks: StagedBlocks) -> None:
        self.add(handle, request)
        next(one for one in self._running if one.handle == handle).load = blocks

    def prefill_staged(self, handle: int, request: GenerateRequest, blocks: StagedBlocks) -> None:
        self.add(handle, request)
        next(one for one in self._running if one.handle == handle).prefill = blocks

    # ------------------------------------------------------------------ steps

    def advance(self, now: Seconds) -> None:
        """Compute up to a budget of tokens, sequence by sequence."""
        self.on_step()
        budget = self._budget
        for sequence in list(self._running):
            if budget <= 0 or not self._start(sequence, now):
                break
            count = min(budget, len(sequence.tokens) - sequence.computed)
            self._compute(sequence, count)
            budget -= count
            if sequence.prefill is not None:
                self._copy_out(sequence, sequence.prefill)
            if sequence.computed == len(sequence.tokens):
                self._sample(sequence, now)

    def _start(self, sequence: _Sequence, now: Seconds) -> bool:
        """Give a new sequence its blocks; False if too few are free."""
        if sequence.started:
            return True
        tokens = sequence.tokens
        whole = min(len(tokens) + sequence.request.sampling.max_tokens, 256)
        shared = self._match(tokens, sequence.salt)
        fresh = self.cache.reserve(-(-whole // self._size) - len(shared), shared=shared)
        if fresh is None:
            return False
        sequence.blocks, sequence.started = shared + fresh, True
        sequence.computed = len(shared) * self._size
        assert sequence.output.begin(now) is None
        if sequence.load is not None:
            self._load(sequence, sequence.load)
        return True

    def _load(self, sequence: _Sequence, load: StagedBlocks) -> None:
        first = sequence.computed // self._size
        failed = 0
        for index in range(first, -(-load.tokens // self._size)):
            slot = load.slots[index - load.first]
            if slot in self.broken_loads:
                failed = load.tokens - index * self._size
                break
            for rank in self.ranks:
                rank.stage(sequence.blocks[index], slot, out=False)
        sequence.computed = load.tokens - failed if failed else load.tokens - 1
        sequence.load = None
        self.let_go(sequence.handle, failed)

    def _copy_out(self, sequence: _Sequence, prefill: StagedBlocks) -> None:
        done = sequence.computed == prefill.tokens
        end = -(-prefill.tokens // self._size) if done else sequence.computed // self._size
        # A staging block that was reported may have been delivered and reused already.
        for index in range(max(prefill.first, sequence.copied), end):
            for rank in self.ranks:
                slot = prefill.slots[index - prefill.first]
                rank.stage(sequence.blocks[index], slot, out=True)
        sequence.copied = end
        self.copied(sequence.handle, sequence.computed)

    def _compute(self, sequence: _Sequence, count: int) -> None:
        tokens, end = sequence.tokens, sequence.computed + count
        for position in range(sequence.computed, end):
            before = self._read(sequence, position - 1) if position else b""
            content = np.frombuffer(_entry(tokens[position], position, before), np.uint8)
            block, at = sequence.blocks[position // self._size], position % self._size
            for rank in self.ranks:
                rank.write(block, at, content.reshape(LAYERS, HEADS, 2, _ROW))
        self.computed_tokens += count
        sequence.computed = end
        full = end // self._size
        names = _names(tokens, self._size, sequence.salt)[:full]
        sequence.blocks[:full] = self.cache.commit_run(sequence.blocks[:full], names, b"root")

    def _read(self, sequence: _Sequence, position: int) -> bytes:
        block, at = sequence.blocks[position // self._size], position % self._size
        parts = [rank.read(block, at) for rank in self.ranks]
        layers = [np.concatenate([part[layer] for part in parts]) for layer in range(LAYERS)]
        return b"".join(layer.tobytes() for layer in layers)

    def _sample(self, sequence: _Sequence, now: Seconds) -> None:
        sampling, tokens = sequence.request.sampling, sequence.tokens
        entries = b"".join(self._read(sequence, at) for at in range(len(tokens)))
        token = _choose(sequence.request, sequence.output.choice, tokens, entries)
        first = len(sequence.output.tokens) == len(sequence.request.given)
        prompt_logprobs = None
        if first and sampling.prompt_logprobs is not None:
            prompt = sequence.request.prompt[1:]
            prompt_logprobs = [TokenLogprob(one, -0.5, 1, []) for one in prompt]
        logprob = None if sampling.logprobs is None else TokenLogprob(token, -0.5, 1, [])
        delta = sequence.output.take(token, now, logprob=logprob, prompt_logprobs=prompt_logprobs)
        self.deltas.append(delta)
        if delta.finish is not None:
            self._end(sequence)

    def _end(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        self.cache.release(sequence.blocks)
        if sequence.load is not None or sequence.prefill is not None:
            self.let_go(sequence.handle)

    def _match(self, tokens: list[int], salt: str) -> list[int]:
        usable = (len(tokens) - 1) // self._size
        return self.cache.match(_names(tokens, self._size, salt)[:usable])


def _names(tokens: list[int], size: int, salt: str) -> list[bytes]:
    ends = range(size, len(tokens) + 1, size)
    return [blake2b(repr((salt, tokens[:end])).encode(), digest_size=16).digest() for end in ends]


def _entry(token: int, position: int, before: bytes) -> bytes:
    return shake_128(f"{token} {position} ".encode() + before).digest(_TOKEN)


def _choose(request: GenerateRequest, choice: int, tokens: list[int], entries: bytes) -> int:
    key = (tokens, request.sampling.seed if request.sampling.temperature else 0, choice)
    if not request.sampling.temperature:
        key = (tokens, 0, 0)
    digest = blake2b(entries + repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB


def reference(request: GenerateRequest, choice: int = 0) -> list[int]:
    """The output of one choice, computed alone and without blocks."""
    output: list[int] = list(request.output[choice]) if request.output else []
    entries: list[bytes] = []
    sampling: Any = request.sampling
    while len(output) < sampling.max_tokens:
        tokens = list(request.prompt) + output
        for position in range(len(entries), len(tokens)):
            entries.append(_entry(tokens[position], position, entries[-1] if entries else b""))
        token = _choose(request, choice, tokens, b"".join(entries))
        output.append(token)
        if token in sampling.eos_token_ids and not sampling.ignore_eos:
            break
    return output
