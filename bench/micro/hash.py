"""Measures how fast blocks are hashed: the native chain, its hashlib twin, three limits, and the
public XXH3-64, which Dynamo uses for blocks and which has no key.

    python bench/micro/hash.py

Every row is measured in the same rounds, one after the other, and reported as its best round, so
the ratios hold on a busy machine. Limits: `memcpy`, reading and writing the tokens once, and
hashlib's BLAKE2b and XXH3-64 over the same bytes as one message, which pay neither for chaining nor
for short messages (a block of 32 tokens fills two 128-byte chunks by little more than half).
XXH3-64 is the package `xxhash`, called from Python block by block: what that costs is in its rows.
A list of ints goes in, as the tokenizer makes it, and names come out, as they travel; rows that
begin with a part's name measure that part alone. Writes bench/results/hash.md.

With Dynamo in another environment, the same tokens through its own binding in the same rounds:

    python bench/micro/hash.py --dynamo path/to/its/python
"""

from __future__ import annotations

import argparse
import itertools
import json
import struct
import subprocess
import time
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from xxhash import xxh3_64_intdigest

from bench.machine import facts
from pdserve import accel
from pdserve.blocks.hashing import (
    HASH_SECRET_TEST,
    block_hashes,
    block_hashes_pure,
    joined_hashes,
    pack_tokens,
    root_hash,
    short_hashes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = 128 * 1024
BLOCK_SIZE = 32
BLOCKS = TOKENS // BLOCK_SIZE
ROUNDS = 30
RESULT = Path(__file__).parent.parent / "results" / "hash.md"

PUBLIC_SEED = 1337
"""The seed of Dynamo's hashes."""

PEER_SIZES = (16, 32, 64)
"""Block sizes at which Dynamo is measured too."""

ROOT = root_hash(HASH_SECRET_TEST, "bench")


def token_ids() -> list[int]:
    """Makes token ids of a large vocabulary."""
    return [(i * 2654435761) % 151_936 for i in range(TOKENS)]


def public_hashes(tokens: list[int], block_size: int) -> tuple[list[int], list[int]]:
    """Dynamo's hashes of the full blocks, and of the chain up to each."""
    packed, step = pack_tokens(tokens), 4 * block_size
    own = [
        xxh3_64_intdigest(packed[start : start + step], PUBLIC_SEED)
        for start in range(0, len(packed) - step + 1, step)
    ]
    chain = own[:1]
    for one in own[1:]:
        chain.append(xxh3_64_intdigest(struct.pack("<QQ", chain[-1], one), PUBLIC_SEED))
    return own, chain


def rows() -> dict[str, Callable[[], object]]:
    """The rows by their names in the table."""
    tokens = token_ids()
    packed = pack_tokens(tokens)
    chain = (packed, BLOCK_SIZE, HASH_SECRET_TEST, ROOT)
    names = block_hashes_pure(*chain)
    measured: dict[str, Callable[[], object]] = {
        "limit: memcpy": lambda: bytearray(packed),
        "limit: BLAKE2b, one message": lambda: blake2b(packed, key=HASH_SECRET_TEST).digest(),
        "limit: XXH3-64, one message": lambda: xxh3_64_intdigest(packed, PUBLIC_SEED),
        "part: chain, hashlib twin": lambda: block_hashes_pure(*chain),
        "part: pack_tokens (list to u32)": lambda: pack_tokens(tokens),
        "part: short_names": lambda: short_hashes(names),
        "joined_hashes, list to bytes": lambda: joined_hashes(
            tokens, BLOCK_SIZE, parent=ROOT, secret=HASH_SECRET_TEST
        ),
        "block_hashes, list to list": lambda: block_hashes(
            tokens, BLOCK_SIZE, parent=ROOT, secret=HASH_SECRET_TEST
        ),
        "block_hashes, one block per call": lambda: [
            block_hashes(one, BLOCK_SIZE, parent=ROOT, secret=HASH_SECRET_TEST)
            for one in itertools.repeat(tokens[:BLOCK_SIZE], BLOCKS)
        ],
        "public_hashes, XXH3-64, no key": lambda: public_hashes(tokens, BLOCK_SIZE),
    }
    if accel.NATIVE:
        measured["part: chain, native"] = lambda: accel.native.block_hashes(*chain)
    for size in PEER_SIZES:
        measured[f"{_KEYED}{size}"] = lambda size=size: joined_hashes(  # type: ignore[misc]
            tokens, size, parent=ROOT, secret=HASH_SECRET_TEST
        )
        measured[f"{_PUBLIC}{size}"] = lambda size=size: public_hashes(tokens, size)  # type: ignore[misc]
    return measured


_KEYED = "keyed "
_PUBLIC = "public "

_PEER = """
import json, sys, time
from dynamo._core import compute_block_hash_for_seq as compute
tokens = [(i * 2654435761) % 151_936 for i in range(int(sys.argv[1]))]
for line in sys.stdin:
    size = int(line)
    start = time.perf_counter()
    compute(tokens, size)
    print(json.dumps(time.perf_counter() - start), flush=True)
"""


class Peer:
    """Dynamo's binding in its own process, which makes one call at a time."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", _PEER, str(TOKENS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, size: int) -> float:
        """Seconds of one call, measured in that process."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(size, file=stdin, flush=True)
        return float(json.loads(stdout.readline()))

    def close(self) -> None:
        self._process.communicate(timeout=10.0)


def best_seconds(
    measured: dict[str, Callable[[], object]], peer: Peer | None
) -> tuple[dict[str, float], dict[int, float]]:
    """Each row's best round; the rounds take all rows in turn, and the peer's between them."""
    best = dict.fromkeys(measured, float("inf"))
    peers = dict.fromkeys(PEER_SIZES, float("inf")) if peer is not None else {}
    for _ in range(ROUNDS):
        for name, work in measured.items():
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
        for size in peers:
            assert peer is not None
            peers[size] = min(peers[size], peer.seconds(size))
    return best, peers


def report(best: dict[str, float], peers: dict[int, float]) -> str:
    """The result file's text."""
    twin = best["part: chain, hashlib twin"]
    table = [
        f"| {name} | {seconds * 1e3:.2f} | {seconds / BLOCKS * 1e9:.0f} "
        f"| {TOKENS / seconds / 1e6:,.0f} | {twin / seconds:.2f} |"
        for name, seconds in sorted(best.items(), key=lambda row: row[1])
        if not name.startswith((_KEYED, _PUBLIC))
    ]
    against = [
        f"| {size} | {_rate(best[f'{_KEYED}{size}'])} | {_rate(best[f'{_PUBLIC}{size}'])} "
        f"| {_rate(peers[size]) if size in peers else 'not measured'} |"
        for size in PEER_SIZES
    ]
    return "\n".join(
        [
            "# Naming blocks",
            "",
            f"{TOKENS:,} tokens in {BLOCKS:,} blocks of {BLOCK_SIZE}; best of {ROUNDS} rounds,",
            "on a machine that did other work, too. Repeat with `python bench/micro/hash.py`.",
            "",
            *(f"- {fact}" for fact in facts()),
            f"- {accel.describe()}",
            "",
            "| what | ms | ns per block | Mtok/s | times the twin's chain |",
            "|---|---:|---:|---:|---:|",
            *table,
            "",
            "## Against Dynamo",
            "",
            "Million tokens per second from a Python list of ints to names, one core. pdserve's",
            "hashes have a key: no client can construct two prefixes with one hash. `xxhash` makes",
            "Dynamo's names of the blocks and of the chain, called from Python for each; Dynamo's",
            "binding makes the blocks' only, as a list of ints.",
            "",
            "| block size | pdserve, keyed BLAKE2b-128 | xxhash, XXH3-64 | Dynamo, XXH3-64 |",
            "|---:|---:|---:|---:|",
            *against,
            "",
        ]
    )


def _rate(seconds: float) -> str:
    return f"{TOKENS / seconds / 1e6:,.0f}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dynamo", metavar="PYTHON", help="an interpreter that has dynamo._core")
    python = parser.parse_args().dynamo
    peer = None if python is None else Peer(python)
    try:
        text = report(*best_seconds(rows(), peer))
    finally:
        if peer is not None:
            peer.close()
    print(text)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
