"""The real vLLM in one process and in two: each computes prompts for the other, and they share
a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.messages.tiers import CachedSource
from tests.engines.vllm import real
from tests.engines.vllm.real_pair import BLOCK, P, alone, asked, make_pair
from tests.engines.vllm.real_tiers import Tiered, disk, sources

if TYPE_CHECKING:
    from pathlib import Path

real.require_vllm()
pytestmark = [*real.MARKS, pytest.mark.long(one_in=8, turn=6)]

TWO = msgspec.structs.replace(P, options=P.options | {"tensor_parallel_size": "2"})
"""Each of its ranks has one of the model's two KV heads."""
engines_of_this_file = real.keeps(TWO, P)


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


def test_two_ranks_share_the_tiers(tmp_path: Path):
    """Each copies its head; one rank finds on disk what two have stored."""
    tiers, prompt = disk(tmp_path), asked(170).prompt.tolist()
    two = Tiered(tiers, TWO)
    reference = two.ask(prompt).tokens
    two.forget()
    again = two.ask(prompt)
    assert again.tokens == reference
    assert sum(source.tokens for source in sources(again)) == 5 * BLOCK
    two.close()
    one = Tiered(tiers)
    alone = one.ask(prompt)
    assert alone.tokens == reference
    assert sources(alone) == (CachedSource("disk", 5 * BLOCK),)
    one.close()
