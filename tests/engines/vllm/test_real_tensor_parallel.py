"""The real vLLM in one process and in two: each computes prompts for the other."""

from __future__ import annotations

import os

import msgspec
import pytest

from tests.engines.vllm import real
from tests.engines.vllm.real_pair import BLOCK, P, alone, asked, make_pair

real.require_vllm()
pytestmark = [
    *real.MARKS,
    pytest.mark.long(whole_file=True),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="a rank needs a core of its own"),
]

TWO = msgspec.structs.replace(P, options=P.options | {"tensor_parallel_size": "2"})
"""Each of its ranks has one of the model's two KV heads."""


@pytest.fixture(scope="module", autouse=True)
def engines_of_this_file(engines: None) -> None:
    """vLLM asks for a memory node per rank unless it is told which cores to take. It keeps what it
    has read of the environment once an engine is loaded."""
    from vllm import envs

    envs.disable_envs_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        real.loaded(TWO)
    real.loaded(P)


@pytest.mark.parametrize("way", ["one to two", "two to one"])
def test_tensor_parallel_sizes_may_differ(way: str):
    both = make_pair(P, TWO) if way == "one to two" else make_pair(TWO, P)
    lengths = (5, 64, 150)
    ledgers = both.generate([asked(length) for length in lengths])
    assert both.d.stats.computed_tokens == sum(len(one.tokens[0]) for one in ledgers)
    blocks = sum(-(-length // BLOCK) for length in lengths)
    assert both.d.stats.received_bytes == blocks * both.d.staging.pool.block_bytes
    for ledger in ledgers:
        assert ledger.tokens == alone(both, ledger.request)
    both.close()
