"""How long a step takes that waits for layers, and what it does not wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from pdserve.clock import ManualClock
from pdserve.engine_core.tiers.step_gate import StepGate
from pdserve.kv.tiers.layer_groups import LayerGroups

if TYPE_CHECKING:
    from pdserve.kv.tiers.lower_tiers import LowerTiers

BEGIN = 100.0


def gate(
    due: dict[tuple[int, int], float], until: float = BEGIN + 10.0, groups: int = 4
) -> tuple[StepGate, list[tuple[int, int, float]]]:
    """The gate of a step that needs fetches 1 and 2, whose groups come at these times; and what it
    has waited for. A group without a time has come."""
    waited: list[tuple[int, int, float]] = []

    def wait_copied(fetch: int, group: int, seconds: float) -> bool:
        waited.append((fetch, group, seconds))
        return due.get((fetch, group), BEGIN) <= BEGIN + seconds

    lower = SimpleNamespace(
        layers=LayerGroups(8, 8, groups),
        wait_copied=wait_copied,
        copied_at=lambda fetch, group: due.get((fetch, group)),
    )
    fetches = [(1, groups), (2, 2)]
    made = StepGate(cast("LowerTiers", lower), fetches, until, ManualClock(BEGIN))
    return made, waited


@pytest.mark.parametrize(
    ("due", "seconds"),
    [
        ({}, 8.0),
        ({(1, 1): BEGIN + 2.0, (1, 2): BEGIN + 4.0, (1, 3): BEGIN + 6.0}, 8.0),
        ({(1, 1): BEGIN + 3.0}, 9.0),
        ({(1, 3): BEGIN + 9.0}, 11.0),
        ({(1, 1): BEGIN + 5.0, (1, 3): BEGIN + 9.5}, 11.5),
        ({(1, 2): BEGIN + 5.0, (2, 1): BEGIN + 7.0}, 11.0),
        ({(1, 1): BEGIN + 50.0}, 16.0),
    ],
    ids=["come", "just in time", "first late", "last late", "two late", "later one", "given up"],
)
def test_a_step_takes_as_long_as_its_layers_need(
    due: dict[tuple[int, int], float], seconds: float
) -> None:
    made, _ = gate(due)
    assert made.seconds(BEGIN, 8.0) == pytest.approx(seconds)


def test_each_layer_waits_for_the_groups_that_begin_there() -> None:
    made, waited = gate({(1, 2): BEGIN + 20.0})
    assert made.at == {2, 4, 6}
    for layer in range(1, 9):
        made(layer)
    assert waited == [(1, 1, 10.0), (1, 2, 10.0), (2, 1, 10.0), (1, 3, 10.0)]
    assert made.late == {1}


def test_after_its_time_a_step_waits_no_more() -> None:
    made, waited = gate({}, until=BEGIN - 1.0)
    made(2)
    assert waited == [(1, 1, 0.0)]
