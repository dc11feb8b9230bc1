from __future__ import annotations

import numpy as np
import pytest

from pdserve.messages.engine import EngineSpec
from pdserve_engines.torch.models.forward_batch import ForwardBatch
from pdserve_engines.torch.tensor_parallel.rank_plan import (
    RankPlan,
    RankTask,
    decode_plan,
    encode_plan,
    most_bytes,
)


def batch_of(tokens: int, chunks: int, tables: int, rows: int) -> ForwardBatch:
    lengths = (tokens, tokens, chunks + 1, chunks, tables, chunks + 1, rows)
    return ForwardBatch(
        *(np.arange(1000 * n, 1000 * n + size, dtype=np.int32) for n, size in enumerate(lengths))
    )


@pytest.mark.parametrize("task", [RankTask.FORWARD, RankTask.GREEDY])
@pytest.mark.parametrize("rows", [0, 3])
def test_a_batch_arrives_as_it_was(task: RankTask, rows: int) -> None:
    sent = RankPlan(task, batch_of(17, 3, 8, rows))
    found = decode_plan(encode_plan(sent))
    assert (found.task, found.rows, found.copies) == (task, 0, ())
    assert sent.batch is not None
    assert found.batch is not None
    for ours, theirs in zip(sent.batch.arrays, found.batch.arrays, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize(
    "plan",
    [
        RankPlan(RankTask.LOGITS, rows=5),
        RankPlan(RankTask.COPY, copies=((3, 4), (1 << 20, 0))),
        RankPlan(RankTask.COPY),
    ],
)
def test_plans_without_a_batch_arrive(plan: RankPlan) -> None:
    assert decode_plan(encode_plan(plan)) == plan


@pytest.mark.parametrize("change", [lambda data: data[:-4], lambda data: data + bytes(4)])
def test_bytes_that_do_not_fit_the_header_are_refused(change: object) -> None:
    data = encode_plan(RankPlan(RankTask.GREEDY, batch_of(5, 1, 1, 1)))
    with pytest.raises(ValueError, match="does not fit its header"):
        decode_plan(change(data))  # type: ignore[operator]


def test_the_largest_step_fits() -> None:
    spec = EngineSpec(engine="torch", model="", max_batch_tokens=64, max_sequences=8, block_size=16)
    plan = RankPlan(RankTask.GREEDY, batch_of(64, 8, 8 * 10, 64))
    copies = RankPlan(RankTask.COPY, copies=((1, 2),) * 8)
    room = most_bytes(spec, max_model_len=155)
    assert len(encode_plan(plan)) <= room
    assert len(encode_plan(copies)) <= room
