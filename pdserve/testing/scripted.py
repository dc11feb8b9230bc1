"""Provides a scripted executor: no model, but KV that matters.

Every computed token writes one entry into a small block-major array, at the place in the sequence's
block table, and the entry depends on the one before it, as attention does. The next token is a hash
of all entries read back, of all token ids, and, above temperature 0, of the noise key. So a wrong
block table, a missed copy-on-write, a stale or shared block, a skipped or doubled position all
change the output, and a correct engine gives the same tokens however it batches, chunks, preempts
or reuses.

`reference_tokens` computes the same without blocks. Faults are triggered by token ids, named in
`EngineSpec.options`, so that they work across a process boundary.

Engine name: `pdserve.testing.scripted:create`.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from hashlib import blake2b
from typing import TYPE_CHECKING

from pdserve.engine_core.executor import (
    KvBlockShape,
    ModelInfo,
    ProgressFn,
    ScheduledChunk,
    StepPlan,
    StepResult,
)
from pdserve.engine_core.kv_transfer.kv_region import layout_of, region_in_memory
from pdserve.errors import ConfigError, EngineDied
from pdserve.kv.storage import BlockMemory
from pdserve.messages.request import SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import SequenceKey
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.request import GenerateRequest
    from pdserve.token_ids import TokenIds
    from pdserve.transfer.base import Region

__all__ = [
    "ENGINE",
    "ScriptedExecutor",
    "create",
    "reference_entries",
    "reference_tokens",
    "reference_vector",
]

ENGINE = "pdserve.testing.scripted:create"

_ENTRY = 16
"""Bytes of KV per token: two k and v values of four bytes, say."""

_DEFAULTS = {
    "vocab": "97",
    "max_len": "256",
    "eos": "2",
    "blocks": "64",
    "raise_on": "",
    "spoil_on": "",
    "break_on": "",
    "die_on": "",
    "hang_on": "",
    "step_ms": "0",
    "load_ms": "0",
    "load_error": "",
    "layers": "1",
    "embedding": "8",
}
"""Options and their defaults. `…_on` name a prompt token: a step that computes it raises, comes to
nothing for the sequence that has it, breaks the executor for good, kills the process, or sleeps for
a minute. `layers`, a divisor of 8, is how many runs of bytes a block is said to consist of.
`embedding`: numbers of a vector, 16 at most; 0: it makes none."""


def create() -> ScriptedExecutor:
    """Creates the executor; the engine's entry point."""
    return ScriptedExecutor()


class ScriptedExecutor:
    """An `Executor` without a model. The spec's options set its pool size and lengths."""

    def __init__(self, on_plan: Callable[[StepPlan], None] | None = None) -> None:
        """`on_plan` is called with every plan before it is computed, in tests that run the core
        inline."""
        self._on_plan = on_plan
        self.released: list[tuple[int, int]] = []
        """Keys of all sequences that `release` named, in order."""
        self.written = 0
        """KV entries written so far."""
        self._memory: BlockMemory | None = None
        self._means: dict[SequenceKey, tuple[int, bytes]] = {}
        """Tokens that are in a mean, and a hash of them."""

    # ------------------------------------------------------------------ executor interface

    def load(self, spec: EngineSpec, progress: ProgressFn) -> ModelInfo:
        unknown = spec.options.keys() - _DEFAULTS.keys()
        if unknown:
            raise ConfigError(f"unknown engine options: {', '.join(sorted(unknown))}")
        self._options = _DEFAULTS | spec.options
        progress("reading the script", 0.5)
        time.sleep(int(self._options["load_ms"]) / 1000)
        if self._options["load_error"]:
            raise ConfigError(self._options["load_error"])
        self._size = spec.block_size
        self._vocab = int(self._options["vocab"])
        layers = int(self._options["layers"])
        layout = KvBlockShape(layers, 1, spec.block_size, 1, _ENTRY // 2 // layers)
        info = ModelInfo(
            model_type="scripted",
            dtype="float32",
            device="cpu",
            vocab_size=self._vocab,
            max_model_len=spec.max_model_len or int(self._options["max_len"]),
            eos_token_ids=(int(self._options["eos"]),),
            layout=layout,
            weight_bytes=0,
            kv_memory=int(self._options["blocks"]) * layout.block_bytes,
            compat_hash="scripted",
            embedding_size=int(self._options["embedding"]),
        )
        self._layout = layout_of(info)
        return info

    def allocate(self, num_blocks: int) -> None:
        self._memory = BlockMemory(num_blocks, (self._size, _ENTRY))

    def region(self) -> Region:
        """The pool, as memory that peers may reach (`engine_core.executor.SupportsKvTransfer`)."""
        return region_in_memory(self._layout, self._kv)

    def execute(self, plan: StepPlan) -> StepResult:
        if self._on_plan is not None:
            self._on_plan(plan)
        if (pause := int(self._options["step_ms"])) > 0:
            _nap(pause / 1000, plan.tick)
        if plan.gate is not None:
            for layer in sorted(plan.gate_at):
                plan.gate(layer)
        for source, destination in plan.copies:
            self._kv.copy(source, destination)
        for chunk in plan.chunks:
            self._misbehave(chunk)
            self._write(chunk)
        if plan.watch is not None:
            for layers in sorted(plan.watch_at):
                plan.watch(layers)
        return self._result(plan)

    def _result(self, plan: StepPlan) -> StepResult:
        """What a step brings, once its KV is written."""
        faults = {
            index: "the script says: spoilt"
            for index, chunk in enumerate(plan.chunks)
            if self._hits("spoil_on", _prompt_tokens(chunk))
        }
        sampling = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        tokens = [self._next_token(sequence) for sequence in sampling]
        return StepResult(
            tokens=tokens,
            logprobs=[_logprob(s.sampling, t) for s, t in zip(sampling, tokens, strict=True)],
            prompt_logprobs=_prompt_logprobs(plan),
            faults=faults,
            embeddings={
                index: vector
                for index, chunk in enumerate(plan.chunks)
                if chunk.sequence.pools and (vector := self._pool(chunk))
            },
        )

    def release(self, sequences: Seq[Sequence]) -> None:
        self.released += [sequence.key for sequence in sequences]
        for sequence in sequences:
            self._means.pop(sequence.key, None)

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    # ------------------------------------------------------------------ KV content

    @property
    def _kv(self) -> BlockMemory:
        assert self._memory is not None
        return self._memory

    def _write(self, chunk: ScheduledChunk) -> None:
        sequence, size = chunk.sequence, self._size
        before = self._read(sequence, chunk.start - 1) if chunk.start else b""
        for position in range(chunk.start, chunk.start + chunk.count):
            before = _entry(sequence.tokens[position], position, before)
            block, slot = sequence.blocks[position // size], position % size
            self._kv.view(block)[slot * _ENTRY : (slot + 1) * _ENTRY] = before
        self.written += chunk.count

    def _read(self, sequence: Sequence, position: int) -> bytes:
        block, slot = sequence.blocks[position // self._size], position % self._size
        return bytes(self._kv.view(block)[slot * _ENTRY : (slot + 1) * _ENTRY])

    def _next_token(self, sequence: Sequence) -> int:
        length = len(sequence.tokens)
        full, rest = divmod(length, self._size)
        blocks = [bytes(self._kv.view(block)) for block in sequence.blocks[: full + bool(rest)]]
        entries = b"".join(blocks)[: length * _ENTRY]
        return _choose(sequence.request, sequence.choice, sequence.tokens, entries, self._vocab)

    def _pool(self, chunk: ScheduledChunk) -> bytes:
        """The vector, once the chunk is the last one. A mean is made of the chunks as they come:
        one that is missing, or comes twice, is a failure."""
        sequence, end = chunk.sequence, chunk.start + chunk.count
        if sequence.request.pooling == "mean":
            held, state = self._means.get(sequence.key, (0, b""))
            if held != chunk.start:
                raise RuntimeError(f"a mean of {held} tokens goes on at {chunk.start}")
            for position in range(chunk.start, end):
                state = blake2b(state + self._read(sequence, position)).digest()
            self._means[sequence.key] = (end, state)
        if not chunk.vector:
            return b""
        entries = [self._read(sequence, position) for position in range(sequence.prompt_len)]
        mean = self._means[sequence.key][1] if sequence.request.pooling == "mean" else b""
        return _vector(mean, entries, int(self._options["embedding"]))

    def _misbehave(self, chunk: ScheduledChunk) -> None:
        tokens = _prompt_tokens(chunk)
        if self._hits("raise_on", tokens):
            raise RuntimeError("the script says: this step fails")
        if self._hits("break_on", tokens):
            raise EngineDied("the script says: broken")
        if self._hits("die_on", tokens):
            os.write(2, b"the script says: die\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if self._hits("hang_on", tokens):
            time.sleep(60)

    def _hits(self, option: str, tokens: Iterable[int]) -> bool:
        return bool(self._options[option]) and int(self._options[option]) in tokens


def _nap(seconds: float, tick: Callable[[int], None] | None) -> None:
    """Sleeps in slices, since a real step has layers."""
    slices = 1 + int(seconds / 0.05)
    for layer in range(slices):
        time.sleep(seconds / slices)
        if tick is not None:
            tick(layer + 1)


def _prompt_tokens(chunk: ScheduledChunk) -> TokenIds:
    """The prompt tokens that the chunk computes."""
    end = min(chunk.start + chunk.count, chunk.sequence.prompt_len)
    return chunk.sequence.tokens[chunk.start : end]


def reference_tokens(
    request: GenerateRequest, choice: int = 0, *, vocab: int = 97, max_len: int = 256
) -> list[int]:
    """The output tokens of one choice, computed alone and without blocks; includes given output."""
    sampling = request.sampling
    output = list(request.output[choice]) if request.output else []
    tokens = list(request.prompt) + output
    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops |= set(sampling.eos_token_ids)
    entries: list[bytes] = []
    done = bool(output) and output[-1] in stops and len(output) > sampling.min_tokens
    while not done and len(output) < sampling.max_tokens and len(tokens) < max_len:
        for position in range(len(entries), len(tokens)):
            entries.append(_entry(tokens[position], position, entries[-1] if entries else b""))
        token = _choose(request, choice, tokens, b"".join(entries), vocab)
        tokens.append(token)
        output.append(token)
        done = token in stops and len(output) > sampling.min_tokens
    return output


def reference_entries(tokens: Seq[int]) -> list[bytes]:
    """The KV of each token, computed alone and without blocks."""
    entries: list[bytes] = []
    for position, token in enumerate(tokens):
        entries.append(_entry(token, position, entries[-1] if entries else b""))
    return entries


def reference_vector(request: GenerateRequest, size: int = 8) -> bytes:
    """The embedding of a prompt, computed alone and without blocks."""
    entries, state = reference_entries(request.prompt), b""
    for entry in entries:
        state = blake2b(state + entry).digest()
    return _vector(state if request.pooling == "mean" else b"", entries, size)


def _vector(mean: bytes, entries: list[bytes], size: int) -> bytes:
    """Small whole numbers and zeros are exact in whatever way they are written."""
    digest = blake2b(b"".join(entries), key=mean).digest()
    return struct.pack(f"<{size}f", *struct.unpack(f"<{size}h", digest[: 2 * size]))


def _entry(token: int, position: int, before: bytes) -> bytes:
    return blake2b(struct.pack("<II", token, position) + before, digest_size=_ENTRY).digest()


def _choose(
    request: GenerateRequest, choice: int, tokens: Seq[int], entries: bytes, vocab: int
) -> int:
    """A hash of everything that may matter; masked ids are passed over."""
    sampling = request.sampling
    state = blake2b(entries, digest_size=8)
    state.update(struct.pack(f"<{len(tokens)}I", *tokens))
    position = len(tokens) - len(request.prompt)
    if sampling.temperature > 0:
        state.update(struct.pack("<QIII", sampling.seed, request.prompt_index, choice, position))
    token = int.from_bytes(state.digest(), "little") % vocab
    masked: set[int] = set()
    if position < sampling.min_tokens:
        masked = set(sampling.stop_token_ids) | set(sampling.eos_token_ids)
    while token in masked:
        token = (token + 1) % vocab
    return token


def _logprob(sampling: SamplingParams, token: int) -> TokenLogprob | None:
    if sampling.logprobs is None:
        return None
    return _made_up(token, sampling.logprobs)


def _made_up(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, 1, [(token + i, -0.5 - i) for i in range(top)])


def _prompt_logprobs(plan: StepPlan) -> dict[int, list[TokenLogprob]]:
    rows: dict[int, list[TokenLogprob]] = {}
    for index, chunk in enumerate(plan.chunks):
        top = chunk.sequence.sampling.prompt_logprobs
        if top is not None and chunk.start < chunk.sequence.prompt_len - 1:
            end = min(chunk.start + chunk.count, chunk.sequence.prompt_len - 1)
            tokens = chunk.sequence.tokens[chunk.start + 1 : end + 1]
            rows[index] = [_made_up(token, top) for token in tokens]
    return rows
