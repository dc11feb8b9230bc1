"""The windows of reports, from real instruments."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.launch.recent_windows import EngineRecent, FrontendRecent
from pdserve.messages.status import FrontendStats
from pdserve.observe.engine_metrics import EngineSample
from pdserve.observe.metrics import Metrics
from pdserve.observe.slo import SloVerdict
from pdserve.wire.codec import encode


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def answered(metrics: Metrics, model: str, times: int = 1) -> None:
    one = metrics.of_model(model)
    for _ in range(times):
        one.time_to_first_token.observe(0.03)
        one.inter_token_latency.observe(0.004, 9)
        one.request_prompt_tokens.observe(100)
        one.request_uncached_tokens.observe(60)
        one.judged([SloVerdict("ttft", "good"), SloVerdict("both", "bad", "decode")])
        one.ended("completed")


def test_a_frontend_tells_what_each_model_did_lately() -> None:
    metrics, clock = Metrics(), Clock()
    recent = FrontendRecent(metrics, clock)
    answered(metrics, "old", 3)
    for _ in range(20):
        clock.now += 1.0
        recent.note()
    answered(metrics, "new", 2)
    metrics.of_model("new").ended("overloaded")
    metrics.of_model("new").ended("cancelled")
    (new,), (minute_old, minute_new) = recent.windows()
    assert (new.model, minute_old.model) == ("new", "old")
    assert (new.requests, new.errors, new.output_tokens) == (4, 1, 20)
    assert (new.prompt_tokens, new.uncached_tokens) == (200, 120)
    assert (new.slo["ttft"], new.slo["both"]) == ((2, 0), (0, 2))
    assert new.seconds == pytest.approx(10.0)
    assert minute_old.seconds == pytest.approx(20.0)
    assert minute_new.ttft == new.ttft
    assert sum(new.itl.counts) == 18
    assert new.ttft.bounds[-1] == 0.04
    clock.now += 61.0
    assert recent.windows() != ((), ()), "no sample was noted since"
    recent.note()
    clock.now += 61.0
    assert recent.windows() == ((), ())


def test_a_report_of_many_models_stays_small() -> None:
    metrics, clock = Metrics(), Clock()
    recent = FrontendRecent(metrics, clock)
    for number in range(100):
        answered(metrics, f"model-{number}")
    windows = recent.windows()
    assert len(windows[0]) <= 65
    assert len(encode(FrontendStats(recent=windows[0], minute=windows[1]))) < 32_000


def test_a_worker_tells_what_its_engine_did_lately() -> None:
    clock = Clock()

    class Service:
        def __init__(self) -> None:
            self.counted: Any = {}

        def sample(self) -> EngineSample:
            return EngineSample(**self.counted)

    service: Any = Service()
    recent = EngineRecent(service, clock)
    service.counted = {"prompt_tokens": 50, "output_tokens": 5}
    for _ in range(15):
        clock.now += 1.0
        recent.note()
    service.counted = {"prompt_tokens": 150, "output_tokens": 25, "preemptions": 1}
    ten, minute = recent.windows()
    assert (ten.prompt_tokens, ten.output_tokens, ten.preemptions) == (100, 20, 1)
    assert (minute.prompt_tokens, minute.output_tokens, minute.seconds) == (150, 25, 15.0)
