"""What may be tuned stays within ranges that do no harm, around today's defaults."""

from __future__ import annotations

from itertools import pairwise

import pytest

from pdserve.launch.config.options import OPTIONS
from pdserve.messages.knobs import KNOBS, TuningKnob, knob_of
from pdserve.router.config import RouterConfig
from pdserve.worker.config import WorkerConfig

DEFAULTS = {
    knob.name: getattr(
        RouterConfig() if knob.owner == "router" else WorkerConfig(), knob.name.replace("-", "_")
    )
    for knob in KNOBS
}


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_every_value_is_safe_and_a_step_from_the_next(knob: TuningKnob) -> None:
    values = knob.values(DEFAULTS[knob.name])
    assert knob.hard[0] <= knob.safe[0] == values[0]
    assert values[-1] == knob.safe[1] <= knob.hard[1]
    assert list(values) == sorted(set(values))
    assert DEFAULTS[knob.name] in values
    for one, other in pairwise(values):
        assert other / one <= knob.step * (1.3 if knob.whole else 1.01)
    assert all(value == int(value) for value in values) or not knob.whole


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.name)
def test_every_knob_is_a_flag_of_its_role(knob: TuningKnob) -> None:
    (option,) = [option for option in OPTIONS if option.name == knob.name]
    assert option.target.split(".")[0] == knob.owner
    assert option.parse(knob.as_text(knob.safe[0])) == pytest.approx(knob.safe[0])


def test_a_default_outside_of_the_safe_range_is_not_tried() -> None:
    (knob,) = [one for one in KNOBS if one.name == "disagg-max-queue"]
    assert 0 not in knob.values(0)
    assert knob_of("disagg-max-queue") is knob
    assert knob_of("block-size") is None
