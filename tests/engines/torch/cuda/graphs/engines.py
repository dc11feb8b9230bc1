"""Whole engines on a CPU whose model is that of the GPU kernels, with graphs or without."""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.engine_loader import load_core
from pdserve.messages.engine import Abort, EngineStats, StepOutput, Submit
from pdserve.messages.request import GenerateRequest, SamplingParams, TokenLogprob
from pdserve.token_ids import token_ids
from pdserve_engines.torch import executor
from pdserve_engines.torch.cuda.graphs import graph_choice
from pdserve_engines.torch.cuda.invariant.invariant_model import InvariantModel
from pdserve_engines.torch.cuda.kernel_model import KernelModel
from tests.engines.torch.checkpoints import CONFIGURATIONS, VOCAB, checkpoint
from tests.engines.torch.cuda.graphs.recorded import RecordingDevice
from tests.engines.torch.cuda.graphs.torch_kernels import use_torch_kernels
from tests.engines.torch.driver import spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest
    import torch

    from pdserve_engines.torch.cuda.graphs.static_inputs import StaticInputs
    from pdserve_engines.torch.executor import TorchExecutor
    from pdserve_engines.torch.models.base import ForwardModel

BLOCK = 8


class KernelEngines:
    """Makes them; holds while the patch does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.device: RecordingDevice | None = None
        """That of the last engine."""
        self._inputs: list[torch.Tensor] = []
        use_torch_kernels(patch)
        patch.setattr(executor, "make_model", self._model)
        patch.setattr(graph_choice, "graph_device", self._device)
        made = KernelModel.static_inputs

        def static_inputs(model: KernelModel, *args: Any) -> StaticInputs:
            inputs = made(model, *args)
            self._inputs = [inputs._whole, inputs._rows]
            return inputs

        patch.setattr(KernelModel, "static_inputs", static_inputs)

    def _model(self, config: Any, settings: Any, progress: Any) -> tuple[ForwardModel, str]:
        kind = InvariantModel if settings.kernels == "invariant" else KernelModel
        self._last = kind(config, settings)
        return self._last, ""

    def _device(self, device: torch.device) -> RecordingDevice:
        self.device = RecordingDevice(self._lasting)
        return self.device

    def _lasting(self) -> Iterator[torch.Tensor]:
        model = self._last
        assert model._pool is not None
        yield model._pool.tensor
        yield from model._ropes.values()
        for group in (model._held.params, *model._held.layers):
            yield from group.values()
        yield from self._inputs

    def core(
        self,
        name: str,
        num_blocks: int,
        *,
        graphs: str,
        ahead: str,
        kernels: str = "auto",
        **fields: Any,
    ) -> EngineCore:
        """A loaded core."""
        core = load_core("torch", ManualClock())
        assert isinstance(core, EngineCore)
        config = CONFIGURATIONS[name].config().get_text_config()
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        block_bytes = 8 * config.num_hidden_layers * config.num_key_value_heads * dim * BLOCK
        options = {"async_scheduling": ahead, "cuda_graphs": graphs, "kernels": kernels}
        wanted = spec(
            checkpoint(name)[0],
            block_size=BLOCK,
            kv_memory=num_blocks * block_bytes,
            options=options,
            **fields,
        )
        core.load(wanted, lambda progress: None)
        return core


@dataclass
class Story:
    """What each request got, and the executor that computed it."""

    tokens: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], list[TokenLogprob]] = field(default_factory=dict)
    finishes: dict[tuple[int, int], str] = field(default_factory=dict)
    eager_steps: dict[str, int] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)


def tell(core: EngineCore, seed: int, requests: int) -> Story:
    """Submit random requests, abort some, and run the core to the end. The same seed tells the
    same story."""
    try:
        story = _told(core, seed, requests)
    finally:
        gc.collect()  # errors of steps hold views of the pool, which then cannot be unmapped
        leaked = core.close()
    assert not leaked
    return story


def _told(core: EngineCore, seed: int, requests: int) -> Story:
    chance, story, waiting = random.Random(seed), Story(), list(range(1, requests + 1))
    while waiting or core.has_work:
        if waiting and chance.random() < 0.4:
            for _ in range(min(len(waiting), chance.choice((1, 1, 2, 6)))):
                core.handle(Submit(handle=waiting[0], request=_request(waiting.pop(0), chance)))
        if chance.random() < 0.02:
            core.handle(Abort(handle=chance.randint(1, requests)))
        for event in core.step():
            for delta in event.deltas if isinstance(event, StepOutput) else ():
                key = (delta.handle, delta.choice)
                story.tokens.setdefault(key, []).extend(delta.tokens)
                story.logprobs.setdefault(key, []).extend(delta.logprobs or ())
                if delta.finish is not None:
                    story.finishes[key] = str(delta.finish.reason)
    graphs = cast("TorchExecutor", core._executor)._graphs
    if graphs is not None:
        story.eager_steps = {reason: count for reason, count in graphs.eager.items()}
    story.stats = core.stats()
    return story


def _request(handle: int, chance: random.Random) -> GenerateRequest:
    logprobs = chance.choice((None, None, 0, 2, 5))
    others = 0 if logprobs is None else chance.choice((0, 0, 3))
    sampling = SamplingParams(
        max_tokens=chance.randint(1, 40),
        temperature=chance.choice((0.0, 0.0, 0.8)),
        top_p=chance.choice((1.0, 0.95, 0.6)),
        top_k=chance.choice((0, 0, 20)),
        min_p=chance.choice((0.0, 0.0, 0.02)),
        seed=handle,
        repetition_penalty=chance.choice((1.0, 1.0, 1.3)),
        stop_token_ids=tuple(chance.sample(range(VOCAB), chance.choice((0, 0, 6)))),
        logprobs=logprobs,
        logprob_token_ids=tuple(chance.sample(range(VOCAB), others)),
    )
    # Many begin alike, so that they share blocks.
    head = random.Random(chance.randint(0, 2)).choices(range(VOCAB), k=chance.choice((0, 20)))
    prompt = head + chance.choices(range(VOCAB), k=chance.randint(1, 30))
    return GenerateRequest(
        request_id=f"r{handle}",
        model="m",
        prompt=token_ids(prompt),
        sampling=sampling,
        n=chance.choice((1, 1, 1, 3)),
    )
