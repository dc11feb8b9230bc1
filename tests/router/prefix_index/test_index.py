"""The index against a plain model, and each of its rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import ProtocolError
from pdserve.ids import NodeId
from tests.router.prefix_index.support import Pool, block, index, life, member, names

if TYPE_CHECKING:
    from pdserve.router.prefix_index.index import PrefixIndex

A, B = NodeId("a"), NodeId("b")


# ---------------------------------------------------------------------- events


def test_leading_blocks_count() -> None:
    view = index()
    a, b = Pool(view, "a"), Pool(view, "b")
    a.stored(1, 2, 3)
    b.stored(1)
    b.stored(3)
    assert view.find(0.0, names(1, 2, 3, 4)).overlaps == {A: 3, B: 1}
    assert view.find(0.0, names(2, 3)).overlaps == {A: 2}
    assert view.find(0.0, names(9)).overlaps == {}
    assert view.find(0.0, b"").overlaps == {}
    assert (view.known_blocks(A), view.known_blocks(B)) == (3, 2)
    view.check()


def test_removed_and_cleared_do_not_count() -> None:
    view = index()
    a = Pool(view, "a")
    a.stored(1, 2, 3)
    a.removed(3)
    assert view.find(0.0, names(1, 2, 3)).overlaps == {A: 2}
    a.cleared()
    assert view.find(0.0, names(1, 2, 3)).overlaps == {}
    assert view.known_blocks(A) == 0


def test_lower_tiers_lengthen_a_run() -> None:
    view = index()
    a, b = Pool(view, "a"), Pool(view, "b")
    a.stored(1)
    b.stored(1, 2)
    assert view.find(0.0, names(1, 2, 3)).lower == {}
    a.stored(2, tier="host", parent=block(1))
    a.stored(3, tier="disk", parent=block(2))
    found = view.find(0.0, names(1, 2, 3))
    assert found.overlaps == {A: 1, B: 2}
    assert found.lower == {A: (2, 3)}
    assert view.find(0.0, names(1)).lower == {}


def test_a_snapshot_replaces_all_at_once() -> None:
    view = index()
    a = Pool(view, "a")
    a.stored(1, 2)
    other = Pool(index(), "a")
    other.stored(1, 5)
    a.feed.reset()
    for piece in other.log.snapshot():
        a.feed.load(piece)
    assert view.find(0.0, names(1, 2)).overlaps == {A: 2}, "not before it is complete"
    assert view.find(0.0, names(1, 5)).overlaps == {A: 1}
    view.check()
    a.feed.commit()
    assert view.find(0.0, names(1, 2)).overlaps == {A: 1}
    assert view.find(0.0, names(1, 5)).overlaps == {A: 2}
    assert a.feed.digest() == other.log.digest()
    view.check()


def test_a_snapshot_may_begin_again() -> None:
    view = index()
    a = Pool(view, "a")
    a.stored(1, 2)
    a.feed.reset()
    a.feed.load(next(a.log.snapshot()))
    a.snapshot()
    assert view.known_blocks(A) == 2
    view.check()


# ---------------------------------------------------------------------- lives


def test_a_life_that_ends_takes_everything_along() -> None:
    view = index(remember=True)
    a = Pool(view, "a")
    a.stored(1, 2)
    view.placed(0.0, a.life, names(1, 2, 3))
    view.worker_gone(a.life)
    assert view.find(0.0, names(1, 2, 3)).overlaps == {}
    assert view.routed(0.0, names(1, 2, 3)) == {}
    assert view.counters["worker_blocks"] == view.counters["routed_blocks"] == 0
    view.check()


def test_what_a_dead_life_still_says_counts_for_nobody() -> None:
    view = index()
    old = Pool(view, "a", 1)
    old.stored(1, 2)
    view.worker_gone(old.life)
    old.stored(3)
    old.snapshot()
    new = Pool(view, "a", 2)
    new.stored(1)
    old.stored(2)
    view.placed(0.0, old.life, names(7))
    view.worker_gone(old.life)
    assert view.find(0.0, names(1, 2, 3)).overlaps == {A: 1}
    assert view.find(0.0, names(7)).overlaps == {}
    view.check()


def test_a_later_life_ends_the_one_before() -> None:
    view = index()
    Pool(view, "a", 1).stored(1)
    view.worker_up(life("a", 2))
    assert view.find(0.0, names(1)).overlaps == {}
    late = Pool(view, "a", 1)  # somebody who has not heard of it
    late.stored(1)
    assert view.find(0.0, names(1)).overlaps == {}
    view.check()


def test_a_topic_that_is_withdrawn_is_empty() -> None:
    view = index()
    a = Pool(view, "a")
    a.stored(1)
    a.feed.reset()
    a.feed.commit()
    assert view.find(0.0, names(1)).overlaps == {}
    assert Pool(view, "a").feed is not a.feed
    view.check()


# ---------------------------------------------------------------------- predictions


def test_a_choice_counts_at_once_and_for_seconds() -> None:
    view = index(predict_ttl=4.0)
    a = Pool(view, "a")
    view.placed(10.0, a.life, names(1, 2, 3))
    assert view.find(10.0, names(1, 2, 9)).overlaps == {A: 2}
    assert view.find(11.9, names(1, 2, 9)).overlaps == {A: 2}
    assert view.find(14.0, names(1, 2, 9)).overlaps == {}
    view.check()


def test_events_outlast_a_prediction() -> None:
    view = index(predict_ttl=4.0)
    a = Pool(view, "a")
    view.placed(0.0, a.life, names(1, 2))
    a.stored(1, 2)
    assert view.find(100.0, names(1, 2)).overlaps == {A: 2}
    view.sweep(100.0)
    assert view.counters["worker_blocks"] == 2
    view.check()


def test_a_removal_ends_a_prediction() -> None:
    view = index()
    a = Pool(view, "a")
    view.placed(0.0, a.life, names(1, 2))
    a.stored(1, 2)
    a.removed(2)
    assert view.find(0.0, names(1, 2)).overlaps == {A: 1}
    a.cleared()
    assert view.find(0.0, names(1, 2)).overlaps == {}
    view.check()


# ---------------------------------------------------------------------- without events


def test_without_events_what_was_sent_counts() -> None:
    view = index(approximate_ttl=120.0)
    view.worker_up(life("a"), events=False)
    view.worker_up(life("b"), events=True)
    assert view.approximate == {A}
    for node in "ab":
        view.placed(0.0, life(node), names(1, 2))
    assert view.find(60.0, names(1, 2, 3)).overlaps == {A: 2}
    assert view.find(120.0, names(1, 2, 3)).overlaps == {}
    view.worker_up(life("a"), events=True)
    assert view.approximate == set()
    view.check()


def test_policies_may_ask_what_was_sent() -> None:
    view = index(remember=True)
    a = Pool(view, "a")
    view.placed(0.0, a.life, names(1, 2))
    assert view.routed(60.0, names(1, 2, 3)) == {A: 2}
    assert view.find(60.0, names(1, 2, 3)).overlaps == {}
    assert view.routed_blocks() == {A: 2}
    assert index().routed(0.0, names(1)) == {}


# ---------------------------------------------------------------------- secrets


def test_names_of_another_secret_overlap_nowhere() -> None:
    view = index()
    a, b = Pool(view, "a"), Pool(view, "b")
    view.worker_up(a.life, names_id=b"ours")
    view.worker_up(b.life, names_id=b"theirs")
    a.stored(1)
    b.stored(1)
    assert view.find(0.0, names(1), b"ours").overlaps == {A: 1}
    assert view.mismatched == 1
    view.placed(0.0, b.life, names(5), b"ours")
    assert view.find(0.0, names(5)).overlaps == {}
    view.worker_up(b.life, names_id=b"ours")
    assert view.find(0.0, names(1), b"ours").overlaps == {A: 1, B: 1}
    assert view.mismatched == 1
    view.check()


# ---------------------------------------------------------------------- bounds


def test_what_a_full_index_refused_is_asked_for_when_there_is_room() -> None:
    view = index(index_max_blocks=4)
    a, b = Pool(view, "a"), Pool(view, "b")
    a.stored(1, 2, 3)
    b.stored(11, 12)
    assert view.full
    assert view.counters["refused_blocks"] == 1
    assert b.feed.digest() == b.log.digest(), "asking would not help"
    assert view.find(0.0, names(11, 12)).overlaps == {B: 1}
    a.cleared()
    assert b.feed.digest() != b.log.digest()
    b.snapshot()
    assert b.feed.digest() == b.log.digest()
    assert view.find(0.0, names(11, 12)).overlaps == {B: 2}
    assert not view.full
    view.check()


def test_what_was_refused_and_is_removed_is_not_missed() -> None:
    view = index(index_max_blocks=2)
    a = Pool(view, "a")
    a.stored(1, 2, 3)
    a.removed(3)
    assert not view.full
    assert a.feed.digest() == a.log.digest()


def test_counters_only_grow() -> None:
    view = index()
    a = Pool(view, "a")
    a.stored(1, 2)
    a.removed(2)
    before = view.counters
    view.worker_gone(a.life)
    after = view.counters
    for name in ("events", "blocks_stored", "blocks_removed"):
        assert after[name] == before[name] > 0


def test_nonsense_raises() -> None:
    feed = index().target(member("a"))
    with pytest.raises(ProtocolError):
        feed.apply(b"\xc1")


# ---------------------------------------------------------------------- a plain model


@dataclass
class Model:
    """Sets, and a list of what was sent."""

    held: dict[str, set[int]] = field(default_factory=dict)
    sent: list[tuple[float, str, list[int]]] = field(default_factory=list)

    def bounds(self, node: str, prompt: list[int], now: float, ttl: float) -> tuple[int, int]:
        """The least and the most that may be found: an old half of predictions may be gone, and
        those of one time are kept together."""
        held = _run(prompt, self.held[node])
        sent = [(at, set(chain)) for at, where, chain in self.sent if where == node]
        recent = (_run(prompt, chain) for at, chain in sent if now - at < ttl / 2)
        possible = set[int]().union(*(chain for at, chain in sent if now - at < ttl))
        return max(held, *recent, 0), max(held, _run(prompt, possible))


def _run(prompt: list[int], held: set[int]) -> int:
    return next((i for i, name in enumerate(prompt) if name not in held), len(prompt))


nodes = st.sampled_from(["a", "b", "c"])
chains = st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True)
steps = st.one_of(
    st.tuples(st.just("store"), nodes, chains),
    st.tuples(st.just("remove"), nodes, chains),
    st.tuples(st.just("place"), nodes, chains),
    st.tuples(st.sampled_from(["clear", "restart", "snapshot"]), nodes, chains),
    st.tuples(st.just("wait"), nodes, chains),
)


@settings(max_examples=200)
@given(st.lists(steps, max_size=25), chains)
def test_it_is_what_a_plain_model_says(
    history: list[tuple[str, str, list[int]]], prompt: list[int]
) -> None:
    ttl, now = 4.0, 0.0
    view, model = index(predict_ttl=ttl), Model()
    pools = {node: Pool(view, node) for node in "abc"}
    model.held = {node: set() for node in "abc"}
    for what, node, chain in history:
        now += 1.5 if what == "wait" else 0.0
        pools[node] = _step(view, model, pools[node], now, what, chain)
        found = view.find(now, names(*prompt)).overlaps
        for other in "abc":
            least, most = model.bounds(other, prompt, now, ttl)
            assert least <= found.get(NodeId(other), 0) <= most
            assert view.known_blocks(NodeId(other)) == len(model.held[other])
        assert pools[node].feed.digest() == pools[node].log.digest()
        view.check()


def _step(
    view: PrefixIndex, model: Model, pool: Pool, now: float, what: str, chain: list[int]
) -> Pool:
    node = pool.life.node
    if what == "store":
        pool.stored(*chain)
        model.held[node] |= set(chain)
    elif what == "remove":
        pool.removed(*chain)
        gone = model.held[node] & set(chain)
        model.held[node] -= gone
        model.sent = [
            (at, where, _cut(sent, gone) if where == node else sent)
            for at, where, sent in model.sent
        ]
    elif what == "place":
        view.placed(now, pool.life, names(*chain))
        model.sent.append((now, node, chain))
    elif what == "snapshot":
        pool.snapshot()
    elif what in ("clear", "restart"):
        had = bool(model.held[node])
        model.held[node].clear()
        if what == "restart":
            view.worker_gone(pool.life)
            pool = Pool(view, node, pool.life.epoch + 1)
        pool.cleared()
        if had or what == "restart":
            model.sent = [entry for entry in model.sent if entry[1] != node]
    return pool


def _cut(sent: list[int], gone: set[int]) -> list[int]:
    return [name for name in sent if name not in gone]
