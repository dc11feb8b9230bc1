"""Rings: the same for everybody, connected, and cheap to keep."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.gossip.probe_rings import ProbeRings
from pdserve.ids import NodeId


def overlay_of(names, rings=8, mesh_limit=17):
    overlay = ProbeRings(rings, mesh_limit)
    for name in names:
        overlay.add(NodeId(name))
    return overlay


def names(n):
    return [NodeId(f"node-{i}") for i in range(n)]


@pytest.mark.parametrize("n", [1, 2, 17])
def test_few_members_watch_each_other(n):
    overlay = overlay_of(names(n))
    for node in names(n):
        assert set(overlay.targets(node)) == set(names(n)) - {node}
        assert set(overlay.observers(node)) == set(overlay.targets(node))


def test_many_members_are_watched_by_several_each():
    overlay = overlay_of(names(300))
    for node in names(300):
        assert node not in overlay.targets(node)
        assert 5 <= len(overlay.observers(node)) <= 8


def test_watching_is_the_other_side_of_being_watched():
    overlay = overlay_of(names(60))
    for node in names(60):
        assert all(node in overlay.observers(target) for target in overlay.targets(node))


@given(st.sets(st.integers(0, 40), min_size=1), st.randoms(use_true_random=False))
def test_the_order_of_arrivals_and_departures_does_not_matter(kept, random):
    everybody = names(41)
    random.shuffle(everybody)
    overlay = overlay_of(everybody)
    wanted = {NodeId(f"node-{i}") for i in kept}
    for node in everybody:
        if node not in wanted:
            overlay.remove(node)
    plain = overlay_of(sorted(wanted))
    assert len(overlay) == len(wanted)
    assert all(overlay.targets(node) == plain.targets(node) for node in wanted)


def test_news_crosses_a_thousand_nodes_in_a_few_steps():
    overlay = overlay_of(names(1000))
    reached, frontier, steps = {names(1)[0]}, {names(1)[0]}, 0
    while frontier:
        near = {n for f in frontier for n in (*overlay.targets(f), *overlay.observers(f))}
        frontier = near - reached
        reached |= near
        steps += bool(frontier)
    assert len(reached) == 1000
    assert steps <= 4


def test_losing_a_fifth_of_the_nodes_does_not_split_the_rest():
    overlay = overlay_of(names(400))
    gone = set(Random(1).sample(names(400), 80))
    left = [node for node in names(400) if node not in gone]
    reached, frontier = {left[0]}, [left[0]]
    while frontier:
        node = frontier.pop()
        near = {n for n in (*overlay.targets(node), *overlay.observers(node)) if n not in gone}
        frontier += near - reached
        reached |= near
    assert len(reached) == len(left)


def test_adding_and_removing_twice_changes_nothing():
    overlay = overlay_of(["a", "a", "b"])
    overlay.remove(NodeId("c"))
    overlay.remove(NodeId("b"))
    overlay.remove(NodeId("b"))
    assert len(overlay) == 1
    assert NodeId("a") in overlay
    assert overlay.targets(NodeId("a")) == ()
