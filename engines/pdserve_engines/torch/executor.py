"""The torch executor: loads a checkpoint, computes the scheduler's steps, samples.

It joins the parts that do the work (`model`, `sampler`, `pool`) and owns them. It decides nothing
about which sequences run; the engine core owns it and calls it from one thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pdserve.engine.executor import StepPlan, StepResult
from pdserve.errors import ConfigError
from pdserve_engines.torch import weights
from pdserve_engines.torch.batch import make_batch
from pdserve_engines.torch.checkpoint import Checkpoint
from pdserve_engines.torch.config import read_config
from pdserve_engines.torch.cpu_model import CpuModel, unsupported_reason
from pdserve_engines.torch.facts import model_info
from pdserve_engines.torch.model import TorchModel
from pdserve_engines.torch.pool import KvPool
from pdserve_engines.torch.sampler import Sampler, describe, is_plain
from pdserve_engines.torch.settings import settle
from pdserve_engines.torch.wanted import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from pdserve.engine.executor import Chunk, ModelInfo, ProgressFn
    from pdserve.engine.sequence import Sequence
    from pdserve.messages.engine import EngineSpec
    from pdserve.messages.request import TokenLogprob
    from pdserve_engines.torch.config import ModelConfig
    from pdserve_engines.torch.model import Model
    from pdserve_engines.torch.settings import Settings

_LOGITS_AT_ONCE = 32 << 20
"""Elements of logits held at one time while prompt logprobs are computed."""


class TorchExecutor:
    """Implements `pdserve.engine.executor.Executor`."""

    def __init__(self) -> None:
        self.pool: KvPool | None = None
        """KV storage; exists from `allocate` to `close`."""
        self.info: ModelInfo | None = None
        """What `load` returned."""
        self._model: Model | None = None
        self._sampler = Sampler()
        self._settings: Settings | None = None

    # ------------------------------------------------------------------ life

    def load(self, spec: EngineSpec, progress: ProgressFn) -> ModelInfo:
        directory = Path(spec.model)
        progress("reading the checkpoint", None)
        config = read_config(directory)
        self._settings = settle(spec, config)
        torch.set_num_threads(self._settings.threads)
        with Checkpoint(directory) as checkpoint, torch.inference_mode():
            weights.check(config, checkpoint.entries)
            self._model = make_model(config, self._settings, progress)
            weights.load(config, checkpoint, self._model.place, progress)
            names = [name for param in weights.params(config) for name, _ in param.parts]
            identity = checkpoint.identity(names)
        self.prepare_thread()
        self.info = model_info(spec, config, self._settings, self._model.weight_bytes, identity)
        return self.info

    def allocate(self, num_blocks: int) -> None:
        assert self.info is not None, "load comes before allocate"
        assert self._settings is not None
        assert self._model is not None
        settings = self._settings
        self.pool = KvPool(self.info.layout, num_blocks, settings.dtype, settings.device)
        self._model.bind(self.pool)

    def release(self, sequences: Seq[Sequence]) -> None:
        self._sampler.forget(sequence.key for sequence in sequences)

    def prepare_thread(self) -> None:
        """Set torch's thread count, which is the whole process's, to what this model wants."""
        assert self._model is not None
        torch.set_num_threads(self._model.torch_threads)

    def close(self) -> None:
        if self._model is not None:
            self._model.close()
            self._model = None
        if self.pool is not None:
            self.pool.close()
            self.pool = None

    # ------------------------------------------------------------------ steps

    def execute(self, plan: StepPlan) -> StepResult:
        assert self.pool is not None, "allocate comes before execute"
        assert self._model is not None
        if plan.copies:
            self.pool.copy(plan.copies)
        if not plan.chunks:
            return StepResult([], [])
        wanted = Wanted(plan.chunks)
        batch = make_batch(plan.chunks, wanted.rows, self.pool.layout.block_size)
        sequences = [plan.chunks[index].sequence for index in wanted.sampling]
        if wanted.only_sampling and all(map(is_plain, sequences)):
            tokens = self._model.greedy(batch)
            return StepResult(tokens, [None] * len(tokens))
        with torch.inference_mode():
            hidden = self._model.forward(batch)
            return self._choose(plan.chunks, wanted, sequences, hidden)

    def _choose(
        self, chunks: Seq[Chunk], wanted: Wanted, sequences: Seq[Sequence], hidden: torch.Tensor
    ) -> StepResult:
        """Everything that is asked of the wanted rows."""
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
        return result

    def _prompt_logprobs(self, chunk: Chunk, hidden: torch.Tensor) -> list[TokenLogprob]:
        """Of the prompt tokens that the chunk's leading rows predict; slices bound the memory."""
        assert self._model is not None
        assert self.info is not None
        first = chunk.start + 1
        tokens = chunk.sequence.tokens[first : first + len(hidden)]
        top = chunk.sequence.sampling.prompt_logprobs or 0
        step = max(1, _LOGITS_AT_ONCE // self.info.vocab_size)
        found: list[TokenLogprob] = []
        for begin in range(0, len(tokens), step):
            part = tokens[begin : begin + step]
            raw = self._model.logits(hidden[begin : begin + step]).log_softmax(-1)
            found += describe(raw, part, [top] * len(part))
        return found


def make_model(config: ModelConfig, settings: Settings, progress: ProgressFn) -> Model:
    """The native model where it can compute this, else the torch one; says which, and why.

    Errors: `ConfigError` if the kernels that were asked for cannot be had.
    """
    reason = unsupported_reason(config, settings.device)
    if settings.kernels == "torch":
        reason = "they were not asked for"
    elif settings.kernels != "auto" and reason is not None:
        raise ConfigError(f"engine option kernels={settings.kernels}: not possible, {reason}")
    if reason is None:
        native = CpuModel(config, settings)
        progress(f"kernels: {native.kernels}", None)
        return native
    model = TorchModel(config, settings)
    why = f" (no native kernels: {reason})" if settings.device.type == "cpu" else ""
    progress(f"kernels: {model.kernels}{why}", None)
    return model
