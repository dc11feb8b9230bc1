"""Requests whose blocks come from lower tiers, in vLLM's order of calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pdserve.engine_core.tiers.onboarder import FetchPlan
from pdserve.kv.tiers.lower_tiers import FetchDone
from pdserve.messages.engine import EngineStats
from pdserve.messages.tiers import CachedSource, KvSource, PlanStats
from pdserve_engines.vllm.kv_tiers.prefix_loads import PATIENCE, LoadDone, PrefixLoads

SIZE = 4
CHAIN = [bytes([number]) * 16 for number in range(6)]


class Lower:
    """`LowerTiers` that has some blocks, and notes the fetches."""

    def __init__(self, *there: bytes) -> None:
        self.there = set(there)
        self.fetches: list[tuple[Any, ...]] = []
        self.cancelled: list[int] = []

    def run(self, hashes: Any, start: int = 0) -> list[str]:
        found = []
        for each in hashes[start:]:
            if each not in self.there:
                break
            found.append("host")
        return found

    def fetch(self, *arguments: Any) -> None:
        self.fetches.append(arguments)

    def cancel(self, number: int, now: float) -> None:
        self.cancelled.append(number)


class Planner:
    most = 100

    def choose(
        self, device: int, local: Any, peers: Any, blocks: int, wait: float, *, early: bool = False
    ) -> Any:
        count = min(self.most, len(local))
        return FetchPlan(local=count, deadline=0.5) if count else None


def made(*there: bytes) -> tuple[PrefixLoads, Lower]:
    lower = Lower(*there)
    loads = PrefixLoads(lower, Planner(), SIZE)  # type: ignore[arg-type]
    loads.begin("a", CHAIN[:4], b"root")
    return loads, lower


def test_a_load_goes_on_behind_what_vllm_has() -> None:
    loads, lower = made(*CHAIN)
    assert loads.matched("a", SIZE, 17) == 3 * SIZE
    loads.allocated("a", 3 * SIZE, [10, 11, 12, 13, 14], 7.0)
    assert lower.fetches == [
        (1, CHAIN[1:4], CHAIN[0], [11, 12, 13], 7.0, 7.0 + PATIENCE),
    ]
    assert len(loads) == 1
    assert loads.loading("a")
    done = loads.fetched(FetchDone(1, 3, ("host", "disk", "host")), 8.0)
    sources = (CachedSource("host", 2 * SIZE), CachedSource("disk", SIZE))
    assert done == LoadDone("a", SIZE, 3 * SIZE, whole=True, sources=sources)
    assert loads.cached("a") == 4
    assert len(loads) == 0
    assert not loads.loading("a")


def test_the_block_with_the_last_token_is_computed() -> None:
    loads, _ = made(*CHAIN)
    assert loads.matched("a", 0, 16) == 3 * SIZE
    assert loads.matched("a", 3 * SIZE, 16) == 0


def test_the_planner_may_rather_compute() -> None:
    loads, lower = made(*CHAIN)
    loads.planner.most = 0  # type: ignore[attr-defined]
    assert loads.matched("a", 0, 17) == 0
    loads.allocated("a", 0, [10, 11, 12, 13, 14], 7.0)
    assert lower.fetches == []


def test_a_load_that_comes_short_is_the_last_one() -> None:
    """Or a block that is always late would keep the request for ever."""
    loads, _ = made(*CHAIN)
    assert loads.matched("a", 0, 17) == 4 * SIZE
    loads.allocated("a", 4 * SIZE, [10, 11, 12, 13, 14], 7.0)
    done = loads.fetched(FetchDone(1, 1, ("host",), "deadline"), 8.0)
    assert done is not None
    assert (done.loaded, done.whole) == (SIZE, False)
    assert loads.cached("a") == 1
    assert loads.matched("a", 0, 17) == 0


def test_a_second_request_waits_for_the_same_block() -> None:
    loads, _ = made(*CHAIN)
    loads.begin("b", [*CHAIN[:2], CHAIN[5]], b"root")
    assert loads.matched("a", 0, 17) == 4 * SIZE
    assert loads.matched("b", 0, 13) == 3 * SIZE
    loads.allocated("a", 4 * SIZE, [10, 11, 12, 13, 14], 7.0)
    assert loads.matched("b", 0, 13) is None
    assert loads.matched("b", 2 * SIZE, 13) == SIZE, "another block is missing by now"
    loads.fetched(FetchDone(1, 4, ("host",) * 4), 8.0)
    assert loads.matched("b", 0, 13) == 3 * SIZE


def test_a_request_that_ends_cancels_its_load() -> None:
    loads, lower = made(*CHAIN)
    loads.matched("a", 0, 17)
    loads.allocated("a", 4 * SIZE, [10, 11, 12, 13, 14], 7.0)
    loads.finished("a", 8.0)
    assert lower.cancelled == [1]
    assert loads.fetched(FetchDone(1, 0, (), "cancelled"), 8.0) is not None
    assert loads.matched("a", 0, 17) == 0
    assert loads.fetched(FetchDone(2, 0, ()), 8.0) is None


def test_void_names_load_nothing() -> None:
    loads, _ = made(*CHAIN)
    loads.forget_names()
    assert loads.matched("a", 0, 17) == 0


PEER = KvSource("w2", 1, 4)


class Pulls:
    """`FramePulls` that notes what is asked for; the test says what comes."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.ends: list[Any] = []
        self.cancelled: list[int] = []
        self.alive = True
        self.room = True
        self.now = 6.0

    def may_pull(self, source: KvSource) -> bool:
        return self.alive

    def coming(self, block_hash: bytes) -> bool:
        return any(block_hash in asked[1] for asked in self.asked[len(self.asked) - 1 :])

    def begin(self, *arguments: Any) -> int:
        if not self.room:
            return 0
        self.asked.append(arguments[:-1])
        self.ends.append(arguments[-1])
        return len(self.asked)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def end(self, lower: Lower, *came: bytes, error: str = "") -> None:
        """The newest pull ends."""
        self.asked[-1] = (None, ())
        lower.there.update(came)
        self.ends.pop()(came, error)


class Fetcher(Planner):
    """Plans what is here, and the rest from the first worker."""

    def choose(
        self, device: int, local: Any, peers: Any, blocks: int, wait: float, *, early: bool = False
    ) -> Any:
        peer = min(peers[0].blocks, blocks) - device - len(local) if peers else 0
        source = peers[0] if peer else None
        return FetchPlan(len(local), peer, source, deadline=0.5)


def fetching(*there: bytes) -> tuple[PrefixLoads, Lower, Pulls]:
    lower, pulls = Lower(*there), Pulls()
    loads = PrefixLoads(lower, Fetcher(), SIZE)  # type: ignore[arg-type]
    loads.pulls = pulls  # type: ignore[assignment]
    loads.begin("a", CHAIN[:4], b"root", (PEER,), b"owner")
    return loads, lower, pulls


def test_what_a_peer_has_is_pulled_before_it_is_loaded() -> None:
    """vLLM asks again until it is there, and is told where it came from."""
    loads, lower, pulls = fetching(CHAIN[1])
    assert loads.matched("a", SIZE, 17) is None
    assert pulls.asked == [(PEER, CHAIN[2:4], 2, CHAIN[1], b"owner", 0.5, [CHAIN[1]])]
    assert loads.matched("a", SIZE, 17) is None
    pulls.end(lower, *CHAIN[2:4])
    assert loads.matched("a", SIZE, 17) == 3 * SIZE
    loads.allocated("a", 3 * SIZE, [10, 11, 12, 13, 14], 7.0)
    done = loads.fetched(FetchDone(1, 3, ("host",) * 3), 8.0)
    assert done is not None
    peer = CachedSource("peer", 2 * SIZE, "w2")
    assert done.sources == (CachedSource("host", SIZE), peer)


def test_a_request_pulls_once() -> None:
    loads, lower, pulls = fetching(CHAIN[0])
    assert loads.matched("a", 0, 17) is None
    pulls.end(lower)
    assert loads.matched("a", 0, 17) == SIZE
    assert len(pulls.asked) == 1


def test_without_room_or_a_living_peer_nothing_is_pulled() -> None:
    for name in ("room", "alive"):
        loads, _, pulls = fetching()
        setattr(pulls, name, False)
        assert loads.matched("a", 0, 17) == 0
        assert pulls.asked == []


def test_a_second_request_waits_for_the_pull_of_the_first() -> None:
    loads, lower, pulls = fetching()
    loads.begin("b", CHAIN[:4], b"root", (PEER,))
    assert loads.matched("a", 0, 17) is None
    assert loads.matched("b", 0, 17) is None
    assert len(pulls.asked) == 1
    pulls.end(lower, *CHAIN[:4])
    assert loads.matched("b", 0, 17) == 4 * SIZE


def test_the_end_of_a_request_ends_its_pull() -> None:
    loads, _, pulls = fetching()
    loads.matched("a", 0, 17)
    loads.finished("a", 7.0)
    assert pulls.cancelled == [1]


# ------------------------------------------------------------------ what is counted


class Priced(Fetcher):
    """Plans that are predicted to take a second, where computing takes three."""

    def choose(
        self, device: int, local: Any, peers: Any, blocks: int, wait: float, *, early: bool = False
    ) -> Any:
        found = super().choose(device, local, peers, blocks, wait)
        last = "peer" if found.peer else "host"
        return replace(found, local=min(self.most, found.local), seconds=1.0, saves=3.0, last=last)


def stats(loads: PrefixLoads) -> EngineStats:
    return loads.counts.add_stats(EngineStats())


def test_a_load_is_compared_with_its_plan() -> None:
    loads, _ = made(*CHAIN)
    loads.planner = Priced()
    loads.matched("a", 0, 17)
    loads.allocated("a", 4 * SIZE, [10, 11, 12, 13, 14], 7.0)
    loads.fetched(FetchDone(1, 3, ("host",) * 3, "deadline"), 9.0)
    plan = PlanStats(source="host", plans=1, predicted=1.0, actual=2.0, gained=0.25)
    assert stats(loads).plans == (plan,)
    assert stats(loads).missed_blocks == {"computed": 0, "deadline": 1}


def test_a_pull_and_its_load_are_one_plan() -> None:
    """It takes from the beginning of the pull to the end of the load."""
    loads, lower, pulls = fetching(CHAIN[0])
    loads.planner = Priced()
    loads.matched("a", 0, 17)
    pulls.end(lower, CHAIN[1], error="corrupt")
    assert loads.matched("a", 0, 17) == 2 * SIZE
    loads.allocated("a", 2 * SIZE, [10, 11, 12, 13, 14], 6.5)
    loads.fetched(FetchDone(1, 2, ("host",) * 2), 7.0)
    plan = PlanStats(source="peer", plans=1, predicted=1.0, actual=1.0, gained=0.5)
    assert stats(loads).plans == (plan,)
    assert stats(loads).missed_blocks == {"computed": 0, "corrupt": 2}


def test_a_pull_in_vain_is_a_lost_plan() -> None:
    loads, lower, pulls = fetching()
    loads.planner = Priced()
    loads.matched("a", 0, 17)
    pulls.end(lower, error="gone")
    loads.planner = Planner()
    assert loads.matched("a", 0, 17) == 0
    loads.allocated("a", 0, [10, 11, 12, 13, 14], 8.0)
    plan = PlanStats(source="peer", plans=1, predicted=1.0, actual=2.0, lost=2.0)
    assert stats(loads).plans == (plan,)
    assert stats(loads).missed_blocks == {"computed": 0, "gone": 4}


def test_blocks_that_are_rather_computed_count_once() -> None:
    """vLLM asks again as long as it has no room for the request."""
    loads, _ = made(*CHAIN)
    loads.planner.most = 1  # type: ignore[attr-defined]
    for _ in range(3):
        loads.matched("a", 0, 17)
    assert stats(loads).missed_blocks == {"computed": 0}
    loads.allocated("a", SIZE, [10, 11, 12, 13, 14], 7.0)
    loads.allocated("a", 0, [10, 11, 12, 13, 14], 8.0)
    assert stats(loads).missed_blocks == {"computed": 3}


def test_blocks_of_a_peer_are_missed_for_some_reason() -> None:
    loads, _, pulls = fetching(CHAIN[0])
    pulls.room = False
    loads.matched("a", 0, 17)
    assert stats(loads).missed_blocks == {"computed": 0, "room": 3}
    loads, _, pulls = fetching(CHAIN[0])
    loads.planner = Planner()
    loads.matched("a", 0, 17)
    assert stats(loads).missed_blocks == {"computed": 3}
    loads, _, pulls = fetching()
    loads.matched("a", 0, 17)
    loads.finished("a", 7.0)
    assert stats(loads).missed_blocks == {"computed": 0, "cancelled": 4}
