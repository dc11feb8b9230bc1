"""The tiers' placement and eviction against known answers: hits over Mooncake's conversation trace.

    python bench/tier_trace.py --trace FILE [--write bench/results/tier_trace.md]

Requests take no time (`bench/atomic_tiers.py`), so only decisions count: which blocks a tier takes
in, which ones it gives up, which worker a prompt goes to.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.atomic_tiers import (
    BLOCK,
    PAYLOAD,
    AtomicCluster,
    AtomicTiers,
    Prompt,
    anywhere,
    belady_hits,
    by_prefix,
    read,
    replay,
)
from bench.machine import facts
from pdserve.kv.tiers.admission import DiskAdmission, HostAdmission, WriteBudget
from pdserve.kv.tiers.disk.format import record_bytes
from pdserve.kv.tiers.eviction import EvictionOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from bench.atomic_tiers import Route

__all__ = ["LRU_HITS", "TURN_RATES"]

LRU_HITS: Final = {
    976: 12_830,
    1_953: 15_370,
    3_906: 24_467,
    5_859: 39_258,
    9_765: 59_742,
    19_531: 82_273,
    29_296: 93_550,
    39_062: 101_337,
    58_593: 103_511,
    97_656: 104_870,
}
"""Blocks of one tier -> blocks of the trace that an LRU list finds, if leaves are older."""

TURN_RATES: Final = {
    976: 0.0689,
    1_953: 0.0965,
    3_906: 0.1290,
    5_859: 0.1576,
    9_765: 0.2207,
    19_531: 0.2927,
    29_296: 0.3262,
    39_062: 0.3492,
    58_593: 0.3581,
    97_656: 0.3636,
}
"""The same with a bonus of 60 s for each of up to 4 earlier turns -> part of the blocks that are
found. It depends on how turns are told, so it is known less exactly."""

PAIRS: Final = ((1, 4), (2, 4), (2, 10), (4, 4), (4, 10), (6, 20), (4, 2))
"""Sizes of device and host memory that are compared, in units of 976 or 977 blocks: 500,000
tokens."""

DISKS: Final = {10: 0.292, 20: 0.317, 40: 0.353}
"""Size of the disk behind 1 M tokens of device and 5 M of host memory, in the same units -> part
of the blocks that are found if the disk is an LRU list of all that host memory gives up."""

RANDOM: Final = (0.082, 0.189)
"""Part of the blocks that 8 workers of 1.25 M tokens find if prompts go anywhere: at that worker,
and at another one."""


# ---------------------------------------------------------------- the page


def main() -> int:
    """Writes both tables; the exit status is 1 if a known answer is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    prompts = read(options.trace)
    wrong: list[str] = []
    text = _page(
        [_one_tier(prompts, blocks, wrong) for blocks in LRU_HITS],
        _pairs(prompts, wrong),
        [_three_tiers(prompts, size) for size in DISKS],
        _clusters(prompts, wrong),
    )
    print(text)
    print(*wrong, sep="\n", file=sys.stderr)
    if options.write:
        options.write.write_text(text, encoding="utf-8")
    return 1 if wrong else 0


def _one_tier(prompts: Sequence[Prompt], blocks: int, wrong: list[str]) -> tuple[str, ...]:
    """A row: each tier alone."""
    total = sum(len(prompt.names) for prompt in prompts)
    device = sum(replay(prompts, AtomicTiers(blocks, 0)))
    host = sum(replay(prompts, AtomicTiers(0, blocks)))
    turns = sum(replay(prompts, AtomicTiers(0, blocks, order=EvictionOrder())))
    best = belady_hits(prompts, blocks)
    known, rate = LRU_HITS[blocks], TURN_RATES[blocks]
    if not device == host == known <= best:
        wrong.append(f"{blocks} blocks: {device} on the device, {host} in host memory, not {known}")
    if not rate - 0.003 <= turns / total <= best / total:
        wrong.append(f"{blocks} blocks: {turns / total:.2%} with the turn bonus, not {rate:.2%}")
    rates = (f"{hits / total:.2%}" for hits in (known, turns, best))
    return (f"{blocks:,}", f"{device:,}", f"{host:,}", f"{known:,}", *rates)


def _pairs(prompts: Sequence[Prompt], wrong: list[str]) -> list[tuple[str, ...]]:
    """Rows: device and host memory together."""
    total = sum(len(prompt.names) for prompt in prompts)
    rows = []
    for device, host in ((_blocks(device), _blocks(host)) for device, host in PAIRS):
        arms = _arms(device, host)
        hits = {name: replay(prompts, tiers) for name, tiers in arms.items()}
        if hits["exclusive"] != replay(prompts, AtomicTiers(device + host, 0)):
            wrong.append(f"{device} + {host} blocks: exclusive is not one LRU list of the sum")
        if hits["mirror"] != replay(prompts, AtomicTiers(max(device, host), 0)):
            wrong.append(f"{device} + {host} blocks: mirror is not one LRU list of the larger")
        cells = (
            f"{sum(hits[name]) / total:.2%} / {arms[name].written / total:.2f}" for name in arms
        )
        rows.append((f"{device:,} + {host:,}", *cells))
    return rows


def _three_tiers(prompts: Sequence[Prompt], halves: int) -> tuple[str, ...]:
    """A row: a disk behind device and host memory."""
    total = sum(len(prompt.names) for prompt in prompts)
    device, host, disk = _blocks(2), _blocks(10), _blocks(halves)
    size = disk * record_bytes(PAYLOAD)
    plenty, day = WriteBudget(10**9 * size, 0.0), WriteBudget(size, 0.0)
    arms = [
        AtomicTiers(device, host, disk),
        AtomicTiers(device, host, disk, disk_admission=DiskAdmission("reused", disk, plenty)),
        AtomicTiers(device, host, disk, disk_admission=DiskAdmission("auto", disk, day)),
    ]
    cells = (f"{sum(replay(prompts, arm)) / total:.2%} / {arm.spilled / total:.2f}" for arm in arms)
    return (f"{disk:,}", f"{DISKS[halves]:.1%}", *cells)


def _clusters(prompts: Sequence[Prompt], wrong: list[str]) -> list[tuple[str, ...]]:
    """Rows: 8 workers, each route, alone and with a pool."""
    device, small, host = 1_250_000 // BLOCK, _blocks(1), _blocks(5)
    workers: dict[str, Callable[[], AtomicTiers]] = {
        f"{device:,}": lambda: AtomicTiers(device, 0),
        f"{small:,} + {host:,}, mirror": lambda: _arms(small, host)["mirror"],
        f"{small:,} + {host:,}, auto": lambda: _arms(small, host)["auto"],
    }
    rows = []
    for size, worker in workers.items():
        for name, bound in (("anywhere", 0.0), ("by prefix, 1.0", 1.0), ("by prefix, 1.1", 1.1)):
            cells = []
            for pool in (False, True):
                route = by_prefix(bound) if bound else anywhere()
                local, fetched = _found(prompts, worker, route, pool=pool)
                cells.append(f"{local:.1%} + {fetched:.1%}" if pool else f"{local:.1%}")
            error = max(abs(local - RANDOM[0]), abs(fetched - RANDOM[1]))
            if size == f"{device:,}" and name == "anywhere" and error > 0.005:
                wrong.append(f"8 workers: {local:.1%} + {fetched:.1%} if prompts go anywhere")
            rows.append((size, name, *cells))
    return rows


def _found(
    prompts: Sequence[Prompt], worker: Callable[[], AtomicTiers], route: Route, *, pool: bool
) -> tuple[float, float]:
    """Parts of the blocks that 8 workers find: at the prompt's worker, and at another one."""
    cluster = AtomicCluster([worker() for _ in range(8)], route, pool=pool)
    for prompt in prompts:
        cluster.serve(prompt)
    total = sum(len(prompt.names) for prompt in prompts)
    return cluster.local / total, cluster.fetched / total


def _blocks(halves: int) -> int:
    return halves * 500_000 // BLOCK


def _arms(device: int, host: int) -> dict[str, AtomicTiers]:
    bonus = EvictionOrder()
    return {
        "mirror": AtomicTiers(device, host, placement="mirror"),
        "exclusive": AtomicTiers(device, host),
        "turn bonus": AtomicTiers(device, host, order=bonus),
        "auto": AtomicTiers(device, host, order=bonus, admission=HostAdmission("auto", host)),
        "reused": AtomicTiers(device, host, order=bonus, admission=HostAdmission("reused", host)),
    }


def _page(
    one: Iterable[tuple[str, ...]],
    two: Iterable[tuple[str, ...]],
    three: Iterable[tuple[str, ...]],
    clusters: Iterable[tuple[str, ...]],
) -> str:
    one_head = (
        *("blocks", "BlockPool", "HostIndex", "known LRU"),
        *("LRU", "with turn bonus", "knowing the future"),
    )
    three_head = ("disk blocks", "LRU list", "everything", "reused", "auto, a disk a day")
    cluster_head = ("blocks of each worker", "route", "alone", "with a pool")
    two_head = ("device + host blocks", "mirror", "exclusive", "turn bonus", "auto", "reused")
    return "\n".join(
        [
            "# Hits of tiers, apart from time",
            "",
            "All of Mooncake's conversation trace (12,031 requests, 288,500 blocks of 512 tokens)",
            "in order; each request is served at once. Repeat with",
            "`python bench/tier_trace.py --trace conversation_trace.jsonl`, which fails if a known",
            "answer is missed.",
            "",
            *(f"- {fact}" for fact in facts()),
            "",
            "One tier. Blocks found by the device's pool, by the host's index and by an LRU list;",
            "then the part of all blocks: LRU, LRU with 60 s for each of up to 4 earlier turns,",
            "and the best that is possible.",
            "",
            *_table(one_head, one),
            "",
            "Device and host memory: part of the blocks found / blocks copied to host memory for",
            "each block of the trace. `exclusive` is hit for hit one LRU list of both sizes,",
            "`mirror` one of the larger size. `turn bonus`, `auto` and `reused` are exclusive with",
            "that order of eviction; `auto` and `reused` are what host memory takes in.",
            "",
            *_table(two_head, two),
            "",
            "A disk behind 1,953 + 9,765 blocks, fed by what host memory gives up: part of the",
            "blocks found by all tiers / blocks written to disk for each block of the trace. The",
            "disk gives up whole segments, so it is not an LRU list, which is beside it. With",
            "`auto` it may write its own size in a day; the trace is an hour in which the reused",
            "blocks alone are more than that, so the budget decides.",
            "",
            *_table(three_head, three),
            "",
            "Eight workers: part of the blocks found at the prompt's worker + fetched from another",
            "one. `by prefix` chooses the worker with most of the prompt, among those that have",
            "served at most so many times the mean.",
            "",
            *_table(cluster_head, clusters),
            "",
        ]
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = (head, ("---:",) * len(head), *rows)
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    sys.exit(main())
