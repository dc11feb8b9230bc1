"""The same code path on an accelerator. Skipped where there is none."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.clock import SystemClock
from pdserve.engine_core.engine_loader import load_core
from pdserve.messages.engine import StepOutput, Submit
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.torch.models import attention
from tests.engines.torch.checkpoints import NAMES, VOCAB, checkpoint, oracle_generate
from tests.engines.torch.driver import Driver, loaded, spec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.engine_core.kit import Core
    from pdserve_engines.torch.executor import TorchExecutor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),  # a model's kernels are compiled at its first load
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_that_of_transformers_on_the_cpu(name: str) -> None:
    directory, model = checkpoint(name)
    prompts = [random.Random(length).choices(range(VOCAB), k=length) for length in (1, 9, 40)]
    expected = [oracle_generate(model, prompt, 12) for prompt in prompts]
    executor = loaded(directory, device="cuda", dtype="float32")
    driver = Driver(executor)
    sequences = [driver.add(prompt) for prompt in prompts]
    driver.finish(sequences, 12, chunk=7)
    assert [sequence.output for sequence in sequences] == expected
    executor.close()


@pytest.mark.parametrize("kernels", ["torch", "triton", "invariant"])
def test_steps_that_are_begun_ahead_bring_the_same_tokens(kernels: str) -> None:
    """Greedy, drawn, penalised and stopped rows together, which end at different steps."""
    prompts = [random.Random(length).choices(range(VOCAB), k=length) for length in (1, 9, 40, 12)]
    ways = (
        SamplingParams(max_tokens=30, temperature=0.0),
        SamplingParams(max_tokens=25, temperature=1.0, seed=3, top_k=20),
        SamplingParams(max_tokens=20, temperature=0.8, seed=4, repetition_penalty=1.2),
        SamplingParams(max_tokens=40, temperature=1.0, seed=5, stop_token_ids=tuple(range(9))),
    )
    found = []
    for mode in ("off", "on"):
        # By its module: where there is a GPU, pdserve need not be installed.
        core = load_core("pdserve_engines.torch:create", SystemClock())
        options = {"async_scheduling": mode, "kernels": kernels}
        core.load(
            spec(
                checkpoint("llama")[0],
                device="cuda",
                dtype="float32",
                kv_memory=64 << 20,
                options=options,
            ),
            lambda progress: None,
        )
        for handle, (prompt, sampling) in enumerate(zip(prompts, ways, strict=True), 1):
            request = GenerateRequest(
                request_id=f"r{handle}", model="m", prompt=token_ids(prompt), sampling=sampling
            )
            core.handle(Submit(handle=handle, request=request))
        found.append(outputs_of(core))
        assert core.close() == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma3"])
def test_invariant_kernels_choose_the_same_tokens_in_any_company(name: str, dtype: str) -> None:
    """Alone, together, in chunks of odd sizes, and continued by another engine after a few tokens,
    as after a migration: tokens and logprobs to the bit."""
    prompts = [random.Random(length).choices(range(VOCAB), k=length) for length in (1, 9, 40, 70)]
    drawn = SamplingParams(max_tokens=30, temperature=0.8, seed=3, top_p=0.9, logprobs=3)
    greedy = SamplingParams(max_tokens=30, temperature=0.0)
    with invariant_engine(name, dtype) as executor:
        for way in (drawn, greedy):
            together, _ = computed(executor, prompts, way, 100, 24)
            assert computed(executor, prompts, way, 7, 24)[0] == together
            for prompt, expected in zip(prompts, together, strict=True):
                alone, logprobs = computed(executor, [prompt], way, 100, 24)
                assert alone == [expected]
                assert computed(executor, [prompt], way, 7, 24)[1] == logprobs
    cut = [[*prompt, *output[:9]] for prompt, output in zip(prompts, together, strict=True)]
    with invariant_engine(name, dtype) as executor:
        assert computed(executor, cut, greedy, 11, 15)[0] == [output[9:] for output in together]


@contextmanager
def invariant_engine(name: str, dtype: str) -> Iterator[TorchExecutor]:
    """An engine that promises equal bits."""
    options = {"kernels": "invariant"}
    executor = loaded(checkpoint(name)[0], device="cuda", dtype=dtype, options=options)
    assert executor.info is not None
    assert any(one.startswith("exact:invariant sm_") for one in executor.info.features)
    try:
        yield executor
    finally:
        executor.close()


def computed(
    executor: TorchExecutor, prompts: list[list[int]], way: SamplingParams, chunk: int, count: int
) -> tuple[list[list[int]], list[list[Any]]]:
    """Each sequence's tokens, and the logprobs of one that is alone."""
    driver = Driver(executor)
    sequences = [driver.add(prompt, way) for prompt in prompts]
    driver.finish(sequences, count, chunk=chunk)
    executor.release(sequences)
    found: list[list[Any]] = [[] for _ in sequences]
    for result in driver.results:
        for row, record in enumerate(result.logprobs if len(sequences) == 1 else ()):
            found[row].append(record)
    return [sequence.output for sequence in sequences], found


def outputs_of(core: Core) -> dict[int, list[int]]:
    """Run the core until it has nothing to do; returns the tokens of each handle."""
    outputs: dict[int, list[int]] = {}
    while core.has_work:
        for event in core.step():
            for delta in event.deltas if isinstance(event, StepOutput) else ():
                outputs.setdefault(delta.handle, []).extend(delta.tokens)
    return outputs


def test_the_same_noise_chooses_the_same_tokens_on_both_devices() -> None:
    sampling = SamplingParams(
        max_tokens=20, temperature=0.9, top_p=0.95, top_k=40, seed=3, logprobs=2
    )
    outputs = []
    for device in ("cpu", "cuda"):
        executor = loaded(checkpoint("llama")[0], device=device, dtype="float32")
        driver = Driver(executor)
        sequence = driver.add([5, 4, 3, 2, 1], sampling)
        driver.finish([sequence], 12)
        outputs.append(sequence.output)
        executor.close()
    assert outputs[0] == outputs[1]


def test_bfloat16_is_computed_on_the_device() -> None:
    executor = loaded(checkpoint("llama")[0], device="cuda", dtype="bfloat16")
    assert executor.pool is not None
    assert executor.pool.tensor.device.type == "cuda"
    driver = Driver(executor)
    sequence = driver.add([5, 4, 3, 2, 1])
    driver.finish([sequence], 4, chunk=2)
    assert all(0 <= token < VOCAB for token in sequence.output)
    executor.close()


def test_attention_by_cudnn_is_off_while_an_engine_is_loaded() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    executor = loaded(checkpoint("llama")[0], device="cuda", dtype="bfloat16")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    executor.close()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_causal_attention_without_masks_computes_what_masks_compute(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole prompts and chunks behind computed tokens, in bfloat16."""
    prompt = random.Random(5).choices(range(VOCAB), k=50)
    sampling = SamplingParams(max_tokens=2, temperature=0.0, logprobs=5)
    found = []
    for skips in (True, False):
        monkeypatch.setattr(attention, "_skips_hidden_keys", lambda *_, skips=skips: skips)
        for chunk in (50, 13):
            executor = loaded(checkpoint(name)[0], device="cuda", dtype="bfloat16")
            driver = Driver(executor)
            found.append(driver.logprobs(driver.add(prompt, sampling), chunk))
            executor.close()
    for other in found[1:]:
        assert other.logprob == pytest.approx(found[0].logprob, abs=0.1)
