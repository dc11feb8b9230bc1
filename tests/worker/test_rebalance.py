"""When a worker asks to be relieved, and of whom."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pdserve.messages.engine import EngineStats
from pdserve.worker.rebalance import MigrationProposal, Rebalance

LAST_FIRST = (9, 8, 7, 6, 5, 4, 3, 2, 1)


def stats(free: int = 100, **fields: Any) -> EngineStats:
    return EngineStats(**{"running": 9, "blocks_total": 100, "blocks_free": free, **fields})


class World:
    def __init__(self, itl_target: float = 0.0) -> None:
        self.rebalance = Rebalance(16, itl_target)
        self.now = 100.0
        self.victims: tuple[int, ...] = LAST_FIRST
        self.looked = 0

    def look(self, seen: EngineStats, after: float = 0.1) -> MigrationProposal | None:
        self.now += after
        return self.rebalance.look(self.now, seen, self._victims)

    def _victims(self) -> tuple[int, ...]:
        self.looked += 1
        return self.victims


def test_nothing_is_asked_of_a_worker_that_does_well():
    world = World(itl_target=0.05)
    for _ in range(100):
        assert world.look(stats(itl=0.03)) is None
    assert world.looked == 0


def test_who_would_be_preempted_first_is_asked_when_blocks_run_out():
    world = World()
    assert world.look(stats(free=5)) is None  # nine take a block each in sixteen steps
    assert world.look(stats(free=4)) == MigrationProposal("kv", frozenset({9}))
    assert world.look(stats(free=1, blocks_cached=4), after=1.0) is None, "cached ones are free"


def test_a_preemption_is_enough_and_counts_once():
    world = World()
    assert world.look(stats(preemptions=3)) == MigrationProposal("kv", frozenset({9}))
    assert world.look(stats(preemptions=3), after=1.0) is None
    assert world.look(stats(preemptions=0), after=1.0) is None  # the engine's next life
    assert world.look(stats(preemptions=1), after=1.0) is not None


def test_an_engine_that_keeps_no_blocks_cannot_run_out():
    assert World().look(stats(free=0, blocks_total=0)) is None


def test_streams_must_be_too_slow_for_a_while():
    world = World(itl_target=0.05)
    slow = stats(itl=0.06)
    assert [world.look(slow, after=0.125) for _ in range(16)] == [None] * 16
    assert world.look(slow, after=0.125) == MigrationProposal("itl", frozenset({9}))


def test_around_the_target_nothing_changes_below_it_all_begins_anew():
    world = World(itl_target=0.05)
    world.look(stats(itl=0.06))
    world.look(stats(itl=0.048), after=1.0)
    assert world.look(stats(itl=0.048), after=1.5) is not None
    world = World(itl_target=0.05)
    world.look(stats(itl=0.06))
    world.look(stats(itl=0.04), after=1.0)
    assert world.look(stats(itl=0.06), after=1.5) is None


@pytest.mark.parametrize(("fields", "pause"), [({"free": 0}, 0.5), ({"itl": 0.06}, 2.0)])
def test_there_is_time_between_for_the_numbers_to_follow(fields, pause):
    world = World(itl_target=0.05)
    world.look(stats(**fields))
    world.look(stats(**fields), after=3.0)
    asked = [world.now for _ in range(100) if world.look(stats(**fields)) is not None]
    gaps = [later - sooner for sooner, later in pairwise(asked)]
    assert min(gaps) == pytest.approx(pause, abs=0.11)


def test_nobody_is_asked_twice_in_a_while_and_the_last_one_never():
    world = World()
    asked = [world.look(stats(free=0), after=0.6) for _ in range(12)]
    assert [next(iter(one.handles)) for one in asked if one] == [9, 8, 7, 6, 5, 4, 3, 2]
    assert world.look(stats(free=0), after=6.0) == MigrationProposal("kv", frozenset({9}))


def test_a_large_worker_is_relieved_of_several_at_a_time():
    world = World()
    world.victims = tuple(range(64))
    relief = world.look(stats(free=0, running=64))
    assert relief == MigrationProposal("kv", frozenset({0, 1, 2, 3}))


def test_with_nobody_who_could_go_or_a_single_one_nothing_is_asked():
    world = World()
    world.victims = ()
    assert world.look(stats(free=0)) is None
    world.victims = (1,)
    assert world.look(stats(free=0)) is None
    world.victims = LAST_FIRST
    assert world.look(stats(free=0, running=1)) is None


def test_who_has_gone_is_forgotten():
    world = World()
    world.look(stats(free=0))
    world.victims = (2, 1)
    world.look(stats(free=0), after=1.0)
    assert world.rebalance._asked.keys() == {2}
