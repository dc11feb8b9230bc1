"""Implements the torch executor: loads a checkpoint, computes the scheduler's steps, samples.

It owns the model (`models.torch_model`), the sampler and the KV pool. The scheduler decides which
sequences run; the engine core owns the executor and calls it from one thread. Siblings share the
weights; on a GPU each computes in a stream of its own.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from pdserve import accel
from pdserve.engine_core.executor import StepPlan, StepResult
from pdserve.engine_core.kv_transfer.kv_region import layout_of, region_in_memory
from pdserve.engine_core.pool_sizing import check_kv_memory
from pdserve.engine_core.structured_output import StructuredOutputManager, read_tokenizer
from pdserve.errors import ConfigError
from pdserve.limits.memory import available
from pdserve.limits.sizes import approximate_size
from pdserve.transfer.base import Region
from pdserve_engines.torch import warm_up
from pdserve_engines.torch.cuda.graphs.graph_choice import make_graphs
from pdserve_engines.torch.cuda.model_choice import make_gpu_model
from pdserve_engines.torch.cudnn_attention import CudnnAttentionOff
from pdserve_engines.torch.device_memory import pool_memory
from pdserve_engines.torch.kv_budget import measure_memory, out_of_memory
from pdserve_engines.torch.kv_pool import KvPool
from pdserve_engines.torch.model_info import kv_block_shape, model_info, plan_kv_budget
from pdserve_engines.torch.model_loader import weights
from pdserve_engines.torch.models.cpu_model import CpuModel, unsupported_reason
from pdserve_engines.torch.models.forward_batch import make_batch
from pdserve_engines.torch.models.pooler import Pooler, to_bytes
from pdserve_engines.torch.models.row_selection import RowSelection
from pdserve_engines.torch.models.torch_model import TorchModel
from pdserve_engines.torch.opened_model import open_model
from pdserve_engines.torch.sampling.logprobs import describe
from pdserve_engines.torch.sampling.sampler import Sampler
from pdserve_engines.torch.settings import resolve_settings
from pdserve_engines.torch.step_in_flight import StepInFlight
from pdserve_engines.torch.step_meter import step_meter
from pdserve_engines.torch.tensor_parallel.leader import LeaderModel, start_leader
from pdserve_engines.torch.tensor_parallel.shard import Shard
from pdserve_engines.torch.tier_copier import TorchTierCopier

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq
    from contextlib import AbstractContextManager

    from pdserve.engine_core.executor import ModelInfo, ProgressFn, ScheduledChunk
    from pdserve.engine_core.scheduler.sequence import Sequence
    from pdserve.ids import Bytes, Seconds
    from pdserve.kv.storage import BlockMemory
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.request import SamplingParams, TokenLogprob
    from pdserve_engines.torch.cuda.graphs.decode_graphs import DecodeGraphs
    from pdserve_engines.torch.device_memory import DriverMemory
    from pdserve_engines.torch.kv_budget import AvailableMemory
    from pdserve_engines.torch.model_loader.classifier import ClassificationHead
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.models.base import ForwardModel, LayersDoneFn
    from pdserve_engines.torch.models.forward_batch import ForwardBatch
    from pdserve_engines.torch.opened_model import OpenedModel
    from pdserve_engines.torch.settings import TorchSettings
    from pdserve_engines.torch.step_meter import StepMeter

_log = logging.getLogger(__name__)

_QUICK = 16
"""Most tokens of a step that takes little longer than reading the weights once."""

_NO_NUMBERS = "the model computed no numbers for its next token (NaN)"
_NO_FAULTS: Mapping[int, str] = MappingProxyType({})

_LOGITS_AT_ONCE = 32 << 20
"""Elements of logits held at one time while prompt logprobs are computed."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What an executor has loaded and shares with its siblings."""

    config: ModelConfig
    settings: TorchSettings
    identity: bytes
    model: ForwardModel
    room: AvailableMemory
    """Available memory, measured once for all that share it."""
    head: ClassificationHead | None
    shard: Shard | None = None
    """What this process computes of the model; None: all of it."""
    slow_kernels: str = ""
    """As in `EngineCapabilities`."""
    trial: Bytes | None = None
    """Bytes of a GPU that the largest step took; None: it was not measured."""


class TorchExecutor:
    """Implements `pdserve.engine_core.executor.Executor` and `SupportsWeightSharing`."""

    def __init__(self, owner: _Loaded | None = None) -> None:
        """`owner`: the weights to share instead of reading them."""
        self.pool: KvPool | None = None
        """KV storage; exists from `allocate` to `close`."""
        self.info: ModelInfo | None = None
        """What `load` returned."""
        self._model: ForwardModel | None = None
        self._sampler = Sampler()
        self._pooler = Pooler()
        self._settings: TorchSettings | None = None
        self._loaded = owner
        """What a sibling would share: before `load` the owner's, then this executor's own."""
        self._cudnn_attention = CudnnAttentionOff()
        self._stream: torch.cuda.Stream | None = None
        self._memory: DriverMemory | None = None
        """That of the pool, on a GPU whose driver this process can use."""
        """None: the device's default stream."""
        self._sampled: torch.Tensor | None = None
        """On the device, the tokens of the last step that `sample` was called for."""
        self._batch_tokens = 1
        """Tokens of the largest step."""
        self._max_sequences = 1
        """Sequences of the largest step."""
        self._graphs: DecodeGraphs | None = None
        """None: every step is launched kernel by kernel."""
        self.graphs_missing = ""
        """Why capturing CUDA graphs failed. Empty: it succeeded, or it was not asked for."""
        self._moved = False
        """Whether peers may write to blocks that are in no plan. Then no part of a step may run on
        the device after `execute` returns. Steps that sample have ended by then, since their tokens
        are read."""

    # ------------------------------------------------------------------ life

    def load(self, spec: EngineSpec, progress: ProgressFn) -> ModelInfo:
        owner, self._loaded = self._loaded, None
        self._batch_tokens = spec.max_batch_tokens
        self._max_sequences = spec.max_sequences
        with torch.inference_mode():
            loaded = None if owner is None else self._share(owner, spec)
            if loaded is None:
                loaded = self._read(spec, progress)
            else:
                progress("sharing the weights of another worker", None)
        self._loaded, self._model, self._settings = loaded, loaded.model, loaded.settings
        self._pooler.head = loaded.head
        # The order in which torch sums a row on a GPU depends on how many there are.
        self._sampler.one_by_one = loaded.settings.device.type == "cuda" and bool(
            loaded.model.exact
        )
        self.prepare_thread()
        if loaded.settings.device.type == "cuda":
            self._cudnn_attention.hold()
        # A trial step over a small pool would need pools on all ranks: with --tp it is estimated.
        known = loaded.trial is not None or loaded.shard is not None
        if not known and (meter := step_meter(loaded.settings.device)) is not None:
            progress("measuring the memory of a step", None)
            self._loaded = loaded = self._try_step(loaded, spec, meter)
        self.info = model_info(
            spec,
            loaded.config,
            loaded.settings,
            loaded.model.weight_bytes,
            loaded.identity,
            loaded.room,
            loaded.model.exact,
            trial=loaded.trial,
            num_labels=0 if loaded.head is None else loaded.head.num_labels,
            slow_kernels=loaded.slow_kernels,
            ranks=loaded.model.processes if isinstance(loaded.model, LeaderModel) else (),
        )
        self._sampler.masks.structured_output = structured_output = StructuredOutputManager(
            read_tokenizer(Path(spec.model)), self.info.vocab_size, self.info.eos_token_ids
        )
        structured_output.warm()
        return self.info

    def _read(self, spec: EngineSpec, progress: ProgressFn) -> _Loaded:
        progress("reading the checkpoint", None)
        with open_model(spec) as opened:
            config, settings = opened.config, opened.settings
            _enter(settings.device)
            torch.set_num_threads(settings.threads)
            # How much a step takes is measured later; without it the limit is the highest.
            room = measure_memory(settings.device)
            early = plan_kv_budget(spec, config, settings, room, trial=0)
            check_kv_memory(spec, early.most, early.reason)
            shard, slow = None, ""
            if spec.tensor_parallel > 1:
                shard = Shard(config, 0, spec.tensor_parallel)
                model: ForwardModel = _read_shard(spec, opened, shard, progress)
            else:
                model, slow = make_model(config, settings, progress)
                _load_weights(opened, model, progress)
            room = measure_memory(settings.device)
            if isinstance(model, LeaderModel):
                room = model.room(room)
            identity = opened.identity()
            return _Loaded(config, settings, identity, model, room, opened.head, shard, slow)

    def _try_step(self, loaded: _Loaded, spec: EngineSpec, meter: StepMeter) -> _Loaded:
        """Compute the largest step over a small pool, and measure what it takes beside weights and
        KV. Raises `ConfigError` if there is no room for it."""
        config, settings = loaded.config, loaded.settings
        layout = kv_block_shape(spec, config, settings)
        plan = warm_up.largest_step(
            spec.max_batch_tokens,
            spec.max_sequences,
            layout.block_size,
            settings.max_model_len - 1,
            samples=not config.headless,
        )
        sequences = [chunk.sequence for chunk in plan.chunks]
        blocks = sum(len(sequence.blocks) for sequence in sequences)
        try:
            with self._in_stream(), torch.inference_mode():
                self.pool = KvPool(
                    layout, blocks, settings.kv_dtype, settings.device, settings.kv_scales
                )
                loaded.model.bind(self.pool)
            trial = meter.most(lambda: self._computed(plan))
        except (torch.cuda.OutOfMemoryError, ConfigError) as error:
            raise ConfigError(
                f"{settings.device} has no room for a step of {plan.num_tokens} tokens and "
                f"{len(sequences)} sequences beside the weights ({error}); lower "
                "--max-batch-tokens or --max-sequences, or take a smaller model"
            ) from error
        finally:
            self.release(sequences)
            if self.pool is not None:
                self.pool.close()
                self.pool = None
        room = measure_memory(settings.device)
        _log.info(
            "memory of %s: the largest step takes %s, weights %s; %s of %s are free for steps and "
            "KV",
            room.limit,
            approximate_size(trial),
            approximate_size(loaded.model.weight_bytes),
            approximate_size(room.free),
            approximate_size(room.total),
        )
        return replace(loaded, room=room, trial=trial)

    def _computed(self, plan: StepPlan) -> None:
        self.execute(plan)
        self._settle()

    def _share(self, owner: _Loaded, spec: EngineSpec) -> _Loaded | None:
        """Share the owner's weights; None if they are gone."""
        settings = resolve_settings(spec, owner.config)
        for name in ("kernels", "kv_cache_dtype"):
            wanted, there = getattr(settings, name), getattr(owner.settings, name)
            if wanted != there:
                raise ConfigError(
                    f"engine option {name}={wanted}: the core to share weights with has {there}"
                )
        settings = replace(settings, kv_scales=owner.settings.kv_scales)
        model = owner.model.sibling(settings)
        if model is None:
            _log.warning("the core to share weights with is closed: reading the weights again")
            return None
        if settings.device.type == "cuda":
            _enter(settings.device)
            torch.cuda.synchronize(settings.device)
            self._stream = torch.cuda.Stream(settings.device)  # type: ignore[no-untyped-call]
        return replace(owner, settings=settings, model=model)

    def sibling(self) -> TorchExecutor:
        """Return an executor that shares these weights and has a KV pool of its own. One with
        tensor-parallel ranks loads its own: ranks compute for one scheduler."""
        loaded = self._loaded
        return TorchExecutor(None if loaded is not None and loaded.shard is not None else loaded)

    def allocate(self, num_blocks: int) -> None:
        assert self.info is not None, "load comes before allocate"
        assert self._settings is not None
        assert self._model is not None
        settings = self._settings
        layout = self.info.layout
        if isinstance(self._model, LeaderModel):
            layout = self._model.allocate(layout, num_blocks)
        with self._in_stream():
            self._memory = pool_memory(num_blocks * layout.block_bytes, settings.device)
            self.pool = KvPool(
                layout,
                num_blocks,
                settings.kv_dtype,
                settings.device,
                settings.kv_scales,
                None if self._memory is None else self._memory.bytes,
            )
            # The pool has to be zeroed before a peer writes to it, on any stream.
            self._settle()
        self._model.bind(self.pool)
        if settings.device.type == "cuda":
            self.warm_up()
        self._capture_graphs()

    def _capture_graphs(self) -> None:
        assert self.info is not None
        assert self._settings is not None
        assert self._model is not None
        with self._in_stream(), torch.inference_mode():
            self._graphs, self.graphs_missing = make_graphs(
                self._model,
                self._settings,
                self._max_sequences,
                self.info.max_model_len,
            )

    def warm_up(self) -> None:
        """Compute a step of the largest size and one token, in every way that tokens are chosen.

        Raises `ConfigError` if the device has no memory for such a step.
        """
        assert self.info is not None
        pool = self.pool
        assert pool is not None
        size = pool.layout.block_size
        longest = min(pool.num_blocks * size, self.info.max_model_len)
        tokens = min(longest - 1, self._batch_tokens)
        if tokens < 1:
            return
        try:
            for sequence, plan in warm_up.warm_up_steps(tokens, size, samples=self.info.generates):
                self.execute(plan)
                self.release([sequence])
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"{pool.tensor.device} has no room for a step of {tokens} tokens beside the KV "
                f"({error}); lower --max-batch-tokens, --max-sequences or --kv-memory"
            ) from error
        with self._in_stream(), torch.inference_mode():
            pool.tensor[: tokens // size + 1].zero_()
            self._settle()

    def region(self) -> Region:
        """The allocated KV pool, on the host or on the device. Peers may write to it from now
        on."""
        assert self.pool is not None, "allocate comes before region"
        assert self.info is not None
        layout, pool = layout_of(self.info), self.pool
        self._moved = True
        if isinstance(self._model, LeaderModel):
            return self._model.region(layout)
        if pool.memory is not None:
            return region_in_memory(layout, pool.memory)
        return Region(layout, pool.num_blocks, address=pool.tensor.data_ptr())

    def tier_copier(self, arena: BlockMemory) -> TorchTierCopier | None:
        """What copies blocks of a pool on a GPU to host memory and back, from another thread; None
        for a pool in host memory, which needs nothing special."""
        assert self.pool is not None, "allocate comes before tiers"
        self._moved = True
        return None if self.pool.memory is not None else TorchTierCopier(self.pool.tensor, arena)

    @property
    def loads_layers(self) -> bool:
        """Whether steps wait for layers that are copied meanwhile: where another device copies.
        For a pool in host memory, the copies would take the cores that compute."""
        assert self.pool is not None, "allocate comes before tiers"
        return self.pool.memory is None

    def expect(self, sampling: SamplingParams) -> None:
        """Start to compile the grammar of such a request; returns at once."""
        if self._sampler.masks.structured_output is not None:
            self._sampler.masks.structured_output.expect(sampling)

    def ready(self, sequence: Sequence) -> bool:
        """Return whether the grammar of the sequence is compiled, has failed, or is not needed."""
        structured_output = self._sampler.masks.structured_output
        return structured_output is None or structured_output.ready(sequence)

    def wait_ready(self, seconds: Seconds) -> None:
        """Wait until another grammar is compiled, at most `seconds`."""
        if self._sampler.masks.structured_output is not None:
            self._sampler.masks.structured_output.wait_ready(seconds)

    def release(self, sequences: Seq[Sequence]) -> None:
        self._sampler.forget(sequence.key for sequence in sequences)
        self._pooler.forget(sequence.key for sequence in sequences if sequence.pools)

    def prepare_thread(self) -> None:
        """Set torch's thread count, which holds for the whole process, to what this model needs."""
        assert self._model is not None
        torch.set_num_threads(self._model.torch_threads)

    def close(self) -> None:
        self._loaded = None
        self._cudnn_attention.release()
        self._sampler.close()
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
        if self._model is not None:
            self._model.close()
            self._model = None
        if self.pool is not None:
            self.pool.close()
            self.pool = None
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._settings is not None and self._settings.device.type == "cuda":
            # Otherwise torch keeps the memory, and a core that restarts in this process finds none.
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------ steps

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.pool is not None, "allocate comes before execute"
        assert self._model is not None
        with self._in_stream():
            if plan.copies:
                holder = self._model if isinstance(self._model, LeaderModel) else self.pool
                holder.copy(plan.copies)
            if not plan.chunks:
                return StepResult([], [])
            result = self._compute(plan, self._model, self.pool.layout.block_size)
            if plan.watch is not None or (self._moved and not result.tokens):
                self._settle()
            return result

    @property
    def health_interval(self) -> Seconds | None:
        """Seconds between two calls of `check_health`; None: there are no other ranks."""
        model = self._model
        return model.ranks.look_interval if isinstance(model, LeaderModel) else None

    def check_health(self) -> None:
        """Raise `EngineDied` if another rank has ended or stands still."""
        if isinstance(self._model, LeaderModel):
            self._model.ranks.check()

    @property
    def runs_ahead(self) -> bool:
        """Whether the core begins decode steps ahead: `begin`, `sample` and `finish`."""
        return self._settings is not None and self._settings.async_scheduling

    @property
    def graph_steps(self) -> int:
        """Steps that a graph has computed."""
        return 0 if self._graphs is None else self._graphs.replays

    @property
    def eager_decodes(self) -> int:
        """Steps that only decode and that no graph could compute, although there are some."""
        return 0 if self._graphs is None else self._graphs.eager_decodes

    def begin(self, plan: StepPlan) -> StepInFlight:
        assert self.pool is not None, "allocate comes before begin"
        assert self._model is not None
        rows = RowSelection(plan.chunks).rows
        with self._in_stream(), torch.inference_mode():
            batch = make_batch(plan.chunks, rows, self.pool.layout.block_size, self._sampled)
            try:
                hidden = self._replayed(plan, batch)
                if hidden is None:
                    hidden = self._model.forward(batch, self._after(plan))
                return StepInFlight(plan, hidden)
            except Exception:
                self._settle()  # what was queued before the error writes to the plan's blocks
                raise

    def sample(self, step: StepInFlight, plan: StepPlan) -> None:
        assert self._model is not None
        step.sequences = [chunk.sequence for chunk in plan.chunks]
        with self._in_stream(), torch.inference_mode():
            logits = self._model.logits(step.rows_of(plan))
            step.sampled = self._sampler.launch(logits, step.sequences)
        self._sampled = step.sampled.tokens
        step.faults = self._sampler.faults(step.sequences)
        step.lasting = self._sampler.lasting(step.sequences)

    def finish(self, step: StepInFlight) -> StepResult:
        with self._in_stream(), torch.inference_mode():
            if step.sampled is None:
                self._settle()
                return StepResult([], [])
            result = StepResult(*step.sampled.read())
        result.lasting = step.lasting
        _note_faults(result, range(len(result.tokens)), step.faults)
        return result

    def _replayed(self, plan: StepPlan, batch: ForwardBatch) -> torch.Tensor | None:
        """What a graph computes for the whole batch; None if none can."""
        if self._graphs is None:
            return None
        by_layers = plan.watch is not None or plan.gate is not None
        return self._graphs.forward(batch, by_layers=by_layers)

    def _settle(self) -> None:
        """Wait until everything computed so far is in memory."""
        assert self._settings is not None
        if self._settings.device.type == "cuda":
            torch.cuda.current_stream(self._settings.device).synchronize()

    def _after(self, plan: StepPlan) -> LayersDoneFn | None:
        """The callback for finished layers: it calls the plan's `watch`, `gate`, and `tick` in a
        step so large that each layer may take long. None if none is needed."""
        watch = plan.watch if plan.watch_at else None
        gate = plan.gate if plan.gate_at else None
        tick = plan.tick if plan.num_tokens > _QUICK else None
        if watch is None and gate is None:
            return tick

        def after(layers: int) -> None:
            if tick is not None:
                tick(layers)
            if watch is not None and layers in plan.watch_at:
                self._settle()
                watch(layers)
            # Nothing has read the next layer's KV yet, nor was it launched.
            if gate is not None and layers in plan.gate_at:
                gate(layers)

        return after

    def _in_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _compute(self, plan: StepPlan, model: ForwardModel, block_size: int) -> StepResult:
        wanted = RowSelection(plan.chunks)
        batch = make_batch(plan.chunks, wanted.rows, block_size)
        sequences = [plan.chunks[index].sequence for index in wanted.sampling]
        with torch.inference_mode():
            hidden = self._replayed(plan, batch)
        if hidden is None and wanted.only_sampling and self._sampler.is_plain(sequences):
            tokens = model.greedy(batch, self._after(plan))
            return _checked(StepResult(tokens, [None] * len(tokens)), wanted)
        with torch.inference_mode():
            if hidden is None:
                hidden = model.forward(batch, self._after(plan))
            result = self._choose(plan.chunks, wanted, sequences, hidden)
            lasting = self._sampler.lasting(sequences)
            result.lasting = {wanted.sampling[row] for row in lasting}
            return _checked(result, wanted, self._sampler.faults(sequences))

    def _choose(
        self,
        chunks: Seq[ScheduledChunk],
        wanted: RowSelection,
        sequences: list[Sequence],
        hidden: torch.Tensor,
    ) -> StepResult:
        """Sample tokens, logprobs and embeddings from the wanted rows."""
        assert self._model is not None
        result = StepResult([], [])
        if sequences:
            last = hidden if wanted.only_sampling else hidden[wanted.sampling_places]
            logits = self._model.logits(last)
            result.tokens, result.logprobs = self._sampler.sample(logits, sequences)
        for index, begin, count in wanted.prompts:
            result.prompt_logprobs[index] = self._prompt_logprobs(
                chunks[index], hidden[begin : begin + count]
            )
        for index, begin, count in wanted.pooled:
            self._pool(index, chunks[index], hidden[begin : begin + count], result)
        return result

    def _pool(
        self, index: int, chunk: ScheduledChunk, hidden: torch.Tensor, result: StepResult
    ) -> None:
        vector = self._pooler.take(chunk, hidden)
        if vector is None:
            return
        result.embeddings[index] = to_bytes(vector)
        if not result.embeddings[index]:
            result.faults[index] = "the model computed no numbers for its vector (NaN)"

    def _prompt_logprobs(self, chunk: ScheduledChunk, hidden: torch.Tensor) -> list[TokenLogprob]:
        """Logprobs of the prompt tokens that the chunk's leading rows predict; computed in slices,
        to bound the memory."""
        assert self._model is not None
        assert self.info is not None
        first = chunk.start + 1
        tokens = chunk.sequence.tokens[first : first + len(hidden)].tolist()
        top = chunk.sequence.sampling.prompt_logprobs or 0
        alone = self._sampler.one_by_one
        step = 1 if alone else max(1, _LOGITS_AT_ONCE // self.info.vocab_size)
        found: list[TokenLogprob] = []
        for begin in range(0, len(tokens), step):
            part = tokens[begin : begin + step]
            raw = self._model.logits(hidden[begin : begin + step]).log_softmax(-1)
            found += describe(raw, part, [top] * len(part))
        return found


def _checked(
    result: StepResult, wanted: RowSelection, why: Mapping[int, str] = _NO_FAULTS
) -> StepResult:
    """The result with a fault for each sequence that has no next token. `why`: known reasons by
    row; without one, the model returned no numbers."""
    _note_faults(result, wanted.sampling, why)
    return result


def _note_faults(result: StepResult, indices: Seq[int], why: Mapping[int, str]) -> None:
    """Enter a fault for each row without a token; `indices`: those of its chunk in the plan."""
    if not result.tokens or min(result.tokens) >= 0:
        return
    for row, (index, token) in enumerate(zip(indices, result.tokens, strict=True)):
        if token < 0:
            result.faults[index] = why.get(row, _NO_NUMBERS)
            if row in why:
                result.sound.add(index)


def _enter(device: torch.device) -> None:
    """Make `device` the current one of this thread. Torch's operations find it by their tensors,
    but graphs and kernels launched by other libraries use the thread's."""
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)


def _load_weights(
    opened: OpenedModel, model: ForwardModel, progress: ProgressFn, shard: Shard | None = None
) -> None:
    """Load the weights, or those of `shard`, into `model`. Raises `ConfigError` if they do not fit;
    on a host before they are read, those of all ranks."""
    needed = weights.nbytes(opened.config, opened.settings.dtype.itemsize)
    device = opened.settings.device
    if opened.weight_format is not None:
        progress(
            f"weights: {opened.weight_format.name} is read into "
            f"{str(opened.settings.dtype).removeprefix('torch.')}, which takes "
            f"{approximate_size(needed)} instead of {approximate_size(opened.stored_bytes)}",
            None,
        )
    if device.type == "cpu" and needed > available().free:
        raise out_of_memory("weights", needed, device)
    try:
        weights.load(opened.config, opened.checkpoint, model.place, progress, shard)
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        raise out_of_memory("weights", needed, device) from error


def _read_shard(
    spec: EngineSpec, opened: OpenedModel, shard: Shard, progress: ProgressFn
) -> LeaderModel:
    """Load rank 0's shard while the other ranks load theirs."""
    leader = start_leader(spec, opened.settings, shard)
    progress(f"kernels: {leader.kernels}", None)
    try:
        _load_weights(opened, leader, progress, shard)
        progress("waiting for the other ranks", None)
        leader.connect(opened.digest())
    except BaseException:
        leader.close()
        raise
    return leader


def make_model(
    config: ModelConfig, settings: TorchSettings, progress: ProgressFn
) -> tuple[ForwardModel, str]:
    """The model with pdserve's own kernels for the device if they can compute this, else the
    torch one; and why it is that one, although it was not asked for. Logs which, and why.

    Raises `ConfigError` if the requested kernels are not possible.
    """
    if settings.device.type == "cuda":
        made, why = make_gpu_model(config, settings)
        progress(f"kernels: {made.kernels}{why and f' (none in Triton: {why})'}", None)
        return made, _slow_kernels(settings, why)
    reason = _cpu_obstacle(config, settings)
    if settings.kernels not in ("auto", "torch") and reason is not None:
        raise ConfigError(f"engine option kernels={settings.kernels}: not possible, {reason}")
    if reason is None:
        native = CpuModel(config, settings)
        progress(f"kernels: {native.kernels}", None)
        return native, ""
    model = TorchModel(config, settings)
    progress(f"kernels: {model.kernels} (no native kernels: {reason})", None)
    # Without the extension the whole process is slow, and says so.
    return model, _slow_kernels(settings, reason) if accel.NATIVE else ""


def _cpu_obstacle(config: ModelConfig, settings: TorchSettings) -> str | None:
    """Why pdserve's own kernels for CPUs cannot compute the model, or shall not; None: they do."""
    if settings.kernels == "torch":
        return "they were not asked for"
    if settings.kernels == "triton":
        return f"the device is {settings.device}"
    if settings.kernels == "invariant" and (
        settings.dtype != torch.float32 or settings.kv_cache_dtype != "auto"
    ):
        return f"on {settings.device} it is promised in float32 alone, KV included"
    return unsupported_reason(config, settings.device)


def _slow_kernels(settings: TorchSettings, reason: str) -> str:
    """Why torch computes, if pdserve's own kernels were wanted; empty: they compute, or torch was
    asked for."""
    if not reason or settings.kernels == "torch":
        return ""
    return (
        f"torch computes the model on {settings.device}, slower than pdserve's own kernels: "
        f"{reason}; --engine-option kernels=torch if that is as it should be"
    )
