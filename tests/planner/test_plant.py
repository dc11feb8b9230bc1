"""A planner and its cluster for thousands of ticks: what must never happen, and calm."""

from __future__ import annotations

from itertools import pairwise
from math import sin, tau
from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.planner.core import PlannerCore
from pdserve.planner.forecast import Forecast
from tests.planner.plant import TICK, Chances, Plant
from tests.planner.support import ME, LinearJudge, config, pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.messages.planner import Change
    from pdserve.planner.config import PlannerConfig
    from pdserve.planner.tick import PlannerOutput

MEAN = Chances(
    fails=0.1,
    never_ready=0.1,
    wrong_mode=0.05,
    pending=0.1,
    lost=0.1,
    refused=0.05,
    dies=0.001,
    silent=0.1,
    operator=0.01,
)


class World:
    """One planner and one cluster, with what must hold at each tick."""

    def __init__(self, settings: PlannerConfig, plant: Plant) -> None:
        self.settings, self.plant = settings, plant
        self.judge = LinearJudge()
        self.term = 0
        self.sizes: list[tuple[float, int]] = []
        self.begun: set[str] = set()
        self.plan_of: dict[str, str] = {}
        """The plan that has ordered a change."""
        self.restart()

    def restart(self) -> None:
        self.term += 1
        self.core = PlannerCore(
            self.settings, me=ME, term=self.term, judge=self.judge, forecaster=Forecast
        )

    def is_useless(self, change: Change) -> bool:
        """Whether it switches a worker of a mode that the pool does not have: one that came so."""
        useful: set[str] = {*self.settings.pools[0].modes}
        useless = {life.node for life, one in self.plant.workers.items() if one.mode not in useful}
        return change.action == "mode" and change.node in useless

    def is_missing(self, change: Change) -> bool:
        """Whether it switches to a mode that no worker has, without which the others are of no use:
        an operator drained the last one."""
        useful = {*self.settings.pools[0].modes}
        return change.action == "mode" and change.mode in useful - self.plant.serving.keys()

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK)):
            self.tick()

    def tick(self) -> PlannerOutput:
        plant = self.plant
        plant.step()
        output = self.core.tick(plant.now, plant.seen())
        self.check(output)
        before = plant.charged
        plant.obey(output)
        budget = self.settings.budget
        assert not budget or plant.charged <= max(budget, before)
        self.sizes.append((plant.now, output.plans[0].target.get("aggregated", 0)))
        return output

    def check(self, output: PlannerOutput) -> None:
        plant, target = self.plant, self.settings.pools[0]
        removing = [
            order.change
            for order in output.orders
            if order.verb == "begin" and order.change.action in ("stop", "mode")
        ]
        self.plan_of |= {one.change.id: f"{one.term}.{one.number}" for one in output.orders}
        going = {
            one.id if one.action == "mode" else self.plan_of.get(one.id, "found")
            for one in output.plans[0].changes
            if one.action in ("stop", "mode") and one.state not in ("done", "given_up", "failed")
        }
        assert len(going) <= 1, "stops that one plan has ordered, or one switch"
        leaving = {one.node for one in output.plans[0].changes if one.action == "stop"}
        left = sum(
            one.state == "ready" and one.node not in leaving for one in plant.workers.values()
        )
        for change in removing:
            if change.id not in self.begun:
                self.begun.add(change.id)
                wrong = "was not asked for" in change.reason or self.is_useless(change)
                wrong = wrong or self.is_missing(change)
                assert left >= target.min or wrong, "below the minimum by its own act"


@pytest.mark.parametrize("number", range(5))
def test_what_must_never_happen_does_not(seed, number):
    """Budget with all that is pending, minimum, removals of one plan at a time, nothing ended that
    serves;
    while everything that can go wrong does, and the planner dies now and then."""
    random = Random(seed + number)
    level = [1.5]

    def load(now: float) -> float:
        level[0] = min(8.0, max(0.0, level[0] + random.gauss(0, 0.25)))
        return level[0]

    modes = ("prefill", "decode") if number % 2 else ("aggregated",)
    settings = config(pool(min=1 + number % 3, max=8, modes=modes), budget=7.0)
    plant = Plant(load, random, MEAN, modes=modes)
    world = World(settings, plant)
    for _ in range(400):
        world.tick()
        if random.random() < 0.01:
            world.restart()
    assert world.begun or world.plant.born > 2


def changes(sizes: list[tuple[float, int]], since: float) -> list[int]:
    """By how much the target changed, each time it did."""
    values = [size for at, size in sizes if at >= since]
    return [b - a for a, b in pairwise(values) if a != b]


def sign_changes(steps: list[int]) -> int:
    return sum(a * b < 0 for a, b in pairwise(steps))


def noisy(mean: float, share: float, seed: int) -> Callable[[float], float]:
    random = Random(seed)
    return lambda now: mean * random.uniform(1 - share, 1 + share)


@pytest.mark.parametrize("work", [0.3, 0.85, 1.5, 3.4])
def test_nothing_changes_under_a_calm_load(work):
    """From ten minutes on, for an hour, although single buckets differ by a tenth."""
    world = World(config(), Plant(noisy(work, 0.1, 7)))
    world.run(4200)
    assert changes(world.sizes, since=600) == []


@pytest.mark.parametrize("work", [0.9, 1.8, 3.5])
def test_it_does_not_hunt_under_a_noisy_load(work, seed):
    """Buckets differ by half of their mean: at most two changes of direction in an hour."""
    world = World(config(), Plant(noisy(work, 0.5, seed)))
    world.run(4200)
    assert sign_changes(changes(world.sizes, since=600)) <= 2


@pytest.mark.parametrize(("boot", "period"), [(5, 120), (20, 300), (60, 300)])
def test_it_does_not_follow_a_load_that_alternates(boot, period):
    """Each rise would cost a start-up in which requests are late: once an hour is enough."""
    load = noisy(1.0, 0.1, 1)
    high = lambda now: load(now) * (3.4 if now // period % 2 else 0.4)  # noqa: E731
    world, late = World(config(), Plant(high, boot=boot)), 0
    for _ in range(int(5400 / TICK)):
        world.tick()
        busy = world.plant.works[-1] > 0.95 * sum(world.plant.serving.values())
        late += busy and world.plant.now > 600
    assert sign_changes(changes(world.sizes, since=600)) <= 4
    assert late <= 0.05 * 4800 / TICK


def test_a_step_is_followed_and_its_end_too():
    world = World(config(), Plant(lambda now: 3.4 if 600 <= now < 1800 else 0.4))
    world.run(595)
    assert sum(world.plant.serving.values()) == 1
    world.run(15)
    assert world.sizes[-1][1] >= 4  # two ticks after the step
    world.run(60)
    assert sum(world.plant.serving.values()) >= 4
    world.run(1130)
    at_end = sum(world.plant.serving.values())
    world.run(300 + 120 * at_end + 120)
    assert sum(world.plant.serving.values()) == 1


def test_a_day_is_followed_without_misses():
    """Two hours, from 0.5 to 4.5 work/s and back."""
    world = World(config(), Plant(lambda now: 2.5 - 2.0 * sin(tau * now / 7200 + tau / 4)))
    late, busy = 0, 0.0
    for _ in range(int(7200 / TICK)):
        world.tick()
        plant = world.plant
        late += plant.works[-1] > 0.95 * sum(plant.serving.values())
        busy += len(plant.workers)
    assert late <= 0.01 * 7200 / TICK
    assert busy <= 0.8 * 6 * 7200 / TICK  # six would be needed all the time


def test_a_cluster_that_was_left_alone_is_the_same_with_a_planner_that_dies():
    """Planners that die at every tenth tick still get there, and start nothing twice."""
    world = World(config(), Plant(lambda now: 3.4))
    for number in range(120):
        world.tick()
        if number % 10 == 9:
            world.restart()
    assert 4 <= sum(world.plant.serving.values()) <= 5
    assert len(world.plant.runs) == sum(world.plant.serving.values()) - 1
