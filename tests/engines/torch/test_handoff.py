"""A prompt prefilled by one torch engine and decoded by another: in float32 the tokens are those of
one engine, bit for bit, whichever kernels compute."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import pdserve
from pdserve import accel
from pdserve.engine_core.executor import ScheduledChunk, StepPlan
from pdserve.messages.engine import TransferSpec
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.inline_engine import InlineEngine
from pdserve.token_ids import token_ids
from pdserve_engines.torch.executor import TorchExecutor
from tests.engines.torch.checkpoints import VOCAB, WITH_KERNELS, checkpoint
from tests.engines.torch.driver import loaded, sequence, spec
from tests.support.disagg_pair import DisaggPair, make_pair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.messages.engine import EngineSpec

BLOCK = 8
LENGTHS = (1, 7, 8, 9, 16, 17, 30)
KERNELS = ["native", "torch"] if accel.NATIVE else ["torch"]
BUNDLED = Path(pdserve.__file__).parent / "bundled"

VARIANTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    "choices": {"temperature": 1.0, "seed": 5, "n": 3},
    "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    "penalties after given output": {"frequency_penalty": 1.5, "output": [[9, 9, 11]], "seed": 2},
    "bias and floor": {"logit_bias": {17: 4.0}, "min_tokens": 5, "stop_token_ids": (17,)},
}


def request(prompt: list[int], **changes: Any) -> GenerateRequest:
    fields = SamplingParams.__struct_fields__
    sampling = {name: changes.pop(name) for name in list(changes) if name in fields}
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(prompt),
        sampling=SamplingParams(**({"max_tokens": 8} | sampling)),
        **changes,
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def engine_spec(directory: Path, kernels: str, **fields: object) -> EngineSpec:
    return spec(
        directory,
        block_size=BLOCK,
        kv_memory=1 << 22,
        max_model_len=128,
        hash_secret=b"secret",
        options={"kernels": kernels},
        transfer=TransferSpec(verify="all"),
        **fields,
    )


@pytest.fixture(params=KERNELS)
def both(request: pytest.FixtureRequest) -> Iterator[DisaggPair]:
    wanted = engine_spec(checkpoint("qwen3")[0], request.param)
    pair = make_pair(TorchExecutor, wanted, p={"max_batch_tokens": 12, "max_sequences": 12})
    yield pair
    pair.close()


def compare(pair: DisaggPair, wanted: GenerateRequest) -> None:
    """Handed over, and by an engine of its own, without a prefix cache."""
    before = pair.d.stats
    (ledger,) = pair.generate([wanted])
    after = pair.d.stats
    computed = sum(len(output) - 1 for output in ledger.tokens)
    computed -= sum(map(len, wanted.output))
    assert after.computed_tokens - before.computed_tokens == computed
    alone = pair.p.engine.submit(wanted)
    pair.p.engine.run()
    assert ledger.tokens == alone.tokens
    assert [finish and finish.reason for finish in ledger.finishes] == [
        finish and finish.reason for finish in alone.finishes
    ]
    assert ledger.logprobs == alone.logprobs
    assert ledger.prompt_logprobs == alone.prompt_logprobs


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_request_gives_the_same_tokens(both: DisaggPair, name: str) -> None:
    for seed, length in enumerate(LENGTHS):
        compare(both, request(prompt_of(length, seed), **VARIANTS[name]))
    stats = both.d.stats
    assert stats.received_bytes == both.net.bytes_applied == both.p.stats.sent_bytes > 0
    assert stats.received_tokens == sum(LENGTHS)


def test_what_either_end_has_is_used_and_changes_nothing(both: DisaggPair) -> None:
    prompt = prompt_of(45)
    both.d.engine.generate([request(prompt[:17], max_tokens=1)])
    both.p.engine.generate([request(prompt[:33], max_tokens=1)])
    compare(both, request(prompt))
    assert both.d.stats.cached_tokens == 16
    assert both.d.stats.received_blocks == 4


def test_the_last_chunk_goes_out_layer_by_layer(both: DisaggPair) -> None:
    """Two layers: a part for each, after those of the chunks before."""
    handle, _ = both.submit(request(prompt_of(30)))
    both.run()
    assert both.handoffs[handle].handoff.parts == 2 + 2


@pytest.mark.parametrize(("name", "kernels"), WITH_KERNELS)
def test_every_family_can_be_handed_over(name: str, kernels: str) -> None:
    pair = make_pair(TorchExecutor, engine_spec(checkpoint(name)[0], kernels))
    compare(pair, request(prompt_of(27), temperature=1.0, seed=1))
    pair.close()


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_bundled_model_can_be_handed_over(kernels: str) -> None:
    pair = make_pair(TorchExecutor, engine_spec(BUNDLED, kernels))
    for length in (5, 8, 21):
        compare(pair, request(prompt_of(length), temperature=0.7, seed=4))
    pair.close()


@pytest.mark.parametrize("kernels", KERNELS)
def test_kernels_that_differ_still_agree_on_what_a_block_is(kernels: str) -> None:
    """Not bit for bit: but the continuation is that of the same prompt."""
    directory = checkpoint("llama")[0]
    pair = make_pair(
        TorchExecutor,
        engine_spec(directory, kernels),
        d={"options": {"kernels": "torch"}},
    )
    wanted = request(prompt_of(21), temperature=0.0)
    (ledger,) = pair.generate([wanted])
    pair.close()
    with InlineEngine.of(TorchExecutor(), engine_spec(directory, "torch")) as alone:
        assert alone.generate([wanted]) == [ledger.tokens]


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_watcher_sees_finished_layers_and_may_fail(kernels: str) -> None:
    executor = loaded(checkpoint("llama")[0], options={"kernels": kernels})
    try:
        region = executor.region()
        assert region.view is not None
        wanted = sequence(prompt_of(8))
        wanted.blocks = [3]
        layer = region.size // region.blocks // region.layout.layers
        seen: list[bytes] = []

        def watch(layers: int) -> None:
            assert region.view is not None
            begin = 3 * layer * region.layout.layers + (layers - 1) * layer
            seen.append(bytes(region.view[begin : begin + layer]))

        plan = StepPlan(
            [ScheduledChunk(wanted, 0, 8, True)], watch=watch, watch_at=frozenset({1, 2})
        )
        result = executor.execute(plan)
        whole = bytes(region.view[3 * 2 * layer : 4 * 2 * layer])
        assert whole == b"".join(seen)
        assert any(whole)

        def fail(layers: int) -> None:
            raise RuntimeError("watched in vain")

        plan.watch = fail
        with pytest.raises(RuntimeError, match="in vain"):
            executor.execute(plan)
        plan.watch = None
        assert executor.execute(plan).tokens == result.tokens
        region.view.release()
    finally:
        executor.close()
