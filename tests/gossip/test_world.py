"""What membership promises of a whole cluster, measured in virtual time with rotating seeds."""

from __future__ import annotations

import hashlib
from random import Random

import pytest

from pdserve.gossip import events as ev
from pdserve.gossip.core import GossipPhase
from pdserve.gossip.messages import MemberRecord
from pdserve.ids import NodeId
from tests.gossip.world import World

SIZES = [3, 8, 20, 50]


def grown(seed, n):
    world = World(seed)
    world.grow(n)
    world.run(world.random.uniform(0, 1))
    return world


@pytest.mark.parametrize("n", SIZES)
def test_a_crash_is_seen_by_its_peers_at_once_and_by_all_soon(seed, n):
    world = grown(seed, n)
    peers = set(world.hosts[NodeId("n1")].links)
    start = world.now
    world.crash("n1")
    world.run(0.2)
    assert {where for _, where in world.seen(ev.Unreachable, "n1", start)} == peers
    world.until(world.converged, 1.3)
    assert len(world.seen(ev.Died, since=start)) == n - 1


@pytest.mark.parametrize("n", SIZES)
def test_a_silent_death_is_known_within_seven_seconds(seed, n):
    world = grown(seed, n)
    world.die("n1")
    assert world.until(world.converged, 7.0) > 5.0
    world.run(20.0)
    assert world.converged()


@pytest.mark.parametrize("n", SIZES)
def test_a_pause_of_five_seconds_kills_nobody(seed, n):
    world = grown(seed, n)
    start = world.now
    world.pause("n0", 5.0)
    world.run(5.0)
    world.pause(f"n{n - 1}", 5.0)
    world.run(20.0)
    assert world.seen(ev.Died, since=start) == []
    assert world.converged()
    assert all(not host.core._suspicions for host in world.hosts.values())


@pytest.mark.parametrize("n", [8, 30])
def test_an_observer_that_pauses_during_a_death_kills_only_the_dead(seed, n):
    world = grown(seed, n)
    start = world.now
    world.die("n1")
    world.run(world.random.uniform(0, 3))
    world.pause("n2", 5.0)
    world.until(lambda: all("n1" not in world.view(name) for name in world.live()), 20.0)
    world.run(10.0)
    assert {e.record.node for at, _, e in world.log if isinstance(e, ev.Died) and at >= start} == {
        "n1"
    }
    assert world.converged()


@pytest.mark.parametrize("n", SIZES)
def test_a_newcomer_and_a_restarted_node_are_known_within_three_seconds(seed, n):
    world = grown(seed, n)
    world.add("new", ["n2"])
    world.until(world.converged, 3.0)
    world.crash("n1")
    world.run(world.random.uniform(0, 1))
    old = world.hosts[NodeId("n1")].epoch
    assert world.restart("n1").epoch > old
    world.until(world.converged, 3.0)


def test_nodes_that_start_together_find_each_other(seed):
    world = World(seed)
    for i in range(40):
        world.add(f"n{i}", [f"n{(i + 1) % 40}", "n0"])
    world.until(world.converged, 5.0)
    assert len({where for _, where in world.seen(ev.TableReady)}) == 40


def test_a_goodbye_is_no_death(seed):
    world = grown(seed, 20)
    start = world.now
    world.tell("n1", ev.Leave())
    world.until(lambda: len(world.seen(ev.Departed, "n1", start)) == 19, 1.0)
    world.run(20.0)
    assert world.seen(ev.Died, since=start) == world.seen(ev.Suspected, since=start) == []
    assert world.hosts[NodeId("n1")].core.phase is GossipPhase.OUT


@pytest.mark.parametrize("both", [True, False])
def test_a_short_partition_kills_nobody(seed, both):
    world = grown(seed, 12)
    start = world.now
    world.cut(["n0", "n1"], [f"n{i}" for i in range(2, 12)], both=both)
    world.run(3.0)
    world.heal()
    world.run(20.0)
    assert world.seen(ev.Died, since=start) == []
    assert world.converged()


def test_an_isolated_node_does_not_bury_the_cluster(seed):
    world = grown(seed, 12)
    start = world.now
    world.cut(["n0"], [f"n{i}" for i in range(1, 12)])
    world.run(20.0)
    assert {where for _, where in world.seen(ev.Died, since=start)} == {
        f"n{i}" for i in range(1, 12)
    }
    world.heal()
    world.until(world.converged, 30.0)
    assert [where for _, where in world.seen(ev.Rejoin, since=start)] == ["n0"]


def test_a_broken_way_between_two_is_no_death(seed):
    world = grown(seed, 8)
    start = world.now
    world.cut(["n0"], ["n1"])
    world.run(60.0)
    assert world.seen(ev.Died, since=start) == []
    assert world.seen(ev.Unreachable, "n1", start)


def test_two_islands_become_one_through_a_seed(seed):
    world = World(seed)
    names = [f"n{i}" for i in range(10)]
    world.cut(names[:5], names[5:])
    for i, name in enumerate(names):
        world.add(name, ["n0"] if i % 5 else ["n5", "n0"])
    world.run(20.0)
    world.heal()
    world.until(world.converged, 60.0)


@pytest.mark.parametrize("round_", range(4))
def test_whatever_happens_everybody_agrees_with_the_truth_afterwards(seed, long, round_):
    for extra in range(25 if long else 1):
        swarm(World(seed + extra))


def swarm(world):
    """A random subset of faults at random rates; then quiet, and the truth."""
    random = Random(world.random.getrandbits(64))
    n = random.choice([3, 5, 9, 18, 24])
    names = [host.name for host in world.grow(n)]
    faults = random.sample(["crash", "die", "pause", "cut", "one-way", "heal"], 4)
    for _ in range(random.randint(3, 10)):
        world.run(random.uniform(0, 8))
        fault, name = random.choice(faults), random.choice(names)
        side = random.sample(names, random.randint(1, n - 1))
        rest = [other for other in names if other not in side]
        if fault in ("crash", "die") and len(world.live()) > 2 and world.hosts[name].up:
            world.crash(name) if fault == "crash" else world.die(name)
        elif fault == "pause":
            world.pause(name, random.uniform(0, 12))
        elif fault in ("cut", "one-way"):
            world.cut(side, rest, both=fault == "cut")
        elif fault == "heal":
            world.heal()
        down = [other for other in names if not world.hosts[other].up]
        if down and random.random() < 0.5:
            world.restart(random.choice(down))
    world.heal()
    world.until(world.converged, 120.0, step=0.5)
    world.run(60.0)
    assert world.converged(), world.describe()
    lives = [(name, e.record) for _, name, e in world.log if isinstance(e, ev.Died)]
    assert all(record.epoch <= world.hosts[record.node].epoch for _, record in lives)


def trace(seed):
    world = World(seed)
    world.grow(9)
    world.pause("n3", 2.0)
    world.crash("n1")
    world.run(10.0)
    return hashlib.sha256(repr((world.messages, world.log)).encode()).hexdigest()


def test_a_seed_repeats_a_run(seed):
    assert trace(seed) == trace(seed) != trace(seed + 1)


def thousand(seed, n=1000):
    """A cluster that has been up for a while."""
    world = World(seed, codec=False)
    known = tuple(
        MemberRecord(NodeId(f"n{i}"), 1, address=f"n{i}:1", role="worker") for i in range(n)
    )
    for record in known:
        world.add(record.node, start=ev.StartGossip((), known))
    world.run(3.0)
    return world


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_thousand_nodes_learn_of_a_newcomer_and_of_deaths_in_time_and_at_rest_say_little(seed):
    """What it costs is measured by `bench/micro/gossip.py`; a test counts, it does not time."""
    world = thousand(seed)
    assert world.converged()
    sent = world.messages
    world.run(5.0)
    assert (world.messages - sent) / 5.0 / 1000 < 40
    world.add("new", ["n5"])
    world.until(world.converged, 3.0, step=0.2)
    world.crash("n7")
    world.until(world.converged, 1.5, step=0.2)
    world.run(3.0)
    world.die("n8")
    assert world.until(world.converged, 7.0, step=0.2) > 5.0


def test_who_starts_before_its_seed_finds_it_soon_after(seed):
    world = World(seed)
    world.add("n1", ["n0"])
    world.add("n2", ["n0"])
    world.run(60.0)
    assert not world.converged() or len(world.live()) == 2
    world.add("n0")
    world.until(world.converged, 8.0)


@pytest.mark.parametrize("n", [1, 2, 12])
def test_a_newcomer_is_ready_as_soon_as_it_has_the_table(seed, n):
    world = World(seed)
    world.grow(n)
    start = world.now
    world.add("late", ["n0"])
    world.until(lambda: bool(world.seen(ev.TableReady, since=start)), 0.5)
