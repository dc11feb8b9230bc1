"""Defines the executor port: what an engine implements to be driven by pdserve's scheduler.

The scheduler (pure, without torch) decides what a step computes and passes it as a `StepPlan`; an
`Executor` (torch, sim) computes it and returns one token per sampling chunk. Both live in one
thread of the engine core and take turns: nothing here is concurrent, but a device that
`SupportsRunAhead`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import Seconds
    from pdserve.kv.storage import BlockMemory
    from pdserve.kv.tiers.jobs import BlockCopier
    from pdserve.messages.engine import EngineRank, EngineSpec
    from pdserve.messages.request import SamplingParams, TokenLogprob
    from pdserve.transfer.base import Region

ProgressFn = Callable[[str, float | None], None]
"""Called while loading with the stage in words, and the fraction done (0..1) or None."""


@dataclass(frozen=True, slots=True)
class KvBlockShape:
    """Shape of one KV block: `[layer][k|v][head][token][dim]`, contiguous."""

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
    """What the executor reports about the model it has loaded."""

    model_type: str
    dtype: str
    device: str
    vocab_size: int
    max_model_len: int
    """Context length in tokens: the checkpoint's, or the smaller one that was asked for."""
    eos_token_ids: tuple[int, ...]
    layout: KvBlockShape
    weight_bytes: int
    kv_memory: int
    """Bytes that the executor proposes for KV if the spec names none; like `EngineSpec.kv_memory`,
    for all cores that share the memory."""
    compat_hash: str = ""
    """Equal for workers that may exchange blocks (same model, dtype, block layout, heads and
    layers)."""
    prompt_logprobs: bool = True
    features: tuple[str, ...] = ()
    """Features of the engine, as in `ModelCard.features`."""
    embedding_size: int = 0
    generates: bool = True
    """False: the model has no output layer and makes only embeddings."""
    num_labels: int = 0
    """Outputs of the model's classification head; 0: it has none."""
    kv_most: int | None = None
    """Most bytes that KV may take, for all cores that share the memory; None: not known."""
    kv_reason: str = ""
    """Why `kv_memory` and `kv_most` are what they are, in words for the operator."""
    slow_kernels: str = ""
    """As in `EngineCapabilities`."""
    ranks: tuple[EngineRank, ...] = ()
    """As in `EngineCapabilities`."""


@dataclass(slots=True)
class ScheduledChunk:
    """Tokens `[start, start + count)` of one sequence, to be computed in this step.

    `sequence.blocks` already covers them. `sequence.num_computed` is still `start`; the scheduler
    advances it when it takes in the result.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """Whether the chunk ends at the sequence's last token, so that the next token is sampled."""
    token_from: int | None = None
    """Set for a chunk of one token that the host does not know yet: its index among the tokens that
    the step before samples. `sequence` has neither the token nor the `num_computed` before it."""

    @property
    def vector(self) -> bool:
        """Return whether the chunk ends at the last token of an embedding request."""
        sequence = self.sequence
        return sequence.pools and self.start + self.count == len(sequence.tokens)


@dataclass(slots=True)
class StepPlan:
    """The work of one step. `copies` run first, then all chunks as one batch."""

    chunks: list[ScheduledChunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Blocks to copy, as (source block, destination block): copy-on-write forks."""
    watch: Callable[[int], None] | None = None
    """Called with the number of layers whose KV is in memory for all chunks, so that layers can be
    sent before the step ends. Optional for executors: from the core's thread, within `execute`."""
    watch_at: frozenset[int] = frozenset()
    """Numbers of finished layers at which `watch` wants a call."""
    gate: Callable[[int], None] | None = None
    """Called before a layer reads KV, with the layer's number: it waits until the layers from there
    on have come for the chunks that need them, with a deadline. It never fails: what has not come
    is the core's business. Only an executor with `loads_layers` gets one."""
    gate_at: frozenset[int] = frozenset()
    """Layers before which `gate` has to be called. An executor that does not compute layer by layer
    calls it for all of them first, in order."""
    tick: Callable[[int], None] | None = None
    """Reports progress to the stall watchdog: an executor whose steps may take seconds calls it
    from the core's thread now and then, with the number of finished layers."""

    @property
    def num_tokens(self) -> int:
        return sum(chunk.count for chunk in self.chunks)


@dataclass(slots=True)
class StepResult:
    """What a step has computed. The lists are parallel to the plan's sampling chunks."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """Index into `plan.chunks` -> logprobs of prompt tokens `start+1 ..` that this chunk's rows
    predict (as many as lie inside the prompt)."""
    faults: dict[int, str] = field(default_factory=dict)
    """Index into `plan.chunks` -> why this sequence failed; its entries in the lists above are
    ignored. The other sequences are not affected."""
    embeddings: dict[int, bytes] = field(default_factory=dict)
    """Index into `plan.chunks` -> the sequence's vector, as in `Finish.embedding`, for every chunk
    that ends an embedding request. For mean pooling the executor accumulates over the chunks from
    the one that starts at 0, until `release`."""
    lasting: set[int] = field(default_factory=set)
    """The `faults` that the request itself causes: it would fail on any worker."""
    sound: set[int] = field(default_factory=set)
    """The `faults` that do not come from computing, such as a grammar's: the KV of these sequences
    is correct and may be reused."""

    def less(
        self, plan: StepPlan, dropped: Callable[[Sequence], bool]
    ) -> tuple[StepPlan, StepResult]:
        """Return `plan` and this result without the chunks of the `dropped` sequences."""
        gone = [dropped(chunk.sequence) for chunk in plan.chunks]
        kept = [i for i, is_gone in enumerate(gone) if not is_gone]
        sampling = [gone[i] for i, chunk in enumerate(plan.chunks) if chunk.samples]
        result = StepResult(
            [token for token, gone in zip(self.tokens, sampling, strict=True) if not gone],
            [entry for entry, gone in zip(self.logprobs, sampling, strict=True) if not gone],
            {
                new: self.prompt_logprobs[i]
                for new, i in enumerate(kept)
                if i in self.prompt_logprobs
            },
            {new: self.faults[i] for new, i in enumerate(kept) if i in self.faults},
            {new: self.embeddings[i] for new, i in enumerate(kept) if i in self.embeddings},
            {new for new, i in enumerate(kept) if i in self.lasting},
            {new for new, i in enumerate(kept) if i in self.sound},
        )
        return StepPlan([plan.chunks[i] for i in kept], plan.copies), result


class Executor(Protocol):
    """Computes steps. All methods are called in the core's thread, one at a time.

    Optional abilities are the protocols `SupportsWeightSharing`, `SupportsKvTransfer`,
    `SupportsTiers`, `SupportsLayerGroups`, `SupportsGrammarPrefetch`, `SupportsRunAhead`,
    `SupportsGraphs` and `SupportsHealthChecks`.
    """

    def load(self, spec: EngineSpec, progress: ProgressFn) -> ModelInfo:
        """Load the weights. Raises `UnsupportedCheckpoint` that names the missing ability."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Allocate KV storage of `num_blocks` blocks. Called once, after `load`."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step. An error fails the step; `EngineDied` ends the core."""
        ...

    def release(self, sequences: Seq[Sequence]) -> None:
        """Drop the state of sequences that ended or were preempted."""
        ...

    def close(self) -> None:
        """Free all memory. Idempotent."""
        ...


class SupportsKvTransfer(Protocol):
    """Optional ability of an executor: KV can be read from and written to its blocks."""

    def region(self) -> Region | None:
        """The allocated KV storage; peers may write to blocks that are in no plan. None if it
        cannot be transferred."""
        ...


class SupportsTiers(Protocol):
    """Optional ability of an executor whose KV is not in host memory: it can be copied there."""

    def tier_copier(self, arena: BlockMemory) -> BlockCopier | None:
        """What copies blocks between the KV storage and an arena of block-sized frames, called in
        another thread. None: the storage is host memory (`SupportsKvTransfer.region`)."""
        ...


class SupportsLayerGroups(Protocol):
    """Optional ability of an executor: a step begins before all layers of its KV are there."""

    @property
    def loads_layers(self) -> bool:
        """True: `execute` calls `StepPlan.gate`."""
        ...


class SupportsRunAhead(Protocol):
    """Optional ability of an executor: its device computes a step while the host plans the next.

    A step is begun, sampled and finished. The next one may be begun before, but is sampled after,
    the one before it is finished; so at most two are under way. The device works in that order.
    """

    @property
    def runs_ahead(self) -> bool:
        """True: the core uses the methods below for steps that only decode or end prompts."""
        ...

    def begin(self, plan: StepPlan) -> Any:
        """Launch the forward pass; returns what stands for the step. Blocks and tokens are read
        before it returns, since the sequences change before the device has computed them. An error
        means that nothing was launched."""
        ...

    def sample(self, step: Any, plan: StepPlan) -> None:
        """Launch the choice of tokens for `plan`: those chunks of the begun plan whose sequences
        still run. The tokens before are known now, so masks and penalties are exact."""
        ...

    def finish(self, step: Any) -> StepResult:
        """Wait until the device has ended the step; returns the result for the plan that `sample`
        got, and an empty one if `sample` was not called or has failed. Called once for each begun
        step, also after an error."""
        ...


class SupportsGraphs(Protocol):
    """Optional ability of an executor: it replays steps that it has captured in `allocate`."""

    @property
    def graph_steps(self) -> int:
        """As in `EngineStats`."""
        ...

    @property
    def eager_decodes(self) -> int:
        """As in `EngineStats`."""
        ...

    @property
    def graphs_missing(self) -> str:
        """Why CUDA graphs could not be captured, for `EngineCapabilities.slow_kernels`; empty if
        they were, or if capturing was not tried."""
        ...


class SupportsHealthChecks(Protocol):
    """Optional ability of an executor that computes in several processes: one that ends or stands
    still is noticed while no step runs."""

    @property
    def health_interval(self) -> Seconds | None:
        """Seconds between two checks, after `load`; None: there is nothing to check."""
        ...

    def check_health(self) -> None:
        """Check the other processes. Called between steps. Raises `EngineDied` that names the one
        that is lost; the core ends then."""
        ...


class SupportsLora(Protocol):
    """Optional ability of an executor: it computes the adapters of `EngineSpec.loras`."""

    @property
    def loads_loras(self) -> bool:
        """True: `load` loads them, each chunk is computed with the adapter that
        `sequence.request.lora` names, and `ModelInfo.features` lists `lora` if there are any."""
        ...


class SupportsGrammarPrefetch(Protocol):
    """Optional ability of an executor: it compiles grammars before they are needed."""

    def expect(self, sampling: SamplingParams) -> None:
        """Start to prepare for a request with these parameters; returns at once. Only a hint: the
        request may still be refused."""
        ...

    def ready(self, sequence: Sequence) -> bool:
        """Whether the sequence's next token can be sampled without a wait; no chunk samples for it
        before. After a timeout this is True too, and `execute` reports the fault."""
        ...

    def wait_ready(self, seconds: Seconds) -> None:
        """Wait until another sequence may be `ready`, at most `seconds`. Called when no sequence
        can be computed."""
        ...


class SupportsWeightSharing(Protocol):
    """Optional ability of an executor: several cores of one process can share its weights."""

    def sibling(self) -> Executor:
        """Make an executor for the same model with a KV pool of its own, for another thread.

        The two share read-only data alone: both compute at the same time, and either may close
        first. Called after `load` of this one. The sibling's `load` gets a spec with the same
        engine, model, device, dtype and threads, and reads no weights unless all executors that
        shared them are closed by then.
        """
        ...
