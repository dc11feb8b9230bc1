"""How fast blocks are named: the native chain against its hashlib twin and against two limits.

    python bench/micro/hash.py

Every row is measured in the same rounds, one after the other, and reported as its best round, so
the ratios hold on a busy machine. Limits: `memcpy`, reading and writing the tokens once, and
hashlib's BLAKE2b over the same bytes as one message, which pays neither for chaining nor for short
messages (a block of 32 tokens fills two 128-byte chunks by little more than half).
Writes bench/results/hash.md.
"""

from __future__ import annotations

import itertools
import time
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import facts
from pdserve import accel
from pdserve.blocks.hashing import (
    HASH_SECRET_TEST,
    block_hashes,
    chain_pure,
    pack_tokens,
    root_hash,
)

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 128 * 1024
BLOCK_SIZE = 32
BLOCKS = TOKENS // BLOCK_SIZE
ROUNDS = 30
RESULT = Path(__file__).parent.parent / "results" / "hash.md"

ROOT = root_hash(HASH_SECRET_TEST, "bench")


def rows() -> dict[str, Callable[[], object]]:
    """What is measured, by the name it has in the table."""
    tokens = [(i * 2654435761) % 151_936 for i in range(TOKENS)]
    packed = pack_tokens(tokens)
    chain = (packed, BLOCK_SIZE, HASH_SECRET_TEST, ROOT)
    measured: dict[str, Callable[[], object]] = {
        "limit: memcpy": lambda: bytearray(packed),
        "limit: BLAKE2b, one message": lambda: blake2b(packed, key=HASH_SECRET_TEST).digest(),
        "chain, hashlib twin": lambda: chain_pure(*chain),
        "pack_tokens (list to u32)": lambda: pack_tokens(tokens),
        "block_hashes, whole prompt": lambda: block_hashes(
            tokens, BLOCK_SIZE, parent=ROOT, secret=HASH_SECRET_TEST
        ),
    }
    measured["block_hashes, one block per call"] = lambda: [
        block_hashes(one, BLOCK_SIZE, parent=ROOT, secret=HASH_SECRET_TEST)
        for one in itertools.repeat(tokens[:BLOCK_SIZE], BLOCKS)
    ]
    if accel.NATIVE:
        measured["chain, native"] = lambda: accel.native.block_hashes(*chain)
    return measured


def best_seconds(measured: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Each row's best round; the rounds take all rows in turn."""
    best = dict.fromkeys(measured, float("inf"))
    for _ in range(ROUNDS):
        for name, work in measured.items():
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def report(best: dict[str, float]) -> str:
    """The result file's text."""
    twin = best["chain, hashlib twin"]
    table = [
        f"| {name} | {seconds * 1e3:.2f} | {seconds / BLOCKS * 1e9:.0f} "
        f"| {4 * TOKENS / seconds / 1e6:,.0f} | {twin / seconds:.2f} |"
        for name, seconds in sorted(best.items(), key=lambda row: row[1])
    ]
    return "\n".join(
        [
            "# Naming blocks",
            "",
            f"{TOKENS:,} tokens in {BLOCKS:,} blocks of {BLOCK_SIZE}; best of {ROUNDS} rounds.",
            "Repeat with `python bench/micro/hash.py`.",
            "",
            *(f"- {fact}" for fact in facts()),
            f"- {accel.describe()}",
            "",
            "| what | ms | ns per block | MB/s | times the twin's chain |",
            "|---|---:|---:|---:|---:|",
            *table,
            "",
        ]
    )


def main() -> None:
    """Measure, print, write."""
    text = report(best_seconds(rows()))
    print(text)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
