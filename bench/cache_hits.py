"""The block pool against a known answer: hit rates of one cache over Mooncake's conversation trace.

    python bench/cache_hits.py --trace FILE [--write bench/results/cache_hits.md]

One `BlockPool` handles all requests in order, each at once from match to release, without engine
and time. Blocks are the trace's own, of 512 tokens. A prompt's last block counts as a full one, as
in the published rates. A plain LRU cache of twenty lines replays the same requests and must agree.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from pdserve.kv.block_pool import BlockPool
from pdserve.sim.workloads.mooncake import BLOCK, MooncakeTrace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["PUBLISHED", "ideal_rate", "lru_rate", "pool_rate"]

PUBLISHED: Final = {500_000: 0.045, 3_000_000: 0.136, 15_400_000: 0.326, 51_000_000: 0.364}
"""Published hit rates: tokens of capacity -> share of the blocks that are hits."""
IDEAL: Final = 0.3664
"""The published hit rate of a cache without a bound."""


def pool_rate(prompts: Iterable[Sequence[int]], tokens: int) -> float:
    """Returns the hit rate of a `BlockPool` with room for `tokens` tokens."""
    pool = BlockPool(tokens // BLOCK, BLOCK)
    hits = total = 0
    for prompt in prompts:
        # A hash identifies a block with its prefix. So does an id of this trace: it serves as hash.
        names = [content.to_bytes(16, "little") for content in prompt]
        found = pool.match(names)
        hits += len(found)
        total += len(names)
        fresh = pool.reserve(len(names) - len(found), shared=found)
        if fresh is None:
            continue  # a prompt that is longer than the pool
        blocks = found + fresh
        for index in range(len(found), len(names)):
            parent = names[index - 1] if index else b""
            blocks[index] = pool.commit(blocks[index], names[index], parent)
        pool.release(blocks)
        pool.drain_events()
    pool.check()
    return hits / total if total else 0.0


def lru_rate(prompts: Iterable[Sequence[int]], tokens: int) -> float:
    """Returns the hit rate of a plain LRU list of blocks, in which a prompt's deeper blocks are
    older."""
    capacity = tokens // BLOCK
    cached: OrderedDict[int, None] = OrderedDict()
    hits = total = 0
    for prompt in prompts:
        total += len(prompt)
        depth = next((i for i, content in enumerate(prompt) if content not in cached), len(prompt))
        hits += depth
        if len(prompt) > capacity:
            continue
        for content in reversed(prompt):
            cached[content] = None
            cached.move_to_end(content)
        while len(cached) > capacity:
            cached.popitem(last=False)
    return hits / total if total else 0.0


def ideal_rate(prompts: Iterable[Sequence[int]]) -> float:
    """Returns the hit rate of a cache without a bound."""
    seen: set[int] = set()
    hits = total = 0
    for prompt in prompts:
        total += len(prompt)
        hits += next((i for i, content in enumerate(prompt) if content not in seen), len(prompt))
        seen.update(prompt)
    return hits / total if total else 0.0


def read(path: Path) -> list[list[int]]:
    """Reads the block ids of all prompts."""
    return [[content for content, _ in request.pieces] for request in MooncakeTrace(path)]


def main() -> int:
    """Compares the rates; the exit status is 1 if one differs from the published rate."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    prompts = read(options.trace)
    rows = [("without a bound", "", f"{ideal_rate(prompts):.2%}", f"{IDEAL:.2%}", "")]
    agree = abs(ideal_rate(prompts) - IDEAL) < 0.0001
    for tokens, published in PUBLISHED.items():
        began = time.process_time()
        rate = pool_rate(prompts, tokens)
        blocks = sum(map(len, prompts)) / (time.process_time() - began)
        plain = lru_rate(prompts, tokens)
        agree &= abs(rate - published) < 0.001
        name = f"{tokens / 1e6:g} M tokens"
        rows.append((name, f"{rate:.2%}", f"{plain:.2%}", f"{published:.1%}", f"{blocks:,.0f}"))
    text = _page(rows)
    print(text)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    return 0 if agree else 1


def _page(rows: Iterable[tuple[str, ...]]) -> str:
    head = ("capacity", "BlockPool", "plain LRU", "published", "BlockPool, blocks/s")
    lines = [f"| {' | '.join(row)} |" for row in (head, ("---", *["---:"] * 4), *rows)]
    return "\n".join(
        [
            "# Prefix hits of one cache",
            "",
            "All of Mooncake's conversation trace (12,031 requests) in order through one",
            "`BlockPool`; blocks of 512 tokens, a prompt's last block counted as a whole one.",
            "Repeat with `python bench/cache_hits.py --trace conversation_trace.jsonl`.",
            "",
            *(f"- {fact}" for fact in facts()),
            "- other work ran on the machine meanwhile, which the last column shows",
            "",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
