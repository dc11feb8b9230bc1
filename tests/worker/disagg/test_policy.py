from __future__ import annotations

import random
from typing import Any

import pytest

from pdserve.messages.handoff import QueueState
from pdserve.worker.disagg.policy import (
    DisaggDecision,
    DisaggInputs,
    DisaggPolicy,
    LinearFit,
    PrefillCosts,
    patience,
)

IDLE = QueueState(workers=1, credits=2)


def prospect(**fields: Any) -> DisaggInputs:
    asked: dict[str, Any] = {"tokens": 1000, "queue": IDLE}
    return DisaggInputs(**asked | fields)


@pytest.mark.parametrize(
    ("mode", "fields", "decision"),
    [
        ("rule", {}, (True, "rule")),
        ("rule", {"tokens": 513}, (True, "rule")),
        ("rule", {"tokens": 512}, (False, "short_prompt")),
        ("rule", {"cached": 600}, (False, "short_prompt")),
        ("rule", {"queue": None}, (False, "no_prefill_worker")),
        ("rule", {"queue": QueueState(waiting=3)}, (False, "no_prefill_worker")),
        ("rule", {"queue": QueueState(workers=1, waiting=10)}, (True, "rule")),
        ("rule", {"queue": QueueState(workers=1, waiting=11)}, (False, "queue_full")),
        ("rule", {"obstacle": "not_possible"}, (False, "not_possible")),
        ("always", {"tokens": 1}, (True, "always")),
        ("always", {"queue": QueueState(workers=1, waiting=99)}, (True, "always")),
        ("always", {"queue": None}, (False, "no_prefill_worker")),
        ("always", {"obstacle": "migrated_choices"}, (False, "migrated_choices")),
        ("never", {}, (False, "never")),
    ],
)
def test_where_and_why(mode, fields, decision):
    found = DisaggPolicy(mode).decide(prospect(**fields))
    assert (found.remote, found.reason) == decision


def test_with_no_least_length_every_prompt_may_go():
    assert DisaggPolicy("rule", min_tokens=0).decide(prospect(tokens=2)).remote


def test_an_idle_worker_prefills_by_itself_and_a_busy_one_does_not():
    chooser = DisaggPolicy("predict")
    assert chooser.decide(prospect()).reason == "predicted_local"
    assert chooser.decide(prospect(streams=4)).reason == "predicted_remote"
    assert chooser.decide(prospect(backlog=8000)).reason == "predicted_remote"


def test_what_waits_for_a_prefill_worker_counts():
    chooser = DisaggPolicy("predict")
    full = QueueState(workers=2, waiting=50, waiting_tokens=100_000, uncomputed_tokens=8000)
    assert chooser.decide(prospect(streams=4, queue=full)).reason == "predicted_local"
    wide = QueueState(workers=200, waiting=50, waiting_tokens=100_000, uncomputed_tokens=8000)
    assert chooser.decide(prospect(streams=4, queue=wide)).reason == "predicted_remote"


def test_what_is_cached_here_need_not_be_computed():
    chooser = DisaggPolicy("predict")
    assert chooser.decide(prospect(streams=2)).remote
    assert not chooser.decide(prospect(streams=2, cached=990)).remote


def test_a_slow_road_is_learnt():
    chooser = DisaggPolicy("predict")
    assert chooser.decide(prospect(streams=2)).remote
    for _ in range(30):
        chooser.learnt.remote(1000, 0, 1000, prefill=0.1, whole=0.9)
    assert not chooser.decide(prospect(streams=2)).remote


def test_what_is_still_to_come_shares_the_road():
    chooser = DisaggPolicy("predict")
    for _ in range(30):
        chooser.learnt.remote(1000, 0, 1000, prefill=0.05, whole=0.1)
        chooser.learnt.remote(1000, 0, 9000, prefill=0.05, whole=0.5)
    assert chooser.decide(prospect(streams=2)).remote
    assert not chooser.decide(prospect(streams=2, coming=20_000)).remote


def test_who_is_late_warns_before_it_has_come():
    chooser = DisaggPolicy("predict")
    decision = chooser.decide(prospect(streams=4))
    assert decision.remote
    late = chooser.decide(prospect(streams=4, late=10.0))
    assert not late.remote
    assert late.there == pytest.approx(10 * decision.fill)


def test_what_prefill_workers_have_cached_is_learnt():
    learnt = PrefillCosts()
    before = DisaggPolicy("predict")
    for _ in range(100):
        learnt.remote(1000, 800, 1000, prefill=0.03, whole=0.04)
    assert learnt.cached_share > 0.75
    after = DisaggPolicy("predict")
    after.learnt = learnt
    assert after.predict(prospect())[1] < before.predict(prospect())[1]


def test_the_mode_may_change_while_it_runs():
    chooser = DisaggPolicy("never")
    chooser.mode = "always"
    assert chooser.decide(prospect()).reason == "always"


@pytest.mark.parametrize(("base", "slope"), [(0.0, 2e-5), (0.05, 1e-4), (0.2, 0.0), (0.001, 1e-3)])
def test_a_line_finds_what_it_is_shown(base, slope, seed):
    line, draw = LinearFit(0.01, 1e-4, 2000), random.Random(seed)
    for _ in range(400):
        x = draw.uniform(10, 8000)
        line.learn(x, (base + slope * x) * draw.uniform(0.95, 1.05))
    largest = base + slope * 8000
    for x in (100, 2000, 8000):
        # What is seen is off by up to 5 %, of the largest values, too.
        assert line(x) == pytest.approx(base + slope * x, rel=0.15, abs=0.03 + largest / 100)


def test_a_line_that_sees_one_length_only_is_right_there():
    line = LinearFit(0.01, 1e-4, 2000)
    for _ in range(300):
        line.learn(500, 0.3)
    assert line(500) == pytest.approx(0.3, rel=0.05)
    assert line.slope >= 0
    assert line.base >= 0


def test_a_line_is_not_moved_by_nonsense():
    line = LinearFit(0.01, 1e-4, 2000)
    for x, seconds in ((-1, 0.1), (10, -0.1), (10, float("nan")), (10, 1e9), (float("nan"), 1)):
        line.learn(x, seconds)
    assert (line.base, line.slope, line.observed) == (0.01, 1e-4, 0)


def test_one_odd_observation_does_not_turn_a_decision():
    chooser = DisaggPolicy("predict")
    for _ in range(50):
        chooser.learnt.local(1000, 0.1)
    chooser.learnt.local(1000, 2.0)
    assert chooser.learnt.here(1000) < 0.25


@pytest.mark.parametrize(
    ("advantage", "rest", "wanted"),
    [(0.0, None, 1.0), (0.2, None, 1.0), (3.0, None, 6.0), (3.0, 9.0, 3.0), (0.0, 1.5, 0.5)],
)
def test_patience(advantage, rest, wanted):
    assert patience(advantage, rest) == pytest.approx(wanted)


def test_patience_when_all_are_to_go_elsewhere():
    chooser = DisaggPolicy("always")
    assert chooser.patience(DisaggDecision(True, "always"), None) == 30.0
    assert chooser.patience(DisaggDecision(True, "always"), 6.0) == 2.0
    assert chooser.patience(DisaggDecision(True, "always"), -1.0) == 0.0


def test_nobody_has_more_than_all_of_a_prompt():
    learnt = PrefillCosts()
    learnt.remote(1000, 1 << 60, 1000, 0.1, 0.2)
    assert 0 <= learnt.cached_share <= 1


def test_a_measured_path_is_believed_until_a_transfer_tells_more():
    """10 GbE, 128 KiB of KV a token: prompts that a fast network would carry stay here."""
    chooser = DisaggPolicy("predict")
    assert chooser.decide(prospect(tokens=8000, streams=3)).remote
    chooser.learnt.guess_transfer(131_072 / 1.25e9)
    assert not chooser.decide(prospect(tokens=8000, streams=1)).remote
    before = chooser.decide(prospect(tokens=8000)).there
    chooser.learnt.remote(8000, 0, 8000, prefill=0.4, whole=0.5)
    learnt = chooser.learnt.transfer.slope
    chooser.learnt.guess_transfer(1.0)
    assert chooser.learnt.transfer.slope == learnt
    assert chooser.decide(prospect(tokens=8000)).there < before


def test_prefill_workers_are_as_fast_as_this_one_until_they_have_shown_more():
    costs = PrefillCosts()
    for tokens in (300, 2000, 9000):
        costs.local(tokens, 3e-5 * tokens)
    assert costs.there(10_000) == pytest.approx(costs.here(10_000))
    assert costs.there(10_000) < 0.6, "the guess was twice as long"
    for tokens in (300, 400, 5000) * 20:
        costs.remote(tokens, 0, tokens, prefill=2e-4 * tokens, whole=2e-4 * tokens + 0.01)
    costs.local(5000, 0.15)
    assert costs.there(10_000) == pytest.approx(2.0, rel=0.1)


def test_another_prior_has_the_weight_that_the_former_one_had_left():
    one, other = LinearFit(0.01, 1e-4, 2000), LinearFit(0.02, 3e-5, 2000)
    for _ in range(10):
        one.learn(500, 0.04)
        other.learn(500, 0.04)
    one.suppose(0.02, 3e-5)
    assert one.base == pytest.approx(other.base)
    assert one.slope == pytest.approx(other.slope)
