"""The real scheduler on top: token-exact, and by its counters not by recomputing everything."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.engine_loader import load_core
from pdserve.messages.engine import EngineStats, KvEvents, StepOutput, Submit
from pdserve.messages.request import Finish, GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from tests.engines.torch.checkpoints import (
    CONFIGURATIONS,
    NAMES,
    VOCAB,
    checkpoint,
    model_for,
    oracle_generate,
)
from tests.engines.torch.driver import spec
from tests.support.seeds import drawn

BLOCK = 8
Watch = Callable[[Any], None]


@dataclass
class Inline:
    """A core driven in place, collecting what each submission gets."""

    core: EngineCore
    outputs: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    finishes: dict[tuple[int, int], Finish] = field(default_factory=dict)
    kv_events: int = 0
    _handles: int = 0

    def submit(self, prompt: list[int], sampling: SamplingParams, n: int = 1) -> int:
        self._handles += 1
        request = GenerateRequest(
            request_id=f"r{self._handles}",
            model="m",
            prompt=token_ids(prompt),
            sampling=sampling,
            n=n,
        )
        self.core.handle(Submit(handle=self._handles, request=request))
        return self._handles

    def step(self) -> None:
        for event in self.core.step():
            if isinstance(event, StepOutput):
                for delta in event.deltas:
                    key = (delta.handle, delta.choice)
                    self.outputs.setdefault(key, []).extend(delta.tokens)
                    if delta.finish is not None:
                        self.finishes[key] = delta.finish
            self.kv_events += isinstance(event, KvEvents)

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    @property
    def stats(self) -> EngineStats:
        return self.core.stats()


@pytest.fixture(params=["off", "on"])
def start(watch_blocks: Watch, request: pytest.FixtureRequest) -> Iterator[Callable[..., Inline]]:
    """Starts cores; each story is told with and without steps that are begun ahead."""
    cores: list[EngineCore] = []

    def make(name: str, num_blocks: int, **fields: object) -> Inline:
        core = load_core("torch", ManualClock())
        assert isinstance(core, EngineCore)
        config = CONFIGURATIONS[name].config().get_text_config()
        head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        block_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * BLOCK
        wanted = spec(
            checkpoint(name)[0],
            block_size=BLOCK,
            kv_memory=num_blocks * block_bytes * 4,
            options={"async_scheduling": request.param},
            **fields,
        )
        capabilities = core.load(wanted, lambda progress: None)
        assert capabilities.num_blocks == num_blocks
        watch_blocks(core.pool)
        cores.append(core)
        return Inline(core)

    yield make
    for core in cores:
        assert core.close() == 0


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", drawn([5, BLOCK, 64], 2, "budget"))
def test_requests_that_come_and_go_get_the_tokens_of_transformers(
    start: Callable[..., Inline], name: str, budget: int
) -> None:
    inline = start(name, num_blocks=64, max_batch_tokens=budget, max_sequences=5)
    prompts = {}
    for seed, length in enumerate((3, 40, 1, 17, BLOCK, 26)):
        prompt = prompt_of(length, seed)
        prompts[inline.submit(prompt, greedy(10))] = prompt
        inline.step()
        inline.step()
    inline.run()
    for handle, prompt in prompts.items():
        assert inline.outputs[handle, 0] == oracle_generate(checkpoint(name)[1], prompt, 10)
    assert inline.stats.computed_tokens == sum(map(len, prompts.values())) + 9 * len(prompts)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("shared", "reused"),
    drawn([(2 * BLOCK, 2 * BLOCK), (2 * BLOCK + 3, 2 * BLOCK), (BLOCK - 1, 0)], 2, "shared"),
)
def test_a_cached_prefix_is_reused_and_changes_nothing(
    start: Callable[..., Inline], name: str, shared: int, reused: int
) -> None:
    inline = start(name, num_blocks=64)
    first = prompt_of(30)
    inline.submit(first, greedy(4))
    inline.run()
    before = inline.stats
    second = first[:shared] + prompt_of(9, seed=1)
    handle = inline.submit(second, greedy(10))
    inline.run()
    assert inline.outputs[handle, 0] == oracle_generate(checkpoint(name)[1], second, 10)
    assert inline.finishes[handle, 0].cached_tokens == reused
    assert inline.stats.cached_tokens - before.cached_tokens == reused
    assert inline.stats.computed_tokens - before.computed_tokens == len(second) - reused + 9
    assert inline.kv_events


@pytest.mark.parametrize("name", NAMES)
def test_a_pool_too_small_for_all_preempts_and_still_gives_the_same_tokens(
    start: Callable[..., Inline], name: str
) -> None:
    inline = start(name, num_blocks=10, max_model_len=10 * BLOCK)
    model, prompts = model_for(name, 10 * BLOCK), {}
    for seed in range(4):
        prompt = prompt_of(14, seed)
        prompts[inline.submit(prompt, greedy(24))] = prompt
    inline.run()
    assert inline.stats.preemptions > 0
    for handle, prompt in prompts.items():
        assert inline.outputs[handle, 0] == oracle_generate(model, prompt, 24)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", drawn([BLOCK, BLOCK + 1, 2 * BLOCK + 5], 1, "length"))
def test_choices_share_the_prompt_and_are_those_of_a_solitary_run(
    start: Callable[..., Inline], name: str, length: int
) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=1.0, seed=5)
    prompt = prompt_of(length)
    together, alone = start(name, num_blocks=64), start(name, num_blocks=64, prefix_cache=False)
    handle = together.submit(prompt, sampling, n=4)
    together.run()
    other = alone.submit(prompt, sampling, n=4)
    for _ in range(3):
        alone.submit(prompt_of(5, seed=9), sampling)
    alone.run()
    outputs = [together.outputs[handle, choice] for choice in range(4)]
    assert outputs == [alone.outputs[other, choice] for choice in range(4)]
    assert len({tuple(output) for output in outputs}) == 4
    # The prompt once, its last token again for each further choice, then the outputs.
    assert together.stats.computed_tokens == length + 3 + 4 * 7


def test_prompt_logprobs_arrive_whole_with_the_first_token(start: Callable[..., Inline]) -> None:
    inline = start("llama", num_blocks=64, max_batch_tokens=7, max_sequences=4)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=1)
    prompt = prompt_of(19)
    inline.submit(prompt, sampling)
    found = None
    while inline.core.has_work:
        for event in inline.core.step():
            if isinstance(event, StepOutput):
                found = found or event.deltas[0].prompt_logprobs
    assert found is not None
    assert [record.token for record in found] == prompt[1:]


def test_prompt_logprobs_outlast_a_preemption(start: Callable[..., Inline]) -> None:
    """The prompt is computed again, with tokens that were sampled, and predicts its own again."""
    inline = start("llama", num_blocks=10, max_model_len=10 * BLOCK, prefix_cache=False)
    model, prompts = model_for("llama", 10 * BLOCK), {}
    sampling = SamplingParams(max_tokens=40, temperature=0.0, prompt_logprobs=1)
    for seed in range(2):
        prompt = prompt_of(14, seed)
        prompts[inline.submit(prompt, sampling)] = prompt
    inline.run()
    assert inline.stats.preemptions > 0
    for handle, prompt in prompts.items():
        assert inline.outputs[handle, 0] == oracle_generate(model, prompt, 40)
