"""The index's tree: what its answers mean, and that both twins give the same ones.

`Model` below is the meaning in its simplest form, sets of names by worker and tier; PureRadixTree
is held to it, and the compiled tree to PureRadixTree, over random lives.
"""

from __future__ import annotations

import random
import struct
from array import array
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve import accel
from pdserve.router.prefix_index.radix_tree import DEVICE, DISK, HOST, REMOTE, PureRadixTree, Tree

if TYPE_CHECKING:
    from collections.abc import Callable

needs_native = pytest.mark.skipif(not accel.NATIVE, reason=accel.REASON)
TWINS = [
    pytest.param(PureRadixTree, id="pure"),
    pytest.param(Tree, id="native", marks=needs_native),
]
CHAIN = [(i * 0x9E3779B97F4A7C15 + 0xABCDEF) % 2**64 for i in range(1, 3001)]
ELSEWHERE = [name ^ 1 for name in CHAIN]
MANY = 10**6


def packed(names: list[int]) -> bytes:
    return struct.pack(f"<{len(names)}Q", *names)


def store(tree: Tree | Model, worker: int, names: list[int], tier: int = DEVICE) -> int:
    return tree.stored(worker, tier, None, packed(names))


class Model:
    """The meaning: who holds which names, and nothing else."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.held: dict[tuple[int, int], set[int]] = {}
        self.dropped = 0
        self.unknown = 0

    def known(self) -> set[int]:
        return set[int]().union(*self.held.values())

    def stored(self, worker: int, tier: int, parent: int | None, names: bytes) -> int:
        mine = self.held.setdefault((worker, tier), set())
        before = len(mine)
        for (name,) in struct.iter_unpack("<Q", names):
            known = self.known()
            if name in known or len(known) < self.max_blocks:
                mine.add(name)
            else:
                self.dropped += 1
        return len(mine) - before

    def removed(self, worker: int, tier: int, names: bytes) -> int:
        mine = self.held.setdefault((worker, tier), set())
        before = len(mine)
        for (name,) in struct.iter_unpack("<Q", names):
            self.unknown += name not in mine
            mine.discard(name)
        return before - len(mine)

    def cleared(self, worker: int, tier: int) -> int:
        return len(self.held.pop((worker, tier), ()))

    def drop(self, worker: int) -> int:
        return sum(self.cleared(worker, tier) for tier in range(4))

    def blocks(self, worker: int) -> int:
        return sum(len(names) for (owner, _), names in self.held.items() if owner == worker)

    def depth(self, worker: int, below: int, names: list[int]) -> int:
        mine = set[int]().union(*(self.held.get((worker, tier), ()) for tier in range(below)))
        return next((i for i, name in enumerate(names) if name not in mine), len(names))

    def match_tiers(self, names: list[int]) -> dict[int, tuple[int, int, int]]:
        workers = {worker for worker, _ in self.held}
        depths = {w: tuple(self.depth(w, below, names) for below in (1, 2, 3)) for w in workers}
        return {w: (a, b, c) for w, (a, b, c) in depths.items() if c > 0}


@pytest.mark.parametrize("make", TWINS)
class TestMeaning:
    def test_depth_is_the_leading_run_a_worker_holds(self, make: type[Tree]) -> None:
        tree = make(MANY)
        assert store(tree, 1, CHAIN[:8]) == 8
        assert store(tree, 2, CHAIN[:3] + ELSEWHERE[3:6]) == 6
        assert store(tree, 3, ELSEWHERE[:4]) == 4
        assert tree.match(packed(CHAIN[:10])) == {1: 8, 2: 3}
        assert tree.match(packed(CHAIN[:3] + ELSEWHERE[3:9])) == {1: 3, 2: 6}
        assert tree.match(packed([5])) == {}
        assert tree.match(b"") == {}
        assert (len(tree), tree.blocks(1), tree.blocks(2), tree.blocks(9)) == (14, 8, 6, 0)

    def test_a_gap_ends_the_run_until_it_is_filled(self, make: type[Tree]) -> None:
        tree = make(MANY)
        store(tree, 1, CHAIN[:9])
        store(tree, 2, CHAIN[:9])
        assert tree.removed(1, DEVICE, packed([CHAIN[4]])) == 1
        assert tree.match(packed(CHAIN[:9])) == {1: 4, 2: 9}
        assert tree.stored(1, DEVICE, CHAIN[3], packed([CHAIN[4]])) == 1
        assert tree.match(packed(CHAIN[:9])) == {1: 9, 2: 9}

    def test_a_gap_right_behind_a_fork_ends_the_run_too(self, make: type[Tree]) -> None:
        tree = make(MANY)
        store(tree, 1, CHAIN[:9])
        store(tree, 2, CHAIN[:4] + ELSEWHERE[:3])
        tree.removed(1, DEVICE, packed([CHAIN[4]]))
        assert tree.match(packed(CHAIN[:9])) == {1: 4, 2: 4}
        assert tree.match_tiers(packed(CHAIN[:9])) == {1: (4, 4, 4), 2: (4, 4, 4)}

    def test_blocks_may_come_before_their_parents(self, make: type[Tree]) -> None:
        tree = make(MANY)
        assert tree.stored(1, DEVICE, CHAIN[4], packed(CHAIN[5:8])) == 3
        assert tree.match(packed(CHAIN[:8])) == {}
        assert store(tree, 1, CHAIN[:5]) == 5
        assert tree.match(packed(CHAIN[:8])) == {1: 8}

    def test_a_wrong_parent_changes_no_answer(self, make: type[Tree]) -> None:
        tree = make(MANY)
        store(tree, 1, CHAIN[:6])
        assert tree.stored(2, DEVICE, CHAIN[1], packed(CHAIN[:6])) == 6
        assert tree.stored(2, DEVICE, CHAIN[2], packed(ELSEWHERE[:2])) == 2
        assert tree.match(packed(CHAIN[:6])) == {1: 6, 2: 6}
        assert tree.match(packed(ELSEWHERE[:2])) == {2: 2}

    def test_saying_it_twice_changes_nothing(self, make: type[Tree]) -> None:
        tree = make(MANY)
        store(tree, 1, CHAIN[:6])
        before = tree.counters
        assert store(tree, 1, CHAIN[:6]) == 0
        assert store(tree, 1, CHAIN[2:4]) == 0
        assert tree.counters == before

    def test_tiers_lengthen_a_run_nearest_first(self, make: type[Tree]) -> None:
        tree = make(MANY)
        store(tree, 1, CHAIN[:2])
        store(tree, 1, CHAIN[1:5], HOST)
        store(tree, 1, CHAIN[5:9], DISK)
        store(tree, 2, CHAIN[:3], DISK)
        store(tree, 3, CHAIN[:3], REMOTE)
        store(tree, 4, CHAIN[1:3])
        store(tree, 4, CHAIN[:1], HOST)
        asked = packed(CHAIN[:12])
        assert tree.match(asked) == {1: 2}
        assert tree.match_tiers(asked) == {1: (2, 5, 9), 2: (0, 0, 3), 4: (0, 3, 3)}
        assert tree.blocks(1) == 10
        assert tree.cleared(1, HOST) == 4
        assert tree.match_tiers(asked)[1] == (2, 2, 2)

    def test_many_that_keep_what_one_lets_go_are_kept_in_bits(self, make: type[Tree]) -> None:
        tree = make(2000)
        store(tree, 0, CHAIN[:900])
        for worker in range(1, 500):
            store(tree, worker, CHAIN[:400])
        before = tree.counters.bytes
        tree.removed(0, DEVICE, packed(CHAIN[400:900][::-1]))
        saved = 499 * 6 + 500 * 8  # a part for each worker, and the names; the bits cost little
        assert tree.counters.bytes < before - saved + 200
        assert tree.match(packed(CHAIN[:900])) == dict.fromkeys(range(500), 400)

    def test_one_worker_keeps_its_chain_together_over_two_tiers(self, make: type[Tree]) -> None:
        tree = make(MANY)
        for i in range(40):  # written through, block by block
            tree.stored(1, DEVICE, CHAIN[i - 1] if i else None, packed([CHAIN[i]]))
            tree.stored(1, HOST, CHAIN[i - 1] if i else None, packed([CHAIN[i]]))
        assert tree.match_tiers(packed(CHAIN[:41])) == {1: (40, 40, 40)}
        assert tree.counters.nodes == (40 if make is PureRadixTree else 1)

    def test_what_is_beyond_the_bound_is_counted_not_kept(self, make: type[Tree]) -> None:
        tree = make(5)
        assert store(tree, 1, CHAIN[:8]) == 5
        assert tree.counters.dropped_full == 3
        assert store(tree, 2, CHAIN[:4]) == 4  # what is known costs no new block
        assert store(tree, 2, ELSEWHERE[:4]) == 0
        assert (len(tree), tree.counters.dropped_full) == (5, 7)
        tree.removed(1, DEVICE, packed([CHAIN[4]]))
        assert store(tree, 2, ELSEWHERE[:2]) == 1
        assert tree.match(packed(ELSEWHERE[:2])) == {2: 1}

    def test_removing_what_is_not_held_is_counted(self, make: type[Tree]) -> None:
        tree = make(MANY)
        store(tree, 1, CHAIN[:3])
        assert tree.removed(2, DEVICE, packed(CHAIN[:3])) == 0
        assert tree.removed(1, HOST, packed(CHAIN[:3])) == 0
        assert tree.removed(1, DEVICE, packed([CHAIN[2], CHAIN[2], 77])) == 1
        assert tree.counters.unknown_removed == 8
        assert tree.match(packed(CHAIN[:3])) == {1: 2}

    def test_of_a_run_that_others_hold_only_the_own_part_is_removed(self, make: type[Tree]) -> None:
        tree = make(MANY)
        store(tree, 1, CHAIN)
        store(tree, 2, CHAIN[:4])
        last = len(CHAIN)
        assert tree.removed(2, DEVICE, packed(CHAIN[2:])) == 2
        assert tree.counters.unknown_removed == last - 4
        # Neighbours, one that is held, and what nobody has.
        assert tree.removed(2, DEVICE, packed([*CHAIN[3:], 77, CHAIN[1], *CHAIN[3:]])) == 1
        assert tree.counters.unknown_removed == last - 4 + 2 * (last - 3) + 1
        assert tree.match(packed(CHAIN)) == {1: last, 2: 1}

    def test_a_worker_that_goes_takes_only_its_own(self, make: type[Tree]) -> None:
        tree = make(MANY)
        store(tree, 1, CHAIN[:6])
        store(tree, 1, CHAIN[:2], DISK)
        store(tree, 2, CHAIN[:4])
        assert tree.drop(1) == 8
        assert tree.drop(1) == 0
        assert tree.match(packed(CHAIN[:6])) == {2: 4}
        assert len(tree) == 4
        assert tree.drop(2) == 4
        assert tree.counters[:3] == (0, 0, 0)  # nodes, worker blocks, bytes

    def test_many_workers_that_hold_different_lengths(self, make: type[Tree]) -> None:
        tree = make(MANY)
        lengths = {worker * 7: 2400 + worker % 600 for worker in range(300)}
        for worker, length in lengths.items():
            store(tree, worker, CHAIN[:length])
        assert tree.match(packed(CHAIN)) == lengths
        assert tree.match(packed(CHAIN[:2000])) == dict.fromkeys(lengths, 2000)
        for worker, length in lengths.items():  # evicted from the end, as pools do
            tree.removed(worker, DEVICE, packed(CHAIN[length - 1 : worker : -1]))
        assert tree.match(packed(CHAIN)) == {worker: worker + 1 for worker in lengths}
        assert len(tree) == 299 * 7 + 1

    def test_depths_by_slot_are_the_same(self, make: type[Tree]) -> None:
        tree = make(MANY)
        store(tree, 0, CHAIN[:3])
        store(tree, 4, CHAIN[:5])
        depths = array("I", [9] * 6)
        assert tree.match_into(packed(CHAIN[:9]), depths) == 2
        assert depths.tolist() == [3, 0, 0, 0, 5, 0]
        with pytest.raises(ValueError, match="shorter"):
            tree.match_into(packed(CHAIN[:9]), array("I", [9] * 4))
        with pytest.raises(ValueError, match="u32"):
            tree.match_into(packed(CHAIN[:9]), array("Q", [9] * 6))

    def test_depths_by_what_is_shown_for_a_slot(self, make: type[Tree]) -> None:
        tree = make(MANY)
        for worker, length in enumerate([3, 5, 4, 7, 2]):
            store(tree, worker, CHAIN[:length])
        shown = {0: "a", 1: "b", 2: "b", 4: "a", 9: "c"}
        assert tree.match_as(packed(CHAIN[:9]), shown) == {"a": 3, "b": 5}
        assert tree.match_as(packed(CHAIN[:9]), {}) == {}
        with pytest.raises(TypeError):
            tree.match_as(packed(CHAIN[:9]), {i: [i] for i in range(5)})  # no key of a dict

    def test_what_cannot_be_read_is_refused(self, make: type[Tree]) -> None:
        tree = make(MANY)
        calls: list[Callable[[], object]] = [
            lambda: tree.stored(1, DEVICE, None, bytes(9)),
            lambda: tree.removed(1, DEVICE, bytes(7)),
            lambda: tree.match(bytes(1)),
            lambda: tree.match_tiers(bytes(12)),
            lambda: tree.match_into(bytes(12), array("I", [0])),
            lambda: tree.match_as(bytes(12), {}),
            lambda: tree.stored(-1, DEVICE, None, b""),
            lambda: tree.stored(65536, DEVICE, None, b""),
            lambda: tree.stored(1, 4, None, b""),
            lambda: tree.stored(1, DEVICE, -1, b""),
            lambda: tree.stored(1, DEVICE, 2**64, b""),
            lambda: tree.removed(1, -1, b""),
            lambda: tree.cleared(65536, DEVICE),
            lambda: tree.cleared(1, 4),
            lambda: tree.drop(-1),
            lambda: tree.blocks(65536),
            lambda: make(0),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="must"):
                call()
        assert tree.counters[:2] == (0, 0)

    def test_blocks_that_come_and_go_leave_nothing(self, make: Callable[[int], Tree]) -> None:
        """Many short runs begin and end beside one that stays."""
        for count in range(80):
            tree = make(MANY)
            store(tree, 1, CHAIN[:1])
            for name in ELSEWHERE[:count]:
                store(tree, 1, [name])
                assert tree.removed(1, DEVICE, packed([name])) == 1
            store(tree, 1, ELSEWHERE[500:501])
            assert tree.drop(1) == 2
            assert len(tree) == 0


# ------------------------------------------------------------- random lives

if TYPE_CHECKING:
    Step = Callable[[Tree | Model], int]


@st.composite
def forests(draw: st.DrawFn) -> list[list[int]]:
    """Chains that share beginnings, as prompts do."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    chains: list[list[int]] = []
    for _ in range(draw(st.integers(1, 5))):
        base = rng.choice(chains)[: rng.randint(0, 12)] if chains else []
        chains.append(base + [rng.getrandbits(64) for _ in range(rng.randint(1, 24))])
    return chains


def stored_step(draw: st.DrawFn, chains: list[list[int]], worker: int, tier: int) -> Step:
    chain = draw(st.sampled_from(chains))
    start, stop = sorted(draw(st.lists(st.integers(0, len(chain)), min_size=2, max_size=2)))
    told = chain[start - 1] if start else None
    parent = draw(st.sampled_from([told, told, None, draw(st.sampled_from(chains))[0]]))
    names = packed(chain[start:stop])
    return lambda tree: tree.stored(worker, tier, parent, names)


def removed_step(draw: st.DrawFn, chains: list[list[int]], worker: int, tier: int) -> Step:
    chain = draw(st.sampled_from(chains))
    start = draw(st.integers(0, len(chain) - 1))
    few = draw(st.lists(st.sampled_from(chain), max_size=5))
    names = packed(draw(st.sampled_from([chain[start:][::-1], chain[start : start + 3], few])))
    return lambda tree: tree.removed(worker, tier, names)


@st.composite
def steps(draw: st.DrawFn, chains: list[list[int]]) -> Step:
    worker = draw(st.sampled_from([0, 1, 2, 3, 63, 64, 700]))
    tier = draw(st.sampled_from([DEVICE, DEVICE, DEVICE, HOST, DISK, REMOTE]))
    kind = draw(st.integers(0, 19))
    if kind < 10:
        return stored_step(draw, chains, worker, tier)
    if kind < 18:
        return removed_step(draw, chains, worker, tier)
    if kind == 18:
        return lambda tree: tree.cleared(worker, tier)
    return lambda tree: tree.drop(worker)


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, list[list[int]], list[Step]]:
    chains = draw(forests())
    bound = draw(st.sampled_from([MANY, MANY, 9]))
    fewest = draw(st.sampled_from([0, 10, 30]))
    return bound, chains, draw(st.lists(steps(chains), min_size=fewest, max_size=40))


def numbers(tree: Tree) -> tuple[int, ...]:
    """The counters that do not depend on how it is kept."""
    counters = tree.counters
    held, full, unknown = counters[1], counters.dropped_full, counters.unknown_removed
    return (len(tree), held, full, unknown, *(tree.blocks(worker) for worker in range(65)))


@pytest.mark.timeout(600)
@given(lives())
def test_the_pure_tree_is_the_model(life: tuple[int, list[list[int]], list[Step]]) -> None:
    bound, chains, told = life
    tree, model = PureRadixTree(bound), Model(bound)
    for step in told:
        assert step(tree) == step(model)
        for chain in chains:
            found = model.match_tiers(chain)
            assert tree.match_tiers(packed(chain)) == found
            assert tree.match(packed(chain)) == {w: at for w, (at, _, _) in found.items() if at}
    counters = tree.counters
    assert len(tree) == len(model.known()) <= bound
    assert counters.worker_blocks == sum(map(len, model.held.values()))
    assert (counters.dropped_full, counters.unknown_removed) == (model.dropped, model.unknown)


@needs_native
@pytest.mark.timeout(600)
@given(lives())
def test_the_twins_agree(life: tuple[int, list[list[int]], list[Step]]) -> None:
    bound, chains, told = life
    tree, pure = Tree(bound), PureRadixTree(bound)
    for step in told:
        assert step(tree) == step(pure)
        assert numbers(tree) == numbers(pure)
        for chain in chains:
            assert [*tree.match(packed(chain)).items()] == [*pure.match(packed(chain)).items()]
            assert tree.match_tiers(packed(chain)) == pure.match_tiers(packed(chain))
    for worker in (0, 1, 2, 3, 63, 64, 700):
        assert tree.drop(worker) == pure.drop(worker)
    assert tree.counters[:3] == (0, 0, 0)


@needs_native
def test_the_twins_agree_at_scale(seed: int) -> None:
    """Long chains and many workers: runs that are full, sets that become bits and lists again."""
    rng = random.Random(seed)
    tree, pure = Tree(20_000), PureRadixTree(20_000)
    chains = [CHAIN, CHAIN[:1500] + ELSEWHERE[:900], CHAIN[:1500] + ELSEWHERE[1000:2800]]
    slots = rng.sample(range(2000), 150)
    for _ in range(600):
        worker, chain = rng.choice(slots), rng.choice(chains)
        at = rng.randrange(len(chain))
        if rng.random() < 0.6:
            told = (worker, DEVICE, None, packed(chain[:at]))
            assert tree.stored(*told) == pure.stored(*told)
        else:
            names = packed(chain[at : rng.randrange(at, len(chain)) + 1][:: rng.choice([1, -1])])
            assert tree.removed(worker, DEVICE, names) == pure.removed(worker, DEVICE, names)
        assert len(tree) == len(pure)
    for chain in chains:
        assert tree.match(packed(chain)) == pure.match(packed(chain))
    assert [tree.drop(worker) for worker in slots] == [pure.drop(worker) for worker in slots]
    assert tree.counters[:3] == (0, 0, 0)
