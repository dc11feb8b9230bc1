"""Requests whose blocks come from lower tiers, in vLLM's order of calls."""

from __future__ import annotations

from typing import Any

from pdserve.engine_core.tiers.onboarder import FetchPlan
from pdserve.kv.tiers.lower_tiers import FetchDone
from pdserve.messages.tiers import CachedSource, KvSource
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

    def choose(self, device: int, local: Any, peers: Any, blocks: int, wait: float) -> Any:
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
    done = loads.fetched(FetchDone(1, 3, ("host", "disk", "host")))
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
    done = loads.fetched(FetchDone(1, 1, ("host",), "deadline"))
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
    loads.fetched(FetchDone(1, 4, ("host",) * 4))
    assert loads.matched("b", 0, 13) == 3 * SIZE


def test_a_request_that_ends_cancels_its_load() -> None:
    loads, lower = made(*CHAIN)
    loads.matched("a", 0, 17)
    loads.allocated("a", 4 * SIZE, [10, 11, 12, 13, 14], 7.0)
    loads.finished("a", 8.0)
    assert lower.cancelled == [1]
    assert loads.fetched(FetchDone(1, 0, (), "cancelled")) is not None
    assert loads.matched("a", 0, 17) == 0
    assert loads.fetched(FetchDone(2, 0, ())) is None


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

    def end(self, lower: Lower, *came: bytes) -> None:
        """The newest pull ends."""
        self.asked[-1] = (None, ())
        lower.there.update(came)
        self.ends.pop()(came)


class Fetcher(Planner):
    """Plans what is here, and the rest from the first worker."""

    def choose(self, device: int, local: Any, peers: Any, blocks: int, wait: float) -> Any:
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
    done = loads.fetched(FetchDone(1, 3, ("host",) * 3))
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
