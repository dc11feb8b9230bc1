"""Prompts between sim engines of unequal tensor-parallel sizes, over real verbs.

Each rank's pool is registered and written by itself. Each rank of the receiver has the sender's
bytes of its own heads, the tokens are the reference's, and the decode engine computes no prompt
(`HandoffPair.hand_over`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pdserve.clock import SystemClock
from pdserve_engines.sim.executor import SimExecutor
from tests.engines.sim.test_handoff import SIZES, engine_spec, reference, request
from tests.rdma.conftest import DEVICES, sent
from tests.support.handoff_pair import HandoffPair
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from pdserve.engine_core.core import EngineCore
    from pdserve.engine_core.kv_transfer.connector import KvConnector

LENGTHS = (3, 40, 65)
MOST_USED = [(4, 4, 2), (6, 2, 3)]


def make_core(mover: KvConnector) -> EngineCore:
    return SimExecutor().make_core(SystemClock(), mover)


@pytest.mark.parametrize(("kv_heads", "p", "d"), SIZES if is_long() else MOST_USED)
def test_prompts_move_between_unequal_sizes_by_rdma(kv_heads: int, p: int, d: int) -> None:
    options = {"content": "on", "kv_heads": str(kv_heads), "slowdown": "0"}
    before = sum(map(sent, DEVICES))
    both = HandoffPair(
        "rdma", make_core, {"p": engine_spec(p, **options), "d": engine_spec(d, **options)}
    )
    wanted = [request(length, length) for length in LENGTHS]
    try:
        assert both.hand_over(wanted) == [[reference(one, 0)] for one in wanted]
    finally:
        both.close()
    assert sum(map(sent, DEVICES)) - before >= d * len(LENGTHS)  # each rank's pool is written
