"""A request is aborted before each step of its life: the others get the tokens that they would have
got, and no block is lost. However steps are computed: begun ahead, by graphs, by several ranks."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.engine_core.core import EngineCore
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.testing.inline_engine import InlineEngine
from pdserve.text.grammar.grammar_source import from_schema
from pdserve.token_ids import token_ids
from pdserve_engines.torch.executor import TorchExecutor
from tests.engines.torch.cuda.graphs.engines import KernelEngines
from tests.engines.torch.driver import spec
from tests.engines.torch.tensor_parallel.thread_ranks import ranks_as_threads
from tests.engines.torch.test_handoff import BLOCK, BUNDLED, prompt_of
from tests.support.seeds import drawn, is_long

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.testing.output_checker import OutputChecker

OPTIONS: dict[str, dict[str, str]] = {
    "at once": {"kernels": "torch"},
    "ahead": {"kernels": "torch", "async_scheduling": "on"},
    "graphs": {"cuda_graphs": "on", "async_scheduling": "off"},
    "graphs, ahead": {"cuda_graphs": "on", "async_scheduling": "on"},
    "two ranks": {},
}
BLOCKS = 11
"""Of the pool: too few for all requests at once."""
LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 40}
GRAMMAR = from_schema(LIST, "x").text
PHASES = {"queued", "prefilling", "decoding", "preempted"}


@pytest.fixture
def engine(way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[InlineEngine]:
    """The bundled model, which has a tokenizer for grammars."""
    wanted = spec(
        BUNDLED,
        block_size=BLOCK,
        kv_memory=BLOCKS * 4 * 2 * 2 * 64 * BLOCK * 4,
        max_batch_tokens=10,
        max_sequences=5,
        max_model_len=8 * BLOCK,
        prefix_cache=False,
        options=OPTIONS[way],
        tensor_parallel=2 if way == "two ranks" else 1,
    )
    if "graphs" in way:
        KernelEngines(monkeypatch)
    with ranks_as_threads(), InlineEngine.of(TorchExecutor(), wanted) as made:
        assert made.capabilities.num_blocks == BLOCKS
        yield made
        gc.collect()


def request(length: int, n: int = 1, **sampling: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"max_tokens": 24, "eos_token_ids": (3,), "seed": length}
    return GenerateRequest(
        request_id=str(length),
        model="m",
        prompt=token_ids(prompt_of(length, length)),
        sampling=SamplingParams(**fields | sampling),
        n=n,
    )


KEPT = [
    request(9, temperature=0.0, grammar=GRAMMAR),
    request(3, frequency_penalty=0.5, repetition_penalty=1.2, temperature=0.7),
    request(5, temperature=0.0, logprobs=2),
]
DOOMED = request(23, n=2, max_tokens=14, presence_penalty=0.4, logprobs=1)
"""The others grow meanwhile, so that it is preempted."""


@dataclass
class Told:
    """What became of one course of the requests."""

    kept: list[OutputChecker]
    doomed: OutputChecker
    phases: list[str] = field(default_factory=list)
    """What the doomed request was doing before each step, until it ended or was aborted."""
    late: bool = False
    """An abort gave its blocks back later: the device was still using them."""


def tell(engine: InlineEngine, steps: int | None) -> Told:
    """Run all requests to their ends; abort the doomed one before its step of this number, from
    0. None: not at all."""
    core = engine.core
    assert isinstance(core, EngineCore)
    freed: list[str] = []
    core.on_freed = lambda handle, phase: freed.append(phase)
    kept = [engine.submit(one) for one in KEPT[:-1]]
    for _ in range(3):
        engine.step()
    story = Told(kept, engine.submit(DOOMED))
    handle = len(engine.ledgers)
    kept.append(engine.submit(KEPT[-1]))
    while core.has_work:
        if not story.doomed.done:
            story.phases.append(core.scheduler.phase(handle))
            if len(story.phases) - 1 == steps:
                engine.abort(story.doomed)
                story.late = not freed
        engine.step()
    assert freed == ([] if steps is None else [story.phases[-1]])
    assert core.pool.counts().used == 0
    engine.pool.check()
    return story


def chosen(phases: list[str], seed: int) -> list[int]:
    """Steps to abort before: all in long mode, else where a phase begins or ends, and some."""
    steps = range(len(phases))
    if is_long():
        return list(steps)
    borders = [n for n in steps if n == 0 or phases[n - 1] != phases[n]]
    return sorted({*borders, *(n - 1 for n in borders[1:]), steps[-1], seed % len(steps)})


@pytest.mark.parametrize("way", drawn([*OPTIONS], 2, "way"))
def test_an_abort_before_any_step_changes_no_other_request(
    way: str, engine: InlineEngine, seed: int
) -> None:
    tell(engine, None)  # a grammar that has to be compiled makes its request wait
    whole = tell(engine, None)
    assert set(whole.phases) == PHASES
    late = 0
    for step in chosen(whole.phases, seed):
        story = tell(engine, step)
        late += story.late
        assert story.phases == whole.phases[: step + 1]
        assert [one.tokens for one in story.kept] == [one.tokens for one in whole.kept]
        assert [reasons(one) for one in story.kept] == [reasons(one) for one in whole.kept]
        for part, output in zip(story.doomed.tokens, whole.doomed.tokens, strict=True):
            assert part == output[: len(part)]
    assert (late > 0) == ("ahead" in way)


def reasons(ledger: OutputChecker) -> list[str]:
    assert ledger.error is None
    return [str(finish and finish.reason) for finish in ledger.finishes]
