"""Learning from a stream of first tokens and reports."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from pdserve.messages.handoff import QueueState
from pdserve.messages.routing import WorkerLoad
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.perf_model.predictor import Observation, Predictor, PredictorConfig
from tests.router.support import life

if TYPE_CHECKING:
    from pdserve.ids import NodeLife

TRUTH = LatencyModel(base=0.01, per_token=6e-5, per_pair=6e-10)
FAST, SLOW = [life(f"w{i}") for i in range(6)], [life("s0"), life("s1")]


def seen(worker: NodeLife, length: int = 1000, cached: int = 0, **changes: Any) -> Observation:
    """As it would be without a queue, or otherwise."""
    work = TRUTH.prefill(length, cached)
    fields = {
        "model": "m",
        "worker": worker,
        "prompt_tokens": length,
        "cached_tokens": cached,
        "work_seconds": work,
        "queue_seconds": 0.0,
        "prefill_seconds": work,
        **changes,
    }
    return Observation(**fields)


def live(
    predictor: Predictor, count: int, seed: int = 1, noise: float = 0.3, start: int = 0
) -> None:
    """So many requests, one a second, on six workers and two at half their speed."""
    random = Random(seed)
    for second in range(start, start + count):
        worker = random.choice(FAST + SLOW)
        length = round(2 ** random.uniform(6, 16))
        cached = random.choice((0, random.randrange(length)))
        work = TRUTH.prefill(length, cached) * (1 + (worker in SLOW))
        work *= random.lognormvariate(0, noise)
        guess = predictor.model("m").prefill(length, cached) * predictor.speed(worker)
        predictor.observe(
            second,
            seen(
                worker,
                length,
                cached,
                work_seconds=work,
                prefill_seconds=work,
                predicted_ttft=guess,
            ),
        )


@pytest.mark.parametrize("seed", range(4))
def test_it_learns_lengths_and_speeds_together(seed: int):
    predictor = Predictor()
    live(predictor, 1500, seed)
    model = predictor.model("m")
    assert model.fitted
    for length, cached in ((200, 0), (4000, 0), (4000, 3000), (50_000, 0), (50_000, 49_000)):
        for workers, factor in ((FAST, 1), (SLOW, 2)):
            true = factor * TRUTH.prefill(length, cached)
            mean = sum(map(predictor.speed, workers)) / len(workers)
            assert mean * model.prefill(length, cached) == pytest.approx(true, rel=0.3)
    assert min(map(predictor.speed, SLOW)) > 1.3 * max(map(predictor.speed, FAST))
    assert predictor.poor("m") is None


def test_before_enough_was_seen_it_says_so():
    predictor = Predictor()
    assert predictor.model("m") == LatencyModel()
    live(predictor, 20)
    assert not predictor.model("m").fitted
    assert predictor.speed(FAST[0]) == 1.0
    live(predictor, 60, start=20)
    assert predictor.model("m").fitted


def test_fits_are_rare_while_they_would_change_nothing():
    def fits(noise: float) -> int:
        predictor, random, models = Predictor(), Random(1), [LatencyModel()]
        for second in range(1000):
            work = TRUTH.prefill(1000) * random.lognormvariate(0, noise)
            predictor.observe(second, seen(FAST[0], work_seconds=work))
            if predictor.model("m") != models[-1]:
                models.append(predictor.model("m"))
        return len(models) - 1

    assert 1 <= fits(0.01) <= 8
    assert fits(0.3) >= 15


def test_a_workers_first_requests_do_not_count():
    predictor = Predictor(PredictorConfig(skip=3, first_fit=5))
    for worker in FAST:
        for second in range(3):
            predictor.observe(second, seen(worker, work_seconds=100.0))
    assert not predictor.model("m").fitted
    for second in range(8):
        predictor.observe(second, seen(FAST[0]))
    assert predictor.model("m").prefill(1000) == pytest.approx(TRUTH.prefill(1000), rel=0.05)


def test_a_change_of_pace_is_noticed():
    predictor = Predictor()
    live(predictor, 600, noise=0.1)
    before = predictor.speed(FAST[0])
    for second in range(300):
        worker = FAST[second % 6]
        work = TRUTH.prefill(1000) * (3 if worker is FAST[0] else 1)
        predictor.observe(600 + second, seen(worker, work_seconds=work))
    assert predictor.speed(FAST[0]) > 1.5 * before
    assert predictor.speed(FAST[1]) < 1.2


def test_one_pause_of_a_machine_is_not_believed():
    predictor = Predictor()
    live(predictor, 600, noise=0.1)
    before = predictor.speed(FAST[0])
    predictor.observe(601, seen(FAST[0], work_seconds=300.0))
    assert predictor.speed(FAST[0]) < before + 0.3


@pytest.mark.parametrize(
    "changes",
    [
        {"work_seconds": 0.0},
        {"work_seconds": -1.0},
        {"work_seconds": float("nan")},
        {"work_seconds": float("inf")},
        {"prompt_tokens": 0},
        {"cached_tokens": 1000},
        {"cached_tokens": -1},
        {"queue_seconds": float("nan")},
        {"prefill_seconds": float("inf")},
        {"queue_seconds": -10.0},
    ],
)
def test_what_cannot_be_is_ignored(changes: dict[str, Any]):
    predictor = Predictor(PredictorConfig(skip=0, first_fit=1))
    predictor.observe(0.0, seen(FAST[0], **changes))
    assert predictor.model("m") == LatencyModel()
    assert predictor.calibration() == []


def test_chance_is_poor_and_blind_and_says_why():
    """Work has nothing to do with the prompt: neither time nor tokens predict it."""
    predictor, random = Predictor(), Random(1)
    for second in range(600):
        length, work = round(2 ** random.uniform(6, 16)), random.paretovariate(0.7)
        predictor.observe(second, seen(FAST[second % 6], length, work_seconds=min(work, 1000.0)))
    model = predictor.model("m")
    assert not model.fitted
    assert model.blind
    assert "requests are counted instead" in (predictor.poor("m") or "")


def test_the_reason_reads_the_same_as_long_as_it_lasts():
    """Each change of it is a line of the log."""
    predictor, random, told = Predictor(), Random(1), []
    for second in range(600):
        length, work = round(2 ** random.uniform(6, 16)), random.paretovariate(0.7)
        predictor.observe(second, seen(FAST[second % 6], length, work_seconds=min(work, 1000.0)))
        told.append(predictor.poor("m"))
    assert told.count(None) < 300
    assert len(set(told)) <= 3  # none, tokens, requests


def test_it_comes_back_when_predictions_are_good_again():
    predictor, random = Predictor(), Random(1)
    for second in range(600):
        length, work = round(2 ** random.uniform(6, 16)), random.paretovariate(0.7)
        predictor.observe(second, seen(FAST[second % 6], length, work_seconds=min(work, 1000.0)))
    live(predictor, 2500, noise=0.1, start=600)
    assert predictor.poor("m") is None
    assert predictor.model("m").fitted
    assert not predictor.model("m").blind


def test_probabilities_come_from_what_was_seen():
    predictor = Predictor()
    assert predictor.in_time("m", 1.0, 0.001) == 1.0  # nothing is known against it
    live(predictor, 2000)
    likely = [predictor.in_time("m", 1.0, limit, uncached=5000) for limit in (0.2, 1.0, 5.0)]
    assert likely[0] < 0.05 < 0.25 < likely[1] < 0.75 < 0.95 < likely[2]
    fresh, old = (predictor.in_time("m", 1.0, 0.5, uncached=5000, age=age) for age in (0.0, 1.0))
    assert fresh < old


def test_calibration_tells_buckets_and_workers():
    predictor = Predictor()
    live(predictor, 1000)
    (found,) = predictor.calibration()
    assert found.model == "m"
    assert found.time is predictor.model("m")
    assert 0.05 < found.error < 0.4
    assert set(found.workers) == set(FAST + SLOW) == set(found.speeds)
    assert sum(summary.count for summary in found.ttft.values()) > 300
    assert all(0.6 < summary.p50 < 1.5 for summary in found.ttft.values() if summary.count > 50)


def test_the_gone_are_forgotten_and_models_are_bounded():
    predictor = Predictor(PredictorConfig(max_models=3, skip=0))
    for number in range(10):
        predictor.observe(number, seen(life("a"), model=f"m{number}"))
    assert [found.model for found in predictor.calibration()] == ["m7", "m8", "m9"]
    live(predictor, 400)
    slow = predictor.speed(SLOW[0])
    predictor.worker_gone(SLOW[0])
    assert slow != predictor.speed(SLOW[0]) == 1.0
    predictor.worker_gone(SLOW[0])


def test_steps_are_learnt_from_reports():
    predictor, random = Predictor(PredictorConfig(refit_steps=100)), Random(1)
    truth = LatencyModel(step_base=0.008, step_sequence=5e-5, step_token=2e-8)
    for _ in range(1000):
        running = random.randint(1, 200)
        kv = running * random.randint(100, 8000)
        itl = truth.step(running, kv) * random.lognormvariate(0, 0.1)
        load = WorkerLoad(running=running, kv_tokens=kv, itl=itl)
        predictor.report(0.0, "m", FAST[0], load)
        predictor.report(
            0.0, "m", FAST[0], WorkerLoad(running=3, kv_tokens=9, itl=9.0, uncomputed_tokens=5)
        )
    found = predictor.model("m")
    for running, kv in ((1, 1000), (50, 50_000), (150, 900_000)):
        assert found.step(running, kv) == pytest.approx(truth.step(running, kv), rel=0.15)


def test_steps_that_nobody_tells_are_as_much_faster_as_prompts():
    """Workers that always compute prompts tell no step time, and the default is a slow GPU's."""
    predictor = Predictor()
    for second in range(60):
        length = 200 + 50 * second
        work = LatencyModel().prefill(length) / 4
        predictor.observe(second, seen(FAST[0], length, work_seconds=work))
    busy = WorkerLoad(running=100, kv_tokens=90_000, itl=0.1, uncomputed_tokens=4000)
    predictor.report(60.0, "m", FAST[0], busy)
    for sequences, kv in ((1, 1000), (100, 90_000)):
        expected = LatencyModel().step(sequences, kv) / 4
        assert predictor.model("m").step(sequences, kv) == pytest.approx(expected, rel=0.05)
    truth = LatencyModel(step_base=0.03)
    for number in range(20):
        load = WorkerLoad(running=1 + number, kv_tokens=0, itl=truth.step(1 + number, 0))
        predictor.report(100.0, "m", FAST[1], load)
    assert predictor.model("m").step(10, 0) == pytest.approx(truth.step(10, 0), rel=0.05)
    predictor.observe(101.0, seen(FAST[0], 300))
    assert predictor.model("m").step(10, 0) == pytest.approx(truth.step(10, 0), rel=0.05)


def test_a_prefill_shows_in_no_step_time():
    """A worker tells a mean of its last steps, which a prefill makes longer for a while."""
    predictor = Predictor(PredictorConfig(refit_steps=50))
    predictor.observe(0.0, seen(FAST[0], 300))
    truth = LatencyModel(step_base=0.015, step_sequence=1e-4, step_token=3e-8)
    for number in range(300):
        busy = WorkerLoad(running=8, kv_tokens=9000, itl=0.1, uncomputed_tokens=4000)
        predictor.report(number * 2.0, "m", FAST[0], busy)
        for step in range(1, 5):
            running = 1 + number % 16
            kv = 600 * running
            itl = truth.step(running, kv) + 0.1 * 0.9 ** (20 * step)
            load = WorkerLoad(running=running, kv_tokens=kv, itl=itl)
            predictor.report(number * 2.0 + 0.35 * step, "m", FAST[0], load)
    found = predictor.model("m")
    assert found.step(8, 24_000) == pytest.approx(truth.step(8, 24_000), rel=0.15)


def test_reports_without_a_step_teach_nothing():
    predictor = Predictor(PredictorConfig(refit_steps=1))
    for load in (WorkerLoad(), WorkerLoad(running=2), WorkerLoad(itl=0.1)):
        predictor.report(0.0, "m", FAST[0], load)
    assert predictor.model("m") == LatencyModel()


def test_a_new_kind_of_prompts_is_learnt_soon():
    """What was fitted to short prompts says little of a long one's price."""
    predictor = Predictor(PredictorConfig(skip=0))
    for second in range(60):
        predictor.observe(second, seen(FAST[0], 16))
    assert predictor.model("m").prefill(8000) < 1.0
    for second in range(60, 66):
        predictor.observe(second, seen(FAST[0], 8000, work_seconds=2.0))
    assert predictor.model("m").prefill(8000) == pytest.approx(2.0, rel=0.15)


def long_ones_elsewhere(predictor: Predictor, count: int, start: int = 0) -> None:
    """A decode worker computes prompts of 100 to 500 tokens; a prefill worker those of 12,000."""
    random = Random(start)
    for second in range(start, start + count):
        length = 12_000 if second % 5 == 0 else random.randint(100, 500)
        noise = random.uniform(0.7, 1.3)
        found = seen(FAST[0], length, work_seconds=TRUTH.prefill(length) * noise)
        if length == 12_000:
            found = structs.replace(found, received_tokens=length, prefill_cached=0)
        predictor.observe(second, found)


def test_what_only_prefill_workers_compute_is_learnt_from_them():
    """Short prompts do not tell the price of a long one: it came out five times too high."""
    predictor = Predictor()
    long_ones_elsewhere(predictor, 400)
    found = predictor.model("m")
    assert found.fitted
    assert found.prefill(12_000) == pytest.approx(TRUTH.prefill(12_000), rel=0.15)
    assert found.prefill(300) == pytest.approx(TRUTH.prefill(300), rel=0.15)
    assert predictor.speed(FAST[0]) == pytest.approx(1.0, abs=0.1)


def test_own_prompts_of_a_kind_count_instead_of_those_computed_elsewhere():
    """Decode workers have slower GPUs than prefill workers here."""
    predictor = Predictor()
    long_ones_elsewhere(predictor, 200)
    for second in range(200, 260):
        predictor.observe(second, seen(FAST[0], 12_000, work_seconds=3.0))
    assert predictor.model("m").prefill(12_000) * predictor.speed(FAST[0]) == pytest.approx(
        3.0, rel=0.15
    )


def test_a_prompts_cached_part_was_not_computed_elsewhere():
    predictor = Predictor()
    for second in range(200):
        work = TRUTH.prefill(12_000, 11_000)
        cached = seen(FAST[0], 12_000, received_tokens=12_000, prefill_cached=11_000)
        predictor.observe(second, structs.replace(cached, work_seconds=work))
    found = predictor.model("m").prefill(12_000, 11_000)
    assert found == pytest.approx(TRUTH.prefill(12_000, 11_000), rel=0.1)


def test_moved_kv_is_no_prefill():
    predictor = Predictor()
    for second in range(200):
        predictor.observe(second, seen(FAST[0], 1000, received_tokens=1000, work_seconds=0.001))
    assert predictor.model("m") == LatencyModel()


def test_speeds_do_not_drift_where_the_form_fits_badly():
    """Usual prompts take a tenth less than the form allows beside the others: that is the form's
    error, and no reason for higher prices."""
    predictor, random = Predictor(), Random(5)
    for second in range(6000):
        usual = random.random() < 0.9
        length = 300 if usual else round(2 ** random.uniform(5, 14))
        work = TRUTH.prefill(length) * (0.85 if usual else 1.0)
        predictor.observe(second, seen(random.choice(FAST), length, work_seconds=work))
    assert predictor.model("m").prefill(12_000) == pytest.approx(TRUTH.prefill(12_000), rel=0.15)
    assert 0.8 < predictor.speed(FAST[0]) < 1.0


def test_prompts_from_elsewhere_teach_nothing_of_those_computed_here():
    predictor = Predictor()
    queue = QueueState(workers=1, credits=2)
    assert predictor.elsewhere("m", lambda model: queue) is None
    for index in range(200):
        remote = seen(FAST[0], 1000, received_tokens=1000, work_seconds=9.0, prefill_seconds=0.25)
        predictor.observe(float(index), remote)
    assert predictor.model("m") == LatencyModel()
    assert predictor.speed(FAST[0]) == 1.0
    away = predictor.elsewhere("m", lambda model: queue)
    assert away is not None
    assert away.model.prefill(1000) == pytest.approx(0.25, rel=0.05)
    for index in range(200):  # a decode worker that was told to do all by itself
        here = seen(FAST[0], 1000, elsewhere_wait=0.0, work_seconds=0.1)
        predictor.observe(200.0 + index, here)
    assert predictor.elsewhere("m", lambda model: queue) is None
    assert predictor.model("m").prefill(1000) == pytest.approx(0.1, rel=0.1)
