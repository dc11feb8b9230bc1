"""The seam between scheduling and computing: what a scheduler-driven engine must implement.

The scheduler (pure, torch-free) decides *what* a step computes and hands it over as a `StepPlan`;
an `Executor` (torch, sim, instant) computes it and returns one token per sampling chunk. Both live
in the engine core, in one thread, and take turns: nothing here is concurrent.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pdserve.engine.sequence import Sequence
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.request import SamplingParams, TokenLogprob
    from pdserve.transfer.base import Region

ProgressFn = Callable[[str, float | None], None]
"""(stage in words, fraction 0..1 or None)."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one block: `[layer][k|v][head][token][dim]`, contiguous."""

    num_layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    itemsize: int

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.kv_heads * self.block_size * self.head_dim * self.itemsize


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the executor learned by loading the model."""

    model_type: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    """The checkpoint's limit, or the smaller one that was asked for."""
    eos_token_ids: tuple[int, ...]
    layout: KvLayout
    weight_bytes: int
    kv_memory: int
    """Bytes the executor proposes for KV when the spec leaves it open."""
    compat_hash: str = ""
    """Equal for workers that may exchange blocks (model, dtype, block layout,
    heads, layers)."""
    prompt_logprobs: bool = True
    features: tuple[str, ...] = ()
    """As in `ModelCard`."""
    embedding_size: int = 0
    generates: bool = True
    """False: it has no output layer, vectors are all it makes."""


@dataclass(slots=True)
class Chunk:
    """Tokens `[start, start + count)` of one sequence, to be computed in this step.

    `sequence.blocks` already covers them. `sequence.num_computed` is still `start`; the scheduler
    moves it when the result is in.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """The chunk ends at the sequence's last token: its logits choose the next one."""

    @property
    def vector(self) -> bool:
        """The chunk ends at the last token of a sequence that is to become a vector."""
        sequence = self.sequence
        return sequence.pools and self.start + self.count == len(sequence.tokens)


@dataclass(slots=True)
class StepPlan:
    """One step. `copies` run first, then all chunks as one batch."""

    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block): copy-on-write forks."""
    watch: Callable[[int], None] | None = None
    """Set if somebody reads KV of the plan's chunks as soon as it is there: all of it is in memory
    when `execute` returns. An executor that can calls it besides, from its thread, while it
    computes: so many layers of all chunks are in memory."""
    watch_at: frozenset[int] = frozenset()
    """After how many layers `watch` is worth a call."""
    tick: Callable[[int], None] | None = None
    """Set if somebody watches that the step gets on: an executor whose steps may take seconds calls
    it from its thread, now and then, with the number of layers that are done."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True)
class StepResult:
    """What the step computed: lists run parallel to the plan's sampling chunks, in order."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """Index into `plan.chunks` -> logprobs of prompt tokens `start+1 ..` that this chunk's rows
    predict (as many as lie inside the prompt)."""
    faults: dict[int, str] = field(default_factory=dict)
    """Index into `plan.chunks` -> why nothing that was computed for its sequence can be used; the
    others are not concerned. What the lists above say of it is ignored."""
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """Index into `plan.chunks` -> the vector of its sequence, as `Finish.embedding`; for each chunk
    that is its sequence's last and whose sequence `pools`. With mean pooling the executor adds up
    what the earlier chunks were, from the one that starts at 0; `release` says when to forget."""
    lasting: set[int] = field(default_factory=set)
    """Those of `faults` that are the request's own: it would end there at any worker."""

    def less(self, plan: StepPlan, dropped: Container[int]) -> tuple[StepPlan, StepResult]:
        """Plan and result without the chunks of these handles."""
        kept = [i for i, c in enumerate(plan.chunks) if c.sequence.handle not in dropped]
        sampling = [c.sequence.handle in dropped for c in plan.chunks if c.samples]
        result = StepResult(
            [token for token, gone in zip(self.tokens, sampling, strict=True) if not gone],
            [entry for entry, gone in zip(self.logprobs, sampling, strict=True) if not gone],
            {
                new: self.prompt_logprobs[i]
                for new, i in enumerate(kept)
                if i in self.prompt_logprobs
            },
            embeddings={
                new: self.embeddings[i] for new, i in enumerate(kept) if i in self.embeddings
            },
        )
        return StepPlan([plan.chunks[i] for i in kept], plan.copies), result


class Executor(Protocol):
    """Computes steps. Every method runs in the core's thread; none may be called concurrently.

    An executor may also offer `sibling()`, `region()` and `expect()`: see `Sharing`, `Movable` and
    `Expecting`.
    """

    def load(self, spec: EngineSpec, progress: ProgressFn) -> ModelInfo:
        """Load weights. Raises `UnsupportedCheckpoint` by name for what it lacks."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate KV storage of `num_blocks` blocks. Called once, after `load`."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step."""
        ...

    def release(self, sequences: Seq[Sequence]) -> None:
        """Forget per-sequence state of sequences that ended or were preempted."""
        ...

    def close(self) -> None:
        """Free everything; idempotent."""
        ...


class Movable(Protocol):
    """What an executor offers besides if KV can be moved out of and into its blocks."""

    def region(self) -> Region | None:
        """Its KV storage, once it is allocated; peers may write to blocks that are in no plan. None
        if there is nothing that could be moved."""
        ...


class Expecting(Protocol):
    """What an executor offers besides if some requests need preparing."""

    def expect(self, sampling: SamplingParams) -> None:
        """A request with these parameters was submitted. Returns at once, and need not be right: it
        may be refused yet."""
        ...

    def ready(self, sequence: Sequence) -> bool:
        """Its next token can be chosen without waiting: until then no chunk samples for it. True
        after a while at the latest; `execute` then says what is wrong."""
        ...

    def wait_ready(self, seconds: Seconds) -> None:
        """Until one may be `ready` that was not, so long at most: there is nothing else to do."""
        ...


class Sharing(Protocol):
    """What an executor offers besides if several cores of one process can share its weights."""

    def sibling(self) -> Executor:
        """An executor for the same model and a pool of its own, driven by another thread.

        It shares what is only read, with whoever comes from the same executor, and nothing else:
        both compute at the same time, and either may close first. Called once this one has loaded.
        The `load` of a sibling gets a spec that agrees in engine, model, device, dtype and threads
        (all else may differ) and reads nothing again, unless all that shared it are closed by then.
        """
        ...
