"""The executor against `transformers`, token by token, under every way of scheduling a sequence."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.engine_core.executor import ScheduledChunk, StepPlan
from pdserve.messages.request import SamplingParams
from tests.engines.torch.checkpoints import (
    RARE,
    SELDOM,
    VOCAB,
    WITH_KERNELS,
    checkpoint,
    oracle_generate,
    oracle_logprobs,
)
from tests.engines.torch.driver import Driver, loaded
from tests.support.seeds import drawn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve_engines.torch.executor import TorchExecutor

BLOCK = 8
OUTPUTS = 12


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.fixture(
    params=[pytest.param(row.values, marks=row.marks, id=row.id) for row in WITH_KERNELS]
)
def computed(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A configuration and what computes it."""
    pair: tuple[str, str] = request.param
    return pair


@pytest.fixture
def family(computed: tuple[str, str]) -> str:
    return computed[0]


@pytest.fixture
def kernels(computed: tuple[str, str]) -> dict[str, str]:
    return {"kernels": computed[1]}


@pytest.fixture
def executor(family: str, kernels: dict[str, str]) -> Iterator[TorchExecutor]:
    executor = loaded(checkpoint(family)[0], block_size=BLOCK, options=kernels)
    yield executor
    executor.close()


@pytest.mark.parametrize("chunk", drawn([1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 100], 3, "chunk"))
def test_greedy_output_is_that_of_transformers_at_every_chunk_size(
    family: str, executor: TorchExecutor, chunk: int
) -> None:
    prompt = prompt_of(21)
    driver = Driver(executor)
    sequence = driver.add(prompt)
    driver.finish([sequence], OUTPUTS, chunk)
    assert sequence.output == oracle_generate(checkpoint(family)[1], prompt, OUTPUTS)


@pytest.mark.parametrize("chunk", [47, 1000])
def test_what_scaled_contexts_hold_is_that_of_transformers(
    family: str, executor: TorchExecutor, chunk: int
) -> None:
    """Longer than every window and than what every scaled context was stretched from."""
    prompt = prompt_of(190, seed=7)
    driver = Driver(executor)
    sequence = driver.add(prompt)
    driver.finish([sequence], OUTPUTS, chunk)
    assert sequence.output == oracle_generate(checkpoint(family)[1], prompt, OUTPUTS)


@pytest.mark.parametrize("name", SELDOM)
def test_every_family_computes_the_tokens_of_transformers(name: str) -> None:
    """One look at those of which a run takes a slice: in chunks, and longer than every window."""
    directory, model = checkpoint(name)
    executor = loaded(directory, block_size=BLOCK)
    driver = Driver(executor)
    prompts = [prompt_of(40), prompt_of(9, seed=1)]
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.finish(sequences, OUTPUTS, chunk=7)
    executor.close()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.output[:OUTPUTS] == oracle_generate(model, prompt, OUTPUTS)


@pytest.mark.parametrize("name", RARE)
def test_what_few_checkpoints_ask_for_is_that_of_transformers(name: str) -> None:
    directory, model = checkpoint(name)
    executor = loaded(directory, block_size=BLOCK)
    driver = Driver(executor)
    prompt = prompt_of(40)
    sequence = driver.add(prompt, SamplingParams(max_tokens=99, temperature=0.0, prompt_logprobs=0))
    driver.finish([sequence], OUTPUTS, chunk=7)
    executor.close()
    assert sequence.output == oracle_generate(model, prompt, OUTPUTS)
    found = [record for result in driver.results for record in result.prompt_logprobs.get(0, [])]
    assert len(found) == len(prompt) - 1
    for record, row in zip(found, oracle_logprobs(model, prompt), strict=False):
        assert record.logprob == pytest.approx(float(row[record.token]), abs=1e-4)


def test_logprobs_are_within_1e_4_of_transformers(family: str, executor: TorchExecutor) -> None:
    sampling = SamplingParams(max_tokens=9, temperature=0.0, logprobs=VOCAB)
    driver = Driver(executor)
    sequence = driver.add(prompt_of(19), sampling)
    driver.finish([sequence], 6, chunk=5)
    expected = oracle_logprobs(checkpoint(family)[1], sequence.tokens[:-1].tolist())[-6:]
    found = [result.logprobs[0] for result in driver.results if result.tokens]
    for record, row in zip(found, expected, strict=True):
        assert record is not None
        got = torch.tensor([value for _, value in sorted(record.top)])
        assert (got - row).abs().max() < 1e-4


@pytest.mark.parametrize("shared", drawn([BLOCK, 2 * BLOCK, BLOCK + 3, 1, 22], 2, "shared"))
def test_a_shared_prefix_at_and_off_block_borders_changes_nothing(
    family: str, executor: TorchExecutor, shared: int
) -> None:
    first, tail = prompt_of(24), prompt_of(9, seed=1)
    second = first[:shared] + tail
    driver = Driver(executor)
    source = driver.add(first)
    driver.finish([source], 1)
    reader = driver.add(second)
    driver.share(source, reader, shared)
    driver.finish([reader, source], OUTPUTS)
    model = checkpoint(family)[1]
    assert reader.output == oracle_generate(model, second, OUTPUTS)
    assert source.output == oracle_generate(model, first, OUTPUTS)


def test_a_preempted_sequence_resumes_with_the_same_tokens(
    family: str, executor: TorchExecutor
) -> None:
    prompt = prompt_of(17)
    driver = Driver(executor)
    sequence = driver.add(prompt)
    for outputs, chunk in ((1, 5), (6, 100), (9, 4), (OUTPUTS, BLOCK)):
        driver.finish([sequence], outputs, chunk)
        driver.preempt(sequence)
    assert sequence.output == oracle_generate(checkpoint(family)[1], prompt, OUTPUTS)


def test_a_mixed_batch_gives_each_sequence_its_own_output(
    family: str, executor: TorchExecutor
) -> None:
    """Decodes of very different lengths, prefill chunks and late comers in the same steps."""
    prompts = [prompt_of(length, seed=length) for length in (1, 2, BLOCK, 9, 31, 70)]
    driver = Driver(executor)
    sequences = [driver.add(prompt) for prompt in prompts]
    for late, sequence in enumerate(sequences):
        driver.advance(sequences[: late + 1], chunk=11)
        assert sequence.num_computed
    driver.finish(sequences, OUTPUTS, chunk=7)
    model = checkpoint(family)[1]
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert sequence.output[:OUTPUTS] == oracle_generate(model, prompt, OUTPUTS)


@pytest.mark.parametrize("length", [BLOCK, 13])
def test_forks_share_the_prompt_and_diverge_by_their_choice_index(
    family: str, executor: TorchExecutor, length: int
) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=11)
    prompt = prompt_of(length)
    driver = Driver(executor)
    parent = driver.add(prompt, sampling)
    driver.finish([parent], 1)
    children = [driver.fork(parent, choice) for choice in (1, 2)]
    driver.finish([parent, *children], OUTPUTS)
    outputs = [sequence.output for sequence in (parent, *children)]
    assert len({tuple(output) for output in outputs}) == 3
    for sequence in (parent, *children):
        alone = Driver(executor).add(prompt, sampling)
        alone.choice = sequence.choice
        Driver(executor).finish([alone], OUTPUTS, chunk=3)
        assert alone.output == sequence.output


def test_corrupting_one_block_changes_the_output(family: str, executor: TorchExecutor) -> None:
    """The reverse of every test above: were the blocks not read, this would go unnoticed."""
    prompt = prompt_of(20)
    driver = Driver(executor)
    sequence = driver.add(prompt)
    driver.finish([sequence], 2)
    good = sequence.output
    sampling = SamplingParams(max_tokens=9, temperature=0.0, logprobs=0)
    for victim in range(2):
        reader = driver.add(sequence.tokens, sampling)
        driver.share(sequence, reader, 2 * BLOCK)
        clean = driver.logprobs(reader).logprob
        kept = driver.pool.tensor[sequence.blocks[victim]].clone()
        driver.pool.tensor[sequence.blocks[victim]] = kept.roll(1, dims=-1)
        reader = driver.add(sequence.tokens, sampling)
        driver.share(sequence, reader, 2 * BLOCK)
        assert abs(driver.logprobs(reader).logprob - clean) > 1e-3
        driver.pool.tensor[sequence.blocks[victim]] = kept
    assert sequence.output == good


@pytest.mark.parametrize("chunk", drawn([1, 6, 100], 2, "chunk of logprobs"))
def test_prompt_logprobs_are_those_of_transformers(
    family: str, executor: TorchExecutor, chunk: int
) -> None:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, prompt_logprobs=2)
    prompt = prompt_of(19)
    driver = Driver(executor)
    sequence, other = driver.add(prompt, sampling), driver.add(prompt_of(9, seed=4))
    while sequence.num_output < 2:
        driver.advance([other, sequence], chunk)
    found = [record for result in driver.results for record in result.prompt_logprobs.get(1, [])]
    expected = oracle_logprobs(checkpoint(family)[1], prompt)
    assert [record.token for record in found] == prompt[1:]
    for record, row in zip(found, expected, strict=False):
        assert record.logprob == pytest.approx(float(row[record.token]), abs=1e-4)
        assert record.rank == int((row > row[record.token]).sum()) + 1
        assert [token for token, _ in record.top] == row.topk(2).indices.tolist()


def test_bfloat16_stays_close_to_float32(family: str, kernels: dict[str, str]) -> None:
    directory, model = checkpoint(family)
    executor = loaded(directory, dtype="bfloat16", block_size=BLOCK, options=kernels)
    sampling = SamplingParams(max_tokens=9, temperature=0.0, logprobs=VOCAB)
    driver = Driver(executor)
    sequence = driver.add(prompt_of(19), sampling)
    record = driver.logprobs(sequence, chunk=7)
    row = oracle_logprobs(model, sequence.tokens[:-1].tolist())[-1]
    got = torch.tensor([value for _, value in sorted(record.top)])
    assert (got.exp() - row.exp()).abs().sum() < 0.25
    assert driver.pool.tensor.dtype == torch.bfloat16
    executor.close()


def test_no_step_is_under_way_when_peers_may_write(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = loaded(checkpoint("llama")[0], block_size=BLOCK)
    settled: list[int] = []
    monkeypatch.setattr(executor, "_settle", lambda: settled.append(1))
    driver = Driver(executor)
    driver.finish([driver.add(prompt_of(21))], 1, chunk=8)
    assert not settled, "nobody moves anything"
    region = executor.region()
    driver.finish([driver.add(prompt_of(21, seed=1))], 1, chunk=8)
    assert len(settled) == 2, "after each chunk that samples nothing"
    assert region.view is not None
    region.view.release()
    executor.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_is_not_a_number_is_one_sequences_fault(
    family: str, executor: TorchExecutor, temperature: float
) -> None:
    sampling = SamplingParams(
        max_tokens=9, temperature=temperature, logprobs=2 if temperature else None
    )
    driver = Driver(executor)
    victim, other = driver.add(prompt_of(20), sampling), driver.add(prompt_of(17, 1), sampling)
    driver.finish([victim, other], 2)
    driver.pool.tensor[victim.blocks[1]] = torch.nan
    for row in (victim, other):
        assert len(row.blocks) * BLOCK > row.num_computed
    chunks = [ScheduledChunk(s, s.num_computed, 1, samples=True) for s in (victim, other)]
    result = executor.execute(StepPlan(chunks))
    assert list(result.faults) == [0]
    assert "NaN" in result.faults[0]
    assert not result.sound
    alone = executor.execute(StepPlan(chunks[1:]))
    assert result.tokens[1] == alone.tokens[0] >= 0
    assert not alone.faults


def test_the_zeros_of_a_pool_are_there_before_anybody_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sibling computes in a stream of its own, and peers write by others."""
    from types import SimpleNamespace

    from pdserve_engines.torch import executor as module

    done: list[str] = []

    class Stream:
        def __enter__(self) -> None:
            done.append("its own stream")

        def __exit__(self, *exc: object) -> None:
            done.append("left")

    made = module.TorchExecutor()
    device = SimpleNamespace(type="cuda")
    vars(made).update(
        info=SimpleNamespace(layout=SimpleNamespace(block_bytes=16)),
        _stream=SimpleNamespace(),
        _settings=SimpleNamespace(kv_dtype=None, kv_scales=(), device=device),
        _model=SimpleNamespace(bind=lambda pool: done.append("bound")),
    )
    monkeypatch.setattr(module, "pool_memory", lambda size, device: None)
    monkeypatch.setattr(module, "KvPool", lambda *_: done.append("zeros"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: Stream())
    current = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(made, "warm_up", lambda: done.append("warm"))
    monkeypatch.setattr(made, "_capture_graphs", lambda: done.append("captured"))
    made.allocate(4)
    assert done == ["its own stream", "zeros", "waited", "left", "bound", "warm", "captured"]
