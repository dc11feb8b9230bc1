"""Slices of a trace are replayed with other values, and nothing else differs."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError
from pdserve.messages.knobs import KNOBS, knob_of
from pdserve.sim.capacity.objective import Objective
from pdserve.sim.capacity.trial import TrialPlan
from pdserve.sim.replay.cold_ttft import LengthTimes
from pdserve.sim.replay.config import ReplayConfig, ReplaySlo
from pdserve.sim.tuning.replays import SliceReplays, applied, relevant_knobs, slice_of, today
from pdserve.sim.tuning.search import SLICES
from pdserve.sim.workloads.generate import Unique
from pdserve.sim.workloads.transform import TraceTransform

SPLIT = ReplayConfig(workers=0, prefill=1, decode=1, max_sequences=300)


def names(config: ReplayConfig) -> list[str]:
    return [knob.name for knob in relevant_knobs(config)]


def test_only_what_the_cluster_reads_is_tuned() -> None:
    assert names(SPLIT) == [knob.name for knob in KNOBS]
    assert names(ReplayConfig()) == ["hold-work", "max-batch-tokens"]
    assert names(ReplayConfig(workers=0, prefill=1, decode=1, disagg="predict")) == [
        "hold-work",
        "max-batch-tokens",
    ]


@pytest.mark.parametrize("name", ["hold-work", "hold_work"])
def test_todays_value_is_read_and_replaced_where_it_stands(name: str) -> None:
    knob = knob_of("hold-work")
    assert knob is not None
    config = ReplayConfig(router_options={name: "0.2", "queue-order": "fifo"})
    assert today(config, knob).today == 0.2
    made = applied(config, {"hold-work": 0.05, "max-batch-tokens": 512.0})
    assert made.router_options == {"queue-order": "fifo", "hold_work": "0.05"}
    assert (made.max_batch_tokens, type(made.max_batch_tokens)) == (512, int)
    assert today(made, knob).today == 0.05


def test_a_batch_is_never_below_its_sequences() -> None:
    knob = knob_of("max-batch-tokens")
    assert knob is not None
    assert min(today(SPLIT, knob).values) >= 300


def test_slices_are_the_part_of_the_trace_in_order() -> None:
    shape = TraceTransform(begin=0.2, end=0.7, limit=12)
    found = [slice_of(shape, number) for number in range(SLICES)]
    assert [one.begin for one in found] == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6])
    assert found[-1].end == 0.7
    assert {one.limit for one in found} == {2}


def plan(requests: int) -> TrialPlan:
    config = ReplayConfig(
        workers=1, block_size=64, kv_tokens=64_000, slo=ReplaySlo(ttft=0.3, cold=0.0)
    )
    trace = Unique(requests=requests, rate=20.0, output=20)
    return TrialPlan(config, trace, TraceTransform(), Objective(), LengthTimes((1,), (0.0,)))


def test_seeds_differ_and_choices_share_them() -> None:
    replays = SliceReplays(plan(100), ["max-batch-tokens"], seeds=2)
    first, again = replays.good([2048], 0), replays.good([2048], 0)
    assert first == again
    assert len(first) == 2
    assert all(0 <= share <= 1 for share in first)
    assert replays.good([256], 0) != first


def test_a_slice_without_requests_is_an_error() -> None:
    replays = SliceReplays(plan(1), ["hold-work"], 1)
    with pytest.raises(ConfigError, match="of the trace has no request: give a longer"):
        replays.good([0.1], 0)
