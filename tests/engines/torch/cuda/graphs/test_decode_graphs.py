"""Engines with graphs tell the stories of engines without. Planted bugs must show."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pdserve.engine_core.executor import ScheduledChunk, StepPlan
from pdserve_engines.torch.cuda.graphs import decode_graphs, static_inputs
from pdserve_engines.torch.cuda.graphs.bucket_sizes import smallest_bucket
from pdserve_engines.torch.cuda.graphs.decode_graphs import DecodeGraphs
from pdserve_engines.torch.cuda.graphs.static_inputs import Capacity, StaticInputs
from pdserve_engines.torch.cuda.kernel_model import KernelModel
from pdserve_engines.torch.models.forward_batch import make_batch
from pdserve_engines.torch.models.upload import upload_into
from tests.engines.torch.cuda.graphs.engines import BLOCK, KernelEngines, Story, tell
from tests.engines.torch.driver import sequence

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve_engines.torch.executor import TorchExecutor
    from pdserve_engines.torch.models.forward_batch import ForwardBatch

FAMILIES = ["llama", "qwen3", "gemma3", "mixtral"]
"""Plain, with norms of heads, with windows, and with experts."""


def told(
    patch: pytest.MonkeyPatch,
    seed: int,
    *,
    graphs: str,
    ahead: str = "off",
    name: str = "llama",
    requests: int = 12,
    kernels: str = "auto",
) -> Story:
    core = KernelEngines(patch).core(
        name,
        40,
        graphs=graphs,
        ahead=ahead,
        kernels=kernels,
        max_sequences=12,
        max_batch_tokens=40,
    )
    return tell(core, seed, requests)


@pytest.mark.parametrize(
    ("ahead", "kernels"), [("off", "auto"), ("on", "auto"), ("on", "invariant")]
)
def test_random_lives_with_graphs_are_those_without(
    monkeypatch: pytest.MonkeyPatch, ahead: str, kernels: str, seed: int, long: bool
) -> None:
    requests = 12 if kernels == "auto" or long else 8
    for number in range(30 if long else 1):
        name = FAMILIES[(seed + number) % len(FAMILIES)]
        stories = [
            told(
                monkeypatch,
                seed + number,
                graphs=graphs,
                ahead=ahead,
                name=name,
                requests=requests,
                kernels=kernels,
            )
            for graphs in ("off", "on")
        ]
        assert stories[0].tokens == stories[1].tokens
        assert stories[0].finishes == stories[1].finishes
        assert stories[0].stats.graph_steps == 0
        stats, prompts = stories[1].stats, stories[1].eager_steps["prefill"]
        assert stats.graph_steps > 0
        assert prompts > 0
        assert stats.graph_steps + stats.eager_decodes + prompts >= stats.steps
        assert (stats.steps_ahead > 0) == (ahead == "on")


# ------------------------------------------------------------------ planted bugs


def a_padding_row_writes_into_a_live_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(static_inputs, "_NO_BLOCK", 0)


def the_inputs_are_those_of_an_earlier_step(patch: pytest.MonkeyPatch) -> None:
    whole, turns = upload_into, iter(range(10**6))

    def seldom(array: Any, tensor: torch.Tensor) -> None:
        if next(turns) % 5 < 4:
            whole(array, tensor)

    patch.setattr(static_inputs, "upload_into", seldom)


def a_bucket_is_one_too_small(patch: pytest.MonkeyPatch) -> None:
    def smaller(sizes: tuple[int, ...], rows: int) -> int | None:
        return smallest_bucket(sizes, rows - 1) if rows > 1 else sizes[0]

    patch.setattr(decode_graphs, "smallest_bucket", smaller)


def tokens_are_those_that_the_host_knows(patch: pytest.MonkeyPatch) -> None:
    whole = StaticInputs.fill
    patch.setattr(StaticInputs, "fill", lambda self, batch: whole(self, replace(batch, fed=None)))


def items_of_a_larger_step_are_left(patch: pytest.MonkeyPatch) -> None:
    whole = StaticInputs.fill

    def fill(self: StaticInputs, batch: ForwardBatch) -> bool:
        counts = [self._view(7, 1).clone()]
        done = whole(self, batch)
        self._view(7, 1).copy_(torch.maximum(self._view(7, 1), counts[0]))
        return done

    patch.setattr(StaticInputs, "fill", fill)


def the_lengths_lack_the_own_token(patch: pytest.MonkeyPatch) -> None:
    whole = StaticInputs.fill

    def fill(self: StaticInputs, batch: ForwardBatch) -> bool:
        done = whole(self, batch)
        self._view(3, self._capacity.rows).sub_(1).clamp_min_(1)
        return done

    patch.setattr(StaticInputs, "fill", fill)


@pytest.mark.parametrize(
    "plant",
    [
        a_padding_row_writes_into_a_live_block,
        the_inputs_are_those_of_an_earlier_step,
        a_bucket_is_one_too_small,
        tokens_are_those_that_the_host_knows,
        items_of_a_larger_step_are_left,
        the_lengths_lack_the_own_token,
    ],
)
def test_a_planted_bug_shows(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = told(monkeypatch, 1, requests=8, graphs="off", ahead="on")
    plant(monkeypatch)
    logging.disable()  # pytest keeps the log, and with it errors that hold the pool
    try:
        assert told(monkeypatch, 1, requests=8, graphs="on", ahead="on").tokens != plain.tokens
    finally:
        logging.disable(logging.NOTSET)


# ------------------------------------------------------------------ single steps


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchExecutor]:
    engines = KernelEngines(monkeypatch)
    core = engines.core("llama", 40, graphs="on", ahead="off", max_sequences=9, max_batch_tokens=40)
    made: Any = core._executor
    made.device = engines.device
    yield made
    core.close()


def plan_of(rows: int, tokens: int = 5, **fields: Any) -> StepPlan:
    """`rows` sequences that decode, each in a block of its own."""
    chunks = []
    for row in range(rows):
        one = sequence([row + 1] * tokens, handle=row)
        one.blocks = [row * 2, row * 2 + 1]
        chunks.append(ScheduledChunk(one, tokens - 1, 1, samples=True))
    return StepPlan(chunks, **fields)


def test_a_batch_takes_the_smallest_graph_that_has_room(executor: Any) -> None:
    assert [len(graph.result) for graph in executor.device.graphs] == [9, 8, 4, 2, 1]
    for rows in (1, 2, 3, 5, 8, 9):
        executor.execute(plan_of(rows))
    assert executor.device.replayed == [1, 2, 4, 8, 8, 9]
    assert executor._graphs.replays == 6


def test_what_no_graph_computes_is_counted_by_its_reason(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = executor._graphs
    executor.execute(plan_of(10))
    prompt = plan_of(2)
    prompt.chunks[1] = replace(prompt.chunks[1], start=3, count=2)
    executor.execute(prompt)
    silent = plan_of(2)
    silent.chunks[0] = replace(silent.chunks[0], samples=False)
    executor.execute(silent)
    executor.execute(plan_of(2, watch=lambda layers: None, watch_at=frozenset([1])))
    graphs._inputs._capacity = Capacity(9, 100, blocks=1)
    executor.execute(plan_of(2))
    assert executor.device.replayed == []
    assert graphs.eager == {"batch": 1, "prefill": 2, "layers": 1, "context": 1}
    assert executor.graph_steps == 0
    assert executor.eager_decodes == 3


def test_a_result_is_the_callers_to_keep(executor: Any) -> None:
    graphs = executor._graphs
    assert not executor.pool.tensor.any(), "capturing leaves no trace"
    with torch.inference_mode():
        first = graphs.forward(make_batch(plan_of(3).chunks, [0, 1, 2], BLOCK))
        before = first.clone()
        graphs.forward(make_batch(plan_of(9).chunks, list(range(9)), BLOCK))
    assert torch.equal(first, before)
    assert not first.isnan().any()


def test_no_host_code_of_the_model_runs_in_a_replay(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = executor.execute(plan_of(3)).tokens

    def forbidden(*args: Any) -> None:
        raise AssertionError("the host computes a layer")

    monkeypatch.setattr(KernelModel, "_compute", forbidden)
    assert executor.execute(plan_of(3)).tokens == expected


def test_a_graph_holds_no_tensor_of_the_step_it_was_captured_in(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor waits for the device. The recording device finds both, or it would prove nothing."""
    whole = KernelModel._embed
    for plant, message in (
        (lambda x: x + torch.from_numpy(np.ones(x.shape[-1], np.float32)), "gone at the replay"),
        (lambda x: x * float(x.sum()), "waits for the device"),
        (lambda x: x + (x > 0).nonzero().sum(), "waits for the device"),
    ):
        monkeypatch.setattr(
            KernelModel, "_embed", lambda self, tokens, plant=plant: plant(whole(self, tokens))
        )
        graphs = DecodeGraphs(executor._model, executor.device, 2, 100)
        with torch.inference_mode(), pytest.raises(AssertionError, match=message):
            graphs.capture()


def test_closing_frees_the_graphs_before_the_pool(executor: Any) -> None:
    assert executor.device.graphs
    executor.close()
    assert not executor.device.graphs
    executor.close()
