"""Measures how fast blocks change their layout on the CPU, against copying the same bytes.

    python bench/micro/convert.py

Blocks of a 32-layer model with 8 KV heads of 128 bfloat16 (4 MiB each at 32 tokens) are converted
in random order, from the layouts of engines to the wire's and back. The limit is `memcpy` of whole
blocks in the same order, measured in the same rounds. Each row is its best round. Writes
bench/results/convert.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from bench.machine import facts
from pdserve import accel
from pdserve.kv.layout import WIRE, conversion, convert, convert_pure, strided_layout, wire_layout
from pdserve.messages.transfer import RankKvLayout

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS = 64
ROUNDS = 9
RESULT = Path(__file__).parent.parent / "results" / "convert.md"
LAYOUT = RankKvLayout(content="bench", layers=32, heads=8, tokens=32, dim=128, itemsize=2)
ORDERS = {
    "a pool per layer, heads first": "block kv head token dim",
    "k and v apart, heads first": "block head token dim",
    "a pool per layer, tokens first": "block kv token head dim",
    "one pool, tokens first": "block layer kv token head dim",
    "k and v apart, tokens first": "block token head dim",
}


def main() -> None:
    random = Random(1)
    wire = wire_layout(LAYOUT)
    size = conversion(wire, wire).block_bytes
    here, there = (random.sample(range(BLOCKS), BLOCKS) for _ in range(2))
    pool, other = bytearray(BLOCKS * size), bytearray(BLOCKS * size)
    pool[:] = random.randbytes(size) * BLOCKS

    def memcpy() -> None:
        convert(conversion(wire, wire), [memoryview(other)], [memoryview(pool)], there, here)

    rows: dict[str, Callable[[], None]] = {"whole blocks, the limit": memcpy}
    runs = {"whole blocks, the limit": size}
    for name, axes in ORDERS.items():
        for way in ("to the wire", "from the wire"):
            rows[f"{name}, {way}"], runs[f"{name}, {way}"] = case(
                axes, way == "to the wire", pool, other, there, here
            )
    best = dict.fromkeys(rows, float("inf"))
    for _ in range(ROUNDS):
        for name, work in rows.items():
            began = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - began)
    report(best, runs, BLOCKS * size, pure_rate(size))


def case(
    axes: str, to_wire: bool, pool: bytearray, other: bytearray, there: list[int], here: list[int]
) -> tuple[Callable[[], None], int]:
    """Returns the work and its longest contiguous run."""
    inner, wire = strided_layout(LAYOUT, axes, blocks=BLOCKS), wire_layout(LAYOUT)
    plan = conversion(inner, wire) if to_wire else conversion(wire, inner)
    count = inner.memories
    part = len(pool) // count
    inside = pool if to_wire else other
    pools = [memoryview(inside)[n * part : (n + 1) * part] for n in range(count)]
    ends = ([memoryview(other)], pools) if to_wire else (pools, [memoryview(pool)])
    return lambda: void(convert(plan, *ends, there, here)), plan.run


def void(_: int) -> None:
    """Drops the result of a call."""


def pure_rate(size: int) -> float:
    """Bytes per second of the pure twin, for one block with tokens first."""
    plan = conversion(
        strided_layout(LAYOUT, "block layer kv token head dim", blocks=1), wire_layout(LAYOUT)
    )
    began = time.perf_counter()
    convert_pure(
        plan, [memoryview(bytearray(size))], [memoryview(bytes(size))], [0], [0], range(plan.units)
    )
    return size / (time.perf_counter() - began)


def report(best: dict[str, float], runs: dict[str, int], size: int, pure: float) -> None:
    limit = best["whole blocks, the limit"]
    lines = [
        "# Layout conversion on the CPU",
        "",
        f"{BLOCKS} blocks of {size // BLOCKS >> 10} KiB ({LAYOUT.layers} layers, {LAYOUT.heads} KV "
        f"heads, {LAYOUT.tokens} tokens, {LAYOUT.dim} × {LAYOUT.itemsize} bytes), in random order, "
        f"one thread; the wire is `{WIRE}`. Best of {ROUNDS} rounds, on a machine that did other "
        "work, too. Repeat with `python bench/micro/convert.py`.",
        "",
        *(f"- {fact}" for fact in facts()),
        f"- {accel.describe()}",
        "",
        "| from, to | contiguous run | GB/s | of the limit |",
        "|---|---:|---:|---:|",
    ]
    for name, seconds in best.items():
        rate, share = size / seconds / 1e9, limit / seconds
        lines.append(f"| {name} | {runs[name]} | {rate:.1f} | {share:.0%} |")
    lines += ["", f"The pure twin moves {pure / 1e9:.2f} GB/s where tokens come first."]
    text = "\n".join(lines) + "\n"
    RESULT.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
