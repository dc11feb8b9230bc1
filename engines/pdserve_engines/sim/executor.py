"""Implements the sim engine's executor: returns tokens at once, and says how long a step takes.

`execute` never waits. `seconds` says how long a step takes, and `foresee` which tokens the next
decode steps return, so that `SimCore` can compute many steps as one. It reads sequences and never
changes them; the core owns it.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pdserve.engine_core.executor import KvBlockShape, ModelInfo, StepPlan, StepResult
from pdserve.engine_core.kv_transfer.kv_region import layout_of
from pdserve.engine_core.structured_output import (
    GrammarError,
    StructuredOutputManager,
    read_tokenizer,
    structured_output_features,
    uses_structured_output,
)
from pdserve.messages.card import EXACT_PREFIX
from pdserve.perf_model.step_time import WorkerPreset, preset_of, read_timing
from pdserve_engines.sim.block_content import BlockContent, DigestContent, NoContent
from pdserve_engines.sim.block_entries import make_entries
from pdserve_engines.sim.core import SimCore
from pdserve_engines.sim.noise import StepNoise
from pdserve_engines.sim.settings import (
    SimOptions,
    SimVocabulary,
    check_ranks,
    parse_options,
    read_model,
)
from pdserve_engines.sim.tokens import (
    EMBEDDING_SIZE,
    ENTRY_BYTES,
    constrained_word,
    made_up_logprob,
)

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from pdserve.clock import Clock
    from pdserve.engine_core.executor import ProgressFn
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import Seconds, TokenId
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.request import TokenLogprob
    from pdserve.transfer.base import Region

__all__ = ["SimExecutor"]


class SimExecutor:
    """Computes nothing: returns tokens and the time that a real step would take. `SimCore` drives
    it."""

    options: SimOptions
    vocabulary: SimVocabulary
    loads_loras = True
    """An adapter's id changes the tokens; its files are not read."""
    loads_layers = True
    """Every step waits for the layers that it needs (`SimCore` adds the time of that)."""

    def __init__(self) -> None:
        self.content: BlockContent | None = None
        self._capacity = 1
        self._structured_output: StructuredOutputManager | None = None
        """None with an invented vocabulary, which has no text that could match a grammar."""

    def make_core(self, clock: Clock, mover: KvConnector | None = None) -> SimCore:
        """Make the core that runs this executor in simulated time; `mover` transfers its KV."""
        return SimCore(self, clock, mover)

    def sibling(self) -> SimExecutor:
        """Return an executor for another worker of this process; there are no weights to share."""
        return SimExecutor()

    # ------------------------------------------------------------------ executor interface

    def load(self, spec: EngineSpec, progress: ProgressFn) -> ModelInfo:
        self.options = options = parse_options(spec.options)
        check_ranks(spec, options)
        self._ranks = spec.tensor_parallel
        preset = preset_of(options.preset)
        self._block_size = spec.block_size
        self._timing = read_timing(Path(options.timing)) if options.timing else preset.timing
        self._noise = StepNoise(options.noise, f"{spec.seed} {options.seed}")
        progress("reading the model's configuration", 0.0)
        self.vocabulary = read_model(spec, options)
        if options.load_time:
            progress("pretending to load", 0.5)
            time.sleep(options.load_time)
        info = _model_info(spec, options, preset, self.vocabulary)
        if info.features:
            # Compiles in the core's thread, since time here is simulated.
            self._structured_output = StructuredOutputManager(
                read_tokenizer(Path(spec.model)), info.vocab_size, info.eos_token_ids, inline=True
            )
        self._region_layout = layout_of(info)
        if not options.content:
            self._region_layout = msgspec.structs.replace(
                self._region_layout, layers=1, heads=1, dim=1, itemsize=1
            )
        return info

    def allocate(self, num_blocks: int) -> None:
        words = self.vocabulary.words
        self._capacity = num_blocks * self._block_size
        if self.options.content:
            entries = make_entries(num_blocks, self._block_size, self.options.kv_heads, self._ranks)
            self.content = DigestContent(words, entries, self._block_size)
        else:
            self.content = NoContent(words, num_blocks, self._block_size)

    def region(self) -> Region:
        """The memory of all KV blocks, for transfers. Without content its bytes mean nothing."""
        return self._content.region(self._region_layout)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.options.trouble:
            _meet_trouble(Path(self.options.trouble))
        if plan.gate is not None:
            for layer in sorted(plan.gate_at):
                plan.gate(layer)
        content = self._content
        for source, destination in plan.copies:
            content.copy(source, destination)
        tokens: list[TokenId] = []
        logprobs: list[TokenLogprob | None] = []
        faults: dict[int, str] = {}
        lasting: set[int] = set()
        sound: set[int] = set()
        for index, chunk in enumerate(plan.chunks):
            content.write(chunk)
            if chunk.samples:
                token = content.next_token(chunk.sequence)
                try:
                    token = self._guided(chunk.sequence, token)
                except GrammarError as fault:
                    faults[index] = str(fault)
                    sound.add(index)
                    if fault.lasting:
                        lasting.add(index)
                tokens.append(token)
                logprobs.append(self._logprob(chunk.sequence, token))
        vectors = {i: content.vector(c.sequence) for i, c in enumerate(plan.chunks) if c.vector}
        scored = self._prompt_logprobs(plan)
        return StepResult(tokens, logprobs, scored, faults, vectors, lasting, sound)

    def release(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            self._content.release(sequence)
            if self._structured_output is not None:
                self._structured_output.release(sequence.key)

    def close(self) -> None:
        if self._structured_output is not None:
            self._structured_output.close()
        if self.content is not None:
            self.content.close()
            self.content = None

    # ------------------------------------------------------------------ time

    def seconds(self, plan: StepPlan, step: int) -> Seconds:
        """Seconds that step number `step` takes."""
        prefill: list[tuple[int, int]] = []
        decodes = kv_tokens = 0
        for chunk in plan.chunks:
            if chunk.count == 1 and chunk.samples:
                decodes += 1
                kv_tokens += chunk.start
            else:
                prefill.append((chunk.start, chunk.count))
        return self._scaled(self._timing.step(prefill, decodes, kv_tokens, self._capacity), step)

    def decode_seconds(self, decodes: int, kv_tokens: int, step: int) -> Seconds:
        """Seconds of a step that only decodes."""
        return self._scaled(self._timing.step((), decodes, kv_tokens, self._capacity), step)

    def _scaled(self, seconds: Seconds, step: int) -> Seconds:
        return seconds * self.options.slowdown * self._noise.of(step)

    # ------------------------------------------------------------------ tokens

    @property
    def _content(self) -> BlockContent:
        assert self.content is not None
        return self.content

    def foresee(self, sequence: Sequence, steps: int) -> list[TokenId]:
        """The next output tokens, at most `steps`, up to and including one that may end the
        sequence. Empty if they have to be computed one by one."""
        sampling = sequence.request.sampling
        if sampling.logprobs is not None or uses_structured_output(sampling):
            return []
        return self._content.foreseen(sequence, steps)

    def _guided(self, sequence: Sequence, word: TokenId) -> TokenId:
        """The word, or another that its grammar allows. Raises `GrammarError`."""
        sampling = sequence.request.sampling
        if self._structured_output is None or not uses_structured_output(sampling):
            return word
        mask = self._structured_output.allowed(sequence)
        if mask is None:
            return word
        return constrained_word(self.vocabulary.words, word, mask, sampling, sequence.num_output)

    def _logprob(self, sequence: Sequence, token: TokenId) -> TokenLogprob | None:
        top = sequence.request.sampling.logprobs
        return None if top is None else made_up_logprob(self.vocabulary.words, token, top)

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, list[TokenLogprob]]:
        rows: dict[int, list[TokenLogprob]] = {}
        for index, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            top = sequence.request.sampling.prompt_logprobs
            if top is not None and chunk.start < sequence.prompt_len - 1:
                end = min(chunk.start + chunk.count, sequence.prompt_len - 1)
                tokens = sequence.tokens[chunk.start + 1 : end + 1]
                rows[index] = [
                    made_up_logprob(self.vocabulary.words, token, top) for token in tokens
                ]
        return rows


def _meet_trouble(file: Path) -> None:
    """If the file exists, delete it and do what it says: hang (`hang SECONDS`) or fail the step."""
    try:
        what, _, seconds = file.read_text().strip().partition(" ")
        file.unlink()
    except OSError:
        return
    if what == "hang":
        time.sleep(float(seconds))
    else:
        raise RuntimeError(f"injected fault: {file.name}")


def _compat_text(layout: KvBlockShape, kv_heads: int = 0) -> str:
    """The layout's text, which workers with equal models must have in common. It names the class as
    release 0.2 did, so that workers of both releases match."""
    fields = ", ".join(f"{name}={value}" for name, value in asdict(layout).items())
    return f"KvLayout({fields})" + (f" kv_heads={kv_heads}" if kv_heads else "")


def _model_info(
    spec: EngineSpec, options: SimOptions, preset: WorkerPreset, vocabulary: SimVocabulary
) -> ModelInfo:
    """With content, the size of a block is that of its entries; without, that of the model's KV."""
    shape, size = preset.shape, spec.block_size
    if options.content:
        layout = KvBlockShape(1, options.kv_heads or 1, size, ENTRY_BYTES // 8, 4)
    else:
        layout = KvBlockShape(shape.layers, shape.kv_heads, size, shape.head_dim, shape.itemsize)
    compat = _compat_text(layout, options.kv_heads)
    blocks = options.blocks or max(1, preset.kv_tokens // size)
    return ModelInfo(
        model_type=vocabulary.model_type,
        dtype="none",
        device="none",
        vocab_size=vocabulary.size,
        max_model_len=vocabulary.max_len,
        eos_token_ids=vocabulary.eos_token_ids,
        layout=layout,
        weight_bytes=preset.weight_bytes,
        kv_memory=blocks * layout.block_bytes,
        compat_hash=f"sim {vocabulary.model_type} {vocabulary.size} {compat}",
        features=(
            f"{EXACT_PREFIX}sim",
            *(() if options.vocab else structured_output_features(Path(spec.model))),
            *(("lora",) if spec.loras else ()),
        ),
        embedding_size=EMBEDDING_SIZE,
    )
