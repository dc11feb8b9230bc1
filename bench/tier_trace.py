"""The tiers' placement and eviction against known answers: hits over Mooncake's conversation trace.

    python bench/tier_trace.py --trace FILE [--write bench/results/tier_trace.md]

Requests are atomic: each is served at once, in the order of the file, from the look-up to the
release of its blocks, so that only decisions count. They go through the `BlockPool` and the
`HostIndex` of a worker; a prompt's last block counts as a full one, as in the published rates.
`AtomicTiers` is one worker; other measurements use it to compare real time with atomic requests.
"""

from __future__ import annotations

import argparse
import heapq
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import facts
from pdserve.kv.block_pool import BlockPool
from pdserve.kv.tiers.admission import HostAdmission
from pdserve.kv.tiers.block import TierBlock
from pdserve.kv.tiers.eviction import EvictionOrder
from pdserve.kv.tiers.host_index import HostIndex
from pdserve.kv.tiers.turns import TurnTracker
from pdserve.sim.workloads.mooncake import BLOCK, MooncakeTrace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "LRU_HITS",
    "TURN_RATES",
    "AtomicTiers",
    "Prompt",
    "belady_hits",
    "read",
    "replay",
    "with_turns",
]

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

PLAIN: Final = EvictionOrder(turn_bonus=0.0)

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

Placement = Literal["exclusive", "mirror"]
"""Host memory has what left the device, or a copy of everything that is stored on the device."""


class Prompt(NamedTuple):
    """A request: when it came, its blocks, and the turn that its conversation is at."""

    at: float
    names: tuple[bytes, ...]
    turns: int = 1


class AtomicTiers:
    """Device and host memory of one worker, for requests that take no time."""

    def __init__(
        self,
        device: int,
        host: int,
        *,
        order: EvictionOrder = PLAIN,
        placement: Placement = "exclusive",
        admission: HostAdmission | None = None,
    ) -> None:
        """Sizes are in blocks; 0: no such tier. Without `admission`, host memory takes all. It
        concerns exclusive placement alone."""
        self.pool = BlockPool(device, BLOCK) if device else None
        self.host = HostIndex(host, order=order) if host else None
        self.written = 0
        """Blocks that were copied to host memory."""
        self._placement = placement
        self._admission = admission
        self._turns: dict[bytes, int] = {}
        self._uses: Counter[bytes] = Counter()

    def found(self, names: Sequence[bytes]) -> int:
        """Number of leading blocks that some tier has."""
        device = len(self.pool.match(names)) if self.pool is not None else 0
        return device + self._host_run(names[device:])

    def serve(self, prompt: Prompt) -> int:
        """Serves a request; returns the number of its leading blocks that were found."""
        hits = self.found(prompt.names)
        if self._fits(prompt):
            for name in prompt.names:
                self._uses[name] += 1
                self._turns[name] = max(prompt.turns, self._turns.get(name, 1))
            if self.pool is not None:
                self._use_device(self.pool, prompt, hits)
            if self.host is not None and (self.pool is None or self._placement == "mirror"):
                self._use_host(self.host, prompt)
        if self.host is not None:
            self.host.drain_events()
        return hits

    def check(self) -> None:
        """Raises AssertionError unless both tiers are sound."""
        if self.pool is not None:
            self.pool.check()
        if self.host is not None:
            self.host.check()
            assert self.host.counts().claimed == self.host.counts().filling == 0

    def _fits(self, prompt: Prompt) -> bool:
        """A prompt that is longer than the tier that computes it is not cached."""
        room = (
            self.pool.num_blocks
            if self.pool
            else self.host.capacity
            if self.host is not None
            else 0
        )
        return len(prompt.names) <= room

    def _host_run(self, names: Iterable[bytes]) -> int:
        count = 0
        for name in names:
            if self.host is None or name not in self.host:
                break
            count += 1
        return count

    def _use_device(self, pool: BlockPool, prompt: Prompt, hits: int) -> None:
        """Brings host blocks up and what has to leave down, computes the rest, releases all."""
        names = prompt.names
        shared = pool.match(names)
        pool.acquire(shared)
        if self._placement == "exclusive":
            self._take_up(names[len(shared) :])
        missing = len(names) - len(shared)
        leaving = pool.oldest(max(0, missing - pool.counts().free))
        if self._placement == "exclusive":
            for block, name in leaving:
                self._put_down(TierBlock(name, pool.parent(block), self._turns[name]), prompt.at)
        fresh = pool.reserve(missing)
        assert fresh is not None
        parent = names[len(shared) - 1] if shared else b""
        blocks = shared + pool.commit_run(fresh, names[len(shared) :], parent)
        pool.release(blocks)
        pool.drain_events()
        for _, name in leaving:
            # A block that is computed again is a new one: its uses count from there.
            del self._uses[name]

    def _take_up(self, names: Iterable[bytes]) -> None:
        """The device gets these blocks, from host memory or by computing them."""
        if self.host is not None:
            for name in names:
                self.host.drop(name)

    def _put_down(self, block: TierBlock, at: float) -> None:
        """A block leaves the device."""
        host, admission = self.host, self._admission
        if host is None:
            return
        if admission and not admission.admits(block, at, reused=self._uses[block.hash] > 1):
            return
        self._store(host, block, at)

    def _use_host(self, host: HostIndex, prompt: Prompt) -> None:
        """Host memory stores the whole prompt, the tail first."""
        present = [frame for name in prompt.names if (frame := host.frame(name)) is not None]
        for frame in present:
            host.claim(frame)
        for index in range(len(prompt.names) - 1, -1, -1):
            name = prompt.names[index]
            if name in host:
                host.touch(name, prompt.at, prompt.turns)
            else:
                parent = prompt.names[index - 1] if index else b""
                self._store(host, TierBlock(name, parent, prompt.turns), prompt.at)
        for frame in present:
            host.release(frame)

    def _store(self, host: HostIndex, block: TierBlock, at: float) -> None:
        if not host.free:
            for name in host.victims(1, at):
                if self._admission:
                    self._admission.evicted(name, host.age(name, at), at)
                host.evict(name)
        frame = host.reserve()
        if frame is not None:
            self.written += host.commit(frame, block, at)


def replay(prompts: Iterable[Prompt], tiers: AtomicTiers) -> list[int]:
    """Serves all requests; returns the hits of each, in blocks."""
    hits = [tiers.serve(prompt) for prompt in prompts]
    tiers.check()
    return hits


def with_turns(requests: Iterable[tuple[float, Sequence[int]]]) -> Iterator[Prompt]:
    """Prompts of these times and block ids. An id stands for its block and all blocks before it.

    The last id is a block that is not full, which the next turn of a conversation does not repeat.
    """
    tracker = TurnTracker()
    for at, contents in requests:
        names = tuple(content.to_bytes(16, "little") for content in contents)
        yield Prompt(at, names, tracker.turn(names[:-1]))


def read(path: Path) -> list[Prompt]:
    """The requests of a trace, with their turns."""
    trace = MooncakeTrace(path)
    return list(with_turns((one.at, [name for name, _ in one.pieces]) for one in trace))


def belady_hits(prompts: Sequence[Prompt], blocks: int) -> int:
    """Hits of a cache that knows the future: it keeps the blocks that are used again first, and
    need not store a block at all. No cache of as many blocks has more."""
    uses = [name for prompt in prompts for name in prompt.names]
    upcoming = _next_uses(uses)
    cached: dict[bytes, int] = {}
    latest: list[tuple[int, bytes]] = []
    hits = 0
    for now, name in enumerate(uses):
        hits += name in cached
        cached[name] = upcoming[now]
        heapq.heappush(latest, (-upcoming[now], name))
        while len(cached) > blocks:
            negated, victim = heapq.heappop(latest)
            if cached.get(victim) == -negated:
                del cached[victim]
    return hits


def _next_uses(uses: Sequence[bytes]) -> list[int]:
    """For each use, the number of the next one of the same name; past the end if there is none."""
    following: dict[bytes, int] = {}
    upcoming = [0] * len(uses)
    for now in range(len(uses) - 1, -1, -1):
        upcoming[now] = following.get(uses[now], len(uses) + now)
        following[uses[now]] = now
    return upcoming


# ---------------------------------------------------------------- the page


def main() -> int:
    """Writes both tables; the exit status is 1 if a known answer is missed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    prompts = read(options.trace)
    wrong: list[str] = []
    text = _page([_one_tier(prompts, blocks, wrong) for blocks in LRU_HITS], _pairs(prompts, wrong))
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


def _page(one: Iterable[tuple[str, ...]], two: Iterable[tuple[str, ...]]) -> str:
    one_head = (
        *("blocks", "BlockPool", "HostIndex", "known LRU"),
        *("LRU", "with turn bonus", "knowing the future"),
    )
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
        ]
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = (head, ("---:",) * len(head), *rows)
    return [f"| {' | '.join(line)} |" for line in lines]


if __name__ == "__main__":
    sys.exit(main())
