"""What cannot work is refused at the start, with cause and remedy."""

from __future__ import annotations

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from pdserve.errors import ConfigError
from pdserve.messages.planner import Kind
from pdserve.planner.config import Floor, PlannerConfig, PoolConfig


def pool(**more) -> PoolConfig:
    return PoolConfig(**{"model": "m", "ttft": 1.0, **more})


def at(day: int, hour: float, zone: str = "UTC") -> float:
    """Unix seconds of an hour on a weekday, Monday is 0 (2026-11-23 was one)."""
    minute = round(hour % 1 * 60)
    return datetime(2026, 11, 23 + day, int(hour), minute, tzinfo=ZoneInfo(zone)).timestamp()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"min": 0}, "min must be at least 1: a start takes minutes"),
        ({"min": 3, "max": 2}, r"max \(2\) is below min \(3\): raise max"),
        ({"floors": (Floor(min=9),), "max": 8}, r"a floor \(9\) is above max \(8\)"),
        ({"share": 1.0}, "share must be between 0 and 1"),
        ({"ttft": 0.0}, "ttft must be more than 0"),
        ({"itl": float("nan")}, "itl must be more than 0"),
        ({"modes": ("prefil",)}, "mode 'prefil' is not known: use aggregated, prefill"),
        ({"modes": ("prefill",)}, "none that takes requests"),
        ({"modes": ("prefill", "both")}, "prefill without decode"),
        ({"floors": (Floor(zone="Mars/Olympus"),)}, "zone 'Mars/Olympus' is not known"),
        ({"floors": (Floor(begin=60.0, end=60.0),)}, "different times of a day"),
        ({"floors": (Floor(days=frozenset((7,))),)}, "days must be weekdays"),
        ({"floors": (Floor(min=0),)}, "leave the floor out"),
        ({"max": 10**27}, "is above 10000: lower it"),
    ],
)
def test_a_pool_that_cannot_work_is_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        PlannerConfig(pools=(pool(**fields),)).validate()


def test_a_budget_below_the_minimum_is_refused():
    """A typing error must not become an outage: other planners would scale to zero."""
    pools = (pool(min=2, kinds=("big",)), pool(model="n", min=3, kinds=("small",)))
    config = PlannerConfig(pools=pools, budget=9.9, prices={"big": 3.5, "small": 1.0})
    with pytest.raises(ConfigError, match=r"budget 9\.9 is below 10, .* raise the budget to 10"):
        config.validate()
    PlannerConfig(pools=pools, budget=10.0, prices=config.prices).validate()


def test_a_floor_counts_for_the_budget():
    floors = (Floor(min=4, begin=8 * 3600, end=18 * 3600),)
    with pytest.raises(ConfigError, match="below 4"):
        PlannerConfig(pools=(pool(floors=floors),), budget=3.0).validate()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tick": 0.0}, "tick must be more than 0"),
        ({"slow_tick": 1.0}, "slow-tick must not be shorter than tick"),
        ({"budget": -1.0}, "budget must be 0 or more"),
        ({"mode": "on"}, "use off, advise or act"),
        ({"prices": {"gpu": -1.0}}, "the price of kind 'gpu'"),
    ],
)
def test_other_settings_that_cannot_work(fields, says):
    with pytest.raises(ConfigError, match=says):
        PlannerConfig(pools=(pool(),), **fields).validate()


def test_a_kind_belongs_to_one_pool():
    pools = (pool(kinds=("gpu",)), pool(model="n", kinds=("gpu",)))
    with pytest.raises(ConfigError, match="kind 'gpu' stands in the pools of 'm' and 'n'"):
        PlannerConfig(pools=pools).validate()
    with pytest.raises(ConfigError, match="model 'm' has two pools"):
        PlannerConfig(pools=(pool(), pool())).validate()


def test_kinds_of_a_pool():
    gpu, cpu = Kind(name="gpu", price=2.0), Kind(name="cpu")
    one = PlannerConfig(pools=(pool(),))
    assert one.kinds_of(one.pools[0], (gpu, cpu)) == (gpu, cpu)
    preferred = PlannerConfig(pools=(pool(kinds=("cpu", "gpu", "gone")),), prices={"gpu": 3.0})
    assert preferred.kinds_of(preferred.pools[0], (gpu, cpu)) == (cpu, gpu)
    assert preferred.price(gpu) == 3.0
    assert preferred.price(cpu) == 1.0
    two = PlannerConfig(pools=(pool(), pool(model="n")))
    assert two.kinds_of(two.pools[0], (gpu,)) == ()  # it could start workers of the wrong model


# ---------------------------------------------------------------------- floors


def test_a_floor_holds_on_its_days_and_hours():
    work = Floor(days=frozenset(range(5)), begin=8 * 3600, end=18 * 3600, min=4)
    one = pool(floors=(work,), min=1, max=8)
    assert one.floor(at(0, 8)) == 4
    assert one.floor(at(0, 7.99)) == 1
    assert one.floor(at(4, 17.9)) == 4
    assert one.floor(at(4, 18)) == 1
    assert one.floor(at(5, 12)) == 1


def test_a_floor_over_midnight_belongs_to_the_day_on_which_it_begins():
    night = Floor(days=frozenset((4,)), begin=22 * 3600, end=6 * 3600, min=3)
    assert night.holds(at(4, 23))
    assert night.holds(at(5, 5))
    assert not night.holds(at(4, 5))
    assert not night.holds(at(5, 23))


def test_a_floor_is_in_its_own_zone_through_the_change_of_clocks():
    berlin = Floor(begin=8 * 3600, end=9 * 3600, zone="Europe/Berlin", min=2)
    winter = datetime(2026, 1, 12, 7, 30, tzinfo=UTC).timestamp()
    summer = datetime(2026, 7, 13, 6, 30, tzinfo=UTC).timestamp()
    assert berlin.holds(winter)
    assert berlin.holds(summer)
    assert not berlin.holds(summer + 3600)


def test_the_largest_floor_counts():
    one = pool(floors=(Floor(min=2), Floor(min=5, begin=3600.0)), max=8)
    assert one.floor(at(0, 0.5)) == 2
    assert one.floor(at(0, 2)) == 5
