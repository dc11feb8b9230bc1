"""Defines what rank 0 tells the other ranks to do, and packs it into arrays of int32. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from pdserve_engines.torch.models.forward_batch import ForwardBatch

if TYPE_CHECKING:
    from pdserve.ids import Bytes
    from pdserve.messages.engine import EngineSpec

__all__ = ["RankPlan", "RankTask", "decode_plan", "encode_plan", "most_bytes"]

_ARRAYS = 7
_HEADER = 3 + _ARRAYS
"""Words before the arrays: task, rows, number of copies, length of each array of the batch."""
_ITEM = 4


class RankTask(IntEnum):
    """What to compute. Each task ends with a collective operation of all ranks."""

    FORWARD = 0
    """The batch; the hidden states stay on each rank."""
    GREEDY = 1
    """The batch, and the logits of its wanted rows."""
    LOGITS = 2
    """The logits of `rows` hidden states, which rank 0 broadcasts."""
    COPY = 3
    """Copies of blocks alone."""


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One task for all ranks."""

    task: RankTask
    batch: ForwardBatch | None = None
    rows: int = 0
    copies: tuple[tuple[int, int], ...] = ()
    """(source, destination) blocks."""


def encode_plan(plan: RankPlan) -> bytes:
    """The plan as bytes: the header, the copies, then the arrays of the batch end to end."""
    arrays = () if plan.batch is None else plan.batch.arrays
    lengths = [len(array) for array in arrays] or [0] * _ARRAYS
    header = np.array([plan.task, plan.rows, len(plan.copies), *lengths], np.int32)
    copies = np.array(plan.copies, np.int32).reshape(-1)
    return np.concatenate((header, copies, *arrays)).tobytes()


def decode_plan(data: bytes) -> RankPlan:
    """The plan that `encode_plan` has packed. Raises ValueError for other bytes."""
    words = np.frombuffer(data, np.int32)
    task, rows, copies, *lengths = (int(word) for word in words[:_HEADER])
    edges = np.cumsum([_HEADER, 2 * copies, *lengths])
    if len(lengths) != _ARRAYS or edges[-1] != len(words):
        raise ValueError(f"a plan of {len(words)} words does not fit its header")
    pairs, *arrays = (words[edges[n] : edges[n + 1]].copy() for n in range(_ARRAYS + 1))
    return RankPlan(
        RankTask(task),
        ForwardBatch(*arrays) if any(lengths) else None,
        rows,
        tuple((int(source), int(target)) for source, target in pairs.reshape(-1, 2)),
    )


def most_bytes(spec: EngineSpec, max_model_len: int) -> Bytes:
    """Most bytes of a plan: every sequence with a block table of full length, and each step with
    one copy for a sequence."""
    tokens, sequences = spec.max_batch_tokens, spec.max_sequences
    tables = sequences * -(-max_model_len // spec.block_size)
    words = _HEADER + 2 * sequences + 3 * tokens + 3 * (sequences + 1) + tables
    return words * _ITEM
