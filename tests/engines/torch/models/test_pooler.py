"""Vectors of prompts against `transformers`, under every way of scheduling them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pdserve import accel
from pdserve.clock import ManualClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.engine_loader import load_core
from pdserve.errors import InvalidRequest, StepFailed, UnsupportedCheckpoint
from pdserve.messages.request import GenerateRequest, Pooling, SamplingParams
from pdserve.testing.inline_engine import InlineEngine
from pdserve.token_ids import token_ids
from pdserve_engines.torch.executor import TorchExecutor
from tests.engines.torch.checkpoints import TINY, VOCAB, checkpoint, oracle_generate
from tests.engines.torch.driver import spec

if TYPE_CHECKING:
    from pathlib import Path

    from pdserve.messages.engine import EngineSpec, EngineStats
    from pdserve.testing.output_checker import OutputChecker

BLOCK = 8
POOLINGS: tuple[Pooling, ...] = ("mean", "last")
NAMES = ("llama", "llama_biased", "qwen2", "qwen3", "mistral")
KERNELS = ("torch", "native") if accel.NATIVE else ("torch",)

Start = Callable[..., InlineEngine]


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[InlineEngine] = []

    def make(name: str = "qwen3", kernels: str = "torch", **fields: object) -> InlineEngine:
        core = load_core("torch", ManualClock())
        assert isinstance(core, EngineCore)
        fields.setdefault("kv_memory", 1 << 22)
        wanted: EngineSpec = spec(
            checkpoint(name)[0], block_size=BLOCK, options={"kernels": kernels}, **fields
        )
        engines.append(InlineEngine(core, wanted))
        return engines[-1]

    yield make
    for engine in engines:
        assert engine.close() == 0


def stats_of(engine: InlineEngine) -> EngineStats:
    assert isinstance(engine.core, EngineCore)
    return engine.core.stats()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def wants(prompt: list[int], pooling: Pooling, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=1)
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(prompt),
        sampling=sampling,
        pooling=pooling,
        **fields,
    )


def text(prompt: list[int], tokens: int, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
    return GenerateRequest(
        request_id="t", model="m", prompt=token_ids(prompt), sampling=sampling, **fields
    )


def oracle(name: str, prompt: list[int], pooling: Pooling) -> np.ndarray:
    with torch.inference_mode():
        model = checkpoint(name)[1].model
        hidden = model(torch.tensor([prompt])).last_hidden_state[0].double()
    found: np.ndarray = (hidden.mean(0) if pooling == "mean" else hidden[-1]).numpy()
    return found


def check(ledger: OutputChecker, name: str = "qwen3") -> None:
    """Within 1e-4 of `transformers`, and of the same direction to five digits."""
    finish = ledger.finishes[0]
    assert finish is not None
    found = np.frombuffer(finish.embedding, "<f4").astype(np.float64)
    expected = oracle(name, ledger.request.prompt.tolist(), ledger.request.pooling)
    assert np.abs(found - expected).max() < 1e-4
    cosine = found @ expected / np.linalg.norm(found) / np.linalg.norm(expected)
    assert cosine > 1 - 1e-5


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_those_of_transformers(
    start: Start, name: str, kernels: str, pooling: Pooling
) -> None:
    """Whole, in chunks that end at, before and behind a block's border, and of a single token."""
    engine = start(name, kernels, max_batch_tokens=BLOCK + 3, max_sequences=4)
    ledgers = [engine.submit(wants(prompt_of(n, n), pooling)) for n in (1, 2, BLOCK, 31, 90)]
    engine.run()
    for ledger in ledgers:
        check(ledger, name)
    stats = stats_of(engine)
    assert (stats.output_tokens, stats.finished) == (0, 5)
    assert stats.computed_tokens == 1 + 2 + BLOCK + 31 + 90


@pytest.mark.parametrize("kernels", KERNELS)
def test_traffic_beside_it_changes_neither(start: Start, kernels: str) -> None:
    engine = start(kernels=kernels, max_batch_tokens=13, max_sequences=5)
    prompts = [prompt_of(length, length) for length in (5, 24, 40)]
    texts = [engine.submit(text(prompt, 12)) for prompt in prompts]
    for _ in range(3):
        engine.step()
    vectors = [engine.submit(wants(prompt_of(50, 7), pooling)) for pooling in POOLINGS]
    engine.run()
    for ledger in vectors:
        check(ledger)
    model = checkpoint("qwen3")[1]
    expected = [oracle_generate(model, prompt, 12) for prompt in prompts]
    assert [ledger.tokens[0] for ledger in texts] == expected
    assert stats_of(engine).output_tokens == 36


def test_the_last_tokens_vector_uses_the_cache_and_a_mean_does_not(start: Start) -> None:
    engine = start()
    prompt = prompt_of(5 * BLOCK)
    for pooling, cached in (("last", 0), ("last", 4 * BLOCK), ("mean", 0), ("last", 4 * BLOCK)):
        before = stats_of(engine)
        ledger = engine.submit(wants(prompt, pooling))  # type: ignore[arg-type]
        engine.run()
        check(ledger)
        assert ledger.finishes[0] is not None
        assert ledger.finishes[0].cached_tokens == cached
        stats = stats_of(engine)
        assert stats.cached_tokens - before.cached_tokens == cached
        assert stats.computed_tokens - before.computed_tokens == len(prompt) - cached
    after = engine.submit(text(prompt, 4))
    engine.run()
    assert after.tokens[0] == oracle_generate(checkpoint("qwen3")[1], prompt, 4)
    assert after.finishes[0] is not None
    assert after.finishes[0].cached_tokens == 4 * BLOCK


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("cache", [True, False])
def test_a_preempted_prompt_begins_its_vector_anew(
    start: Start, pooling: Pooling, cache: bool
) -> None:
    config = TINY["qwen3"].config()
    block = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BLOCK * 4
    engine = start(
        kv_memory=11 * block, max_model_len=72, max_batch_tokens=3, max_sequences=3,
        prefix_cache=cache,
    )  # fmt: skip
    texts = [engine.submit(text(prompt_of(BLOCK, n), 25)) for n in range(2)]
    for _ in range(6):
        engine.step()
    ledger = engine.submit(wants(prompt_of(40), pooling, priority=-1))
    engine.run()
    check(ledger)
    assert ledger.finishes[0] is not None
    assert ledger.finishes[0].preemptions > 0
    assert all(len(each.tokens[0]) == 25 for each in texts)


def test_nothing_is_kept_of_a_mean_that_was_aborted(start: Start) -> None:
    engine = start(max_batch_tokens=8, max_sequences=4)
    executor = engine.core._executor  # type: ignore[attr-defined]
    assert isinstance(executor, TorchExecutor)
    ledger = engine.submit(wants(prompt_of(40), "mean"))
    engine.step()
    engine.step()
    assert executor._pooler._sums
    engine.abort(ledger)
    engine.run()
    assert not executor._pooler._sums
    engine.submit(wants(prompt_of(40), "mean"))
    engine.run()
    assert not executor._pooler._sums


def test_a_prompt_may_fill_the_whole_context(start: Start) -> None:
    engine = start(max_model_len=32)
    for pooling in POOLINGS:
        ledger = engine.submit(wants(prompt_of(32), pooling))
        engine.run()
        check(ledger)
    refused = engine.submit(wants(prompt_of(33), "last"))
    engine.run()
    assert refused.error is not None


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_vector_without_numbers_is_a_failure(
    start: Start, pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start()
    model = engine.core._executor._model  # type: ignore[attr-defined]
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *args: forward(*args) * torch.nan)
    spoilt = engine.submit(wants(prompt_of(9), pooling))
    engine.run()
    assert isinstance(spoilt.error, StepFailed)
    monkeypatch.undo()
    ledger = engine.submit(wants(prompt_of(9), pooling))
    engine.run()
    check(ledger)


@pytest.mark.parametrize(("name", "tied"), [("qwen3", False), ("qwen3_biased", True)])
@pytest.mark.parametrize("files", [True, False])
def test_a_checkpoint_without_an_output_layer_makes_vectors(
    tmp_path: Path, name: str, tied: bool, files: bool
) -> None:
    """As `transformers` saves a bare model: other names of tensors, perhaps no table to choose
    tokens by. What it has in common with a damaged one is not taken for it."""
    model = checkpoint(name)[1].model
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3Model"]
    if files:
        config["architectures"] = ["Qwen3ForCausalLM"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "modules.json").write_text("[]")
    core = load_core("torch", ManualClock())
    engine = InlineEngine(core, spec(tmp_path, block_size=BLOCK, kv_memory=1 << 20))
    ledger = engine.submit(wants(prompt_of(20), "mean"))
    said = engine.submit(text(prompt_of(5), 3))
    engine.run()
    check(ledger, name)
    if tied:
        assert len(said.tokens[0]) == 3
    else:
        assert isinstance(said.error, InvalidRequest)
        assert "embeddings" in said.error.message
    assert engine.close() == 0


def test_a_table_that_is_missing_without_a_word_is_missing(tmp_path: Path) -> None:
    checkpoint("qwen3")[1].model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    core = load_core("torch", ManualClock())
    with pytest.raises(UnsupportedCheckpoint, match=r"lm_head\.weight is missing"):
        core.load(spec(tmp_path), lambda progress: None)
    core.close()
    config["is_causal"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    core = load_core("torch", ManualClock())
    with pytest.raises(UnsupportedCheckpoint, match="is_causal"):
        core.load(spec(tmp_path), lambda progress: None)
    core.close()
