"""The engine model takes the time of an engine that computes step by step."""

from __future__ import annotations

from collections import deque
from math import inf
from random import Random
from typing import TYPE_CHECKING

import pytest

from pdserve.perf_model.latency_model import LatencyModel
from pdserve.planner.what_if.engine_model import EngineModel, ModelledRequest
from pdserve.planner.what_if.records import CandidateWorker

if TYPE_CHECKING:
    from collections.abc import Sequence

MODEL = LatencyModel(0.002, 25e-6, 1e-10, 0.006, 10e-6, 5e-8, fitted=True)


def engine(**worker: int) -> EngineModel:
    return EngineModel(CandidateWorker(**worker), MODEL)  # type: ignore[arg-type]


def run(model: EngineModel, requests: Sequence[ModelledRequest]) -> None:
    waiting = deque(sorted(requests))
    while waiting or model.due < inf:
        if waiting and waiting[0].arrived < model.due:
            request = waiting.popleft()
            request.asked = request.arrived
            model.offer(request, request.arrived)
        else:
            model.wake(model.due)


def stepped(requests: Sequence[ModelledRequest], budget: int) -> dict[int, tuple[float, float]]:
    """First and last token of each request, by its place, computed one step after the other."""
    waiting = deque(sorted(requests))
    order = {id(request): number for number, request in enumerate(requests)}
    queue: list[list[int]] = []
    streams: dict[int, list[int]] = {}
    seen: dict[int, tuple[float, float]] = {}
    now = 0.0
    while waiting or queue or streams:
        if not queue and not streams:
            now = max(now, waiting[0].arrived)
        while waiting and waiting[0].arrived <= now:
            one = waiting.popleft()
            queue.append([order[id(one)], one.cached, one.prompt, one.output])
        n, room, tokens, pairs, begins, parts = len(streams), budget, len(streams), 0.0, False, 0
        kv = sum(length for length, _ in streams.values())
        room -= n
        done = []
        for item in queue:
            if room <= 0:
                break
            number, start, length, _ = item
            chunk = min(room, length - start)
            begins |= start == requests[number].cached
            parts += 1
            tokens += chunk
            pairs += (2 * start + chunk) * chunk
            room -= chunk
            item[1] += chunk
            if item[1] == length:
                done.append(item)
        compute = MODEL.per_token * tokens + MODEL.per_pair * pairs + MODEL.base * begins
        if not parts:
            compute = 0.0
        rest = MODEL.step_sequence * (n + parts) + MODEL.step_token * kv
        now += max(MODEL.step_base, compute) + rest
        for number, stream in list(streams.items()):
            stream[0] += 1
            stream[1] -= 1
            if not stream[1]:
                seen[number] = (seen[number][0], now)
                del streams[number]
        for item in done:
            queue.remove(item)
            seen[item[0]] = (now, now)
            if item[3] > 1:
                streams[item[0]] = [item[2] + 1, item[3] - 1]
    return seen


def test_a_prompt_alone_takes_its_own_time():
    request = ModelledRequest(1.0, 1500, 500, 11)
    run(engine(), [request])
    prefill = MODEL.prefill(1500, 500) + MODEL.step_sequence
    assert request.first == pytest.approx(1.0 + prefill)
    decode = sum(MODEL.step(1, 1501 + step) for step in range(10))
    assert request.end - request.first == pytest.approx(decode)


def test_a_long_prompt_delays_streams_by_its_chunks():
    stream, long = ModelledRequest(0.0, 100, 0, 200), ModelledRequest(0.5, 8192, 0, 1)
    run(engine(), [stream, long])
    alone = ModelledRequest(0.0, 100, 0, 200)
    run(engine(), [alone])
    delay = stream.end - alone.end
    assert 0.75 * MODEL.prefill(8192) < delay < MODEL.prefill(8192)


def test_a_slow_worker_takes_as_many_times_as_long():
    fast, slow = ModelledRequest(0.0, 3000, 0, 50), ModelledRequest(0.0, 3000, 0, 50)
    run(EngineModel(CandidateWorker(), MODEL), [fast])
    run(EngineModel(CandidateWorker(speed=3.0), MODEL), [slow])
    assert slow.end == pytest.approx(3 * fast.end)


@pytest.mark.parametrize("number", range(12))
def test_it_agrees_with_single_steps(number: int):
    """Within a step or so: prompts that fill whole steps alone keep the streams they began with."""
    random = Random(f"steps {number}")
    at, requests = 0.0, []
    for _ in range(60):
        at += random.expovariate(random.choice((4.0, 12.0)))
        prompt = random.choice((20, 300, 2000, 2048, 9000))
        cached = random.choice((0, prompt // 2))
        requests.append(ModelledRequest(at, prompt, cached, random.choice((1, 2, 40, 150))))
    expected = stepped(requests, 2048)
    run(engine(), requests)
    for place, request in enumerate(requests):
        first, end = expected[place]
        longest = 2048 * MODEL.per_token + MODEL.step_base
        assert request.first == pytest.approx(first, abs=1.5 * longest)
        assert request.end == pytest.approx(end, abs=3 * longest)
    ttft = sum(request.first - request.arrived for request in requests)
    oracle = sum(expected[place][0] - one.arrived for place, one in enumerate(requests))
    assert ttft == pytest.approx(oracle, rel=0.03)
    itl = sum(request.end - request.first for request in requests)
    oracle = sum(end - first for first, end in expected.values())
    assert itl == pytest.approx(oracle, rel=0.03)


def test_a_prompt_waits_for_kv_and_its_wait_is_not_called_a_queue():
    first, second = ModelledRequest(0.0, 600, 0, 200), ModelledRequest(0.0, 600, 0, 5)
    model = engine(kv_tokens=1000)
    run(model, [first, second])
    assert second.begun >= first.end
    assert second.begun - second.asked < 0.1
    assert model.held == 0


def test_a_prompt_that_is_larger_than_the_pool_still_ends_alone():
    request = ModelledRequest(0.0, 900, 0, 300)
    run(engine(kv_tokens=1000), [request])
    assert request.end > 0


def test_places_are_bounded():
    requests = [ModelledRequest(0.0, 10, 0, 50) for _ in range(5)]
    run(engine(max_sequences=2), requests)
    assert sorted(one.begun > 0.1 for one in requests) == [False, False, True, True, True]


def test_streams_that_outgrow_the_pool_give_way_and_end():
    requests = [ModelledRequest(0.0, 100, 0, 400) for _ in range(8)]
    model = engine(kv_tokens=2000)
    run(model, requests)
    assert all(one.end > 0 for one in requests)
    assert model.streams == 0
    assert model.pending == 0
    assert model.work == 0
    assert model.peak <= 2000 + 8


def test_present_streams_end_and_delay_others():
    busy, idle = engine(), engine()
    busy.resume(50, 100_000.0, [20] * 50)
    one, other = ModelledRequest(0.001, 10, 0, 30), ModelledRequest(0.001, 10, 0, 30)
    run(busy, [one])
    run(idle, [other])
    assert one.end > other.end
    assert busy.streams == 0
    assert busy.kv == 0


def test_what_routers_see_sinks_with_time():
    model = engine()
    request = ModelledRequest(0.0, 8000, 0, 1)
    request.asked = 0.0
    model.offer(request, 0.0)
    assert model.wait(0.0) == pytest.approx(request.price)
    assert model.wait(0.1) == pytest.approx(request.price - 0.1)
    assert model.wait(9.0) == pytest.approx(0.1 * request.price)


def test_streams_share_the_step_of_a_prompt():
    """Each of 100 streams has a token in the same matrix products, and its KV is read."""
    model = engine()
    model.resume(100, 20_000.0, [500] * 100)
    request = ModelledRequest(0.0, 1500, 0, 1)
    run(model, [request])
    step = MODEL.prefill(1500) + 100 * MODEL.per_token + 101 * MODEL.step_sequence
    expected = MODEL.step(100, 20_000) + step + 20_100 * MODEL.step_token
    assert request.computed == pytest.approx(expected, rel=1e-6)


def test_what_a_reservation_gives_back_is_used_at_once():
    model = engine(kv_tokens=3000)
    model.resume(1, 100.0, [2000])
    model.held = 2500.0
    request = ModelledRequest(0.0, 1000, 0, 1)
    request.asked = 0.0
    model.offer(request, 0.0)
    while model.due < 0.5:
        model.wake(model.due)
    assert request.begun < 0
    model.give_back(2500.0, 0.5)
    model.wake(model.due)
    assert 0.5 <= request.begun < 0.51
