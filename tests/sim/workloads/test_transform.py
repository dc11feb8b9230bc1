"""What is done to a trace before it is replayed."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from pdserve.errors import ConfigError
from pdserve.sim.workloads.generate import MultiTurn
from pdserve.sim.workloads.trace_request import TraceRequest
from pdserve.sim.workloads.transform import TraceTransform, transform_trace


def quantised(count: int = 200, every: float = 3.0) -> list[TraceRequest]:
    """Several requests in each instant."""
    return [TraceRequest(i, every * (i // 7), ((i, 10),), 1) for i in range(count)]


def test_without_a_wish_nothing_changes() -> None:
    assert list(transform_trace(quantised(), TraceTransform())) == quantised()


def test_jitter_puts_off_by_less_than_itself_and_keeps_order() -> None:
    was = {request.number: request.at for request in quantised()}
    now = list(transform_trace(quantised(), TraceTransform(jitter=3.0)))
    assert sorted(request.number for request in now) == sorted(was)
    assert all(0 <= request.at - was[request.number] <= 3.0 for request in now)
    assert all(a.at <= b.at for a, b in itertools.pairwise(now))
    assert len({request.at for request in now}) == len(now)


def test_jitter_follows_its_seed() -> None:
    one, same, other = (
        list(transform_trace(quantised(), TraceTransform(jitter=3.0, seed=s))) for s in (1, 1, 2)
    )
    assert one == same != other


def test_speed_divides_the_time_between_arrivals() -> None:
    fast = list(transform_trace(quantised(), TraceTransform(speed=4.0)))
    assert [request.at for request in fast] == [request.at / 4 for request in quantised()]


@pytest.mark.parametrize(
    "shape",
    [TraceTransform(speed=1e-12), TraceTransform(rate=1e-9), TraceTransform(jitter=4e9)],
    ids=["speed", "rate", "jitter"],
)
def test_arrivals_that_no_replay_reaches_are_refused(shape: TraceTransform) -> None:
    with pytest.raises(ConfigError, match="years after the beginning"):
        list(transform_trace(quantised(), shape))


def test_halves_make_the_whole_and_both_begin_at_zero() -> None:
    first = list(transform_trace(quantised(), TraceTransform(end=0.5)))
    second = list(transform_trace(quantised(), TraceTransform(begin=0.5)))
    assert [r.number for r in first + second] == [r.number for r in quantised()]
    assert first[0].at == 0.0
    assert 0.0 <= second[0].at < 3.0


def test_a_limit_counts_what_is_asked() -> None:
    kept = list(transform_trace(quantised(), TraceTransform(begin=0.5, limit=5)))
    assert len(kept) == 5
    assert [r.number for r in kept] == sorted(r.number for r in kept)


@pytest.mark.parametrize("seed", range(10))
def test_who_follows_one_that_was_left_out_is_left_out(seed: int) -> None:
    random = Random(seed)
    shape = TraceTransform(
        begin=random.choice((0.0, 0.3)),
        end=random.choice((0.7, 1.0)),
        jitter=random.choice((0.0, 5.0)),
        limit=random.randrange(5, 200),
        seed=seed,
    )
    seen: set[int] = set()
    for request in transform_trace(MultiTurn(seed=seed, requests=300), shape):
        assert request.after is None or request.after in seen
        seen.add(request.number)
    assert 0 < len(seen) <= shape.limit


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"begin": 0.5, "end": 0.5}, "is empty"),
        ({"end": 1.5}, "two fractions from 0 to 1"),
        ({"jitter": -1.0}, "jitter"),
        ({"speed": 0.0}, "speed"),
        ({"limit": -1}, "limit"),
    ],
)
def test_what_is_not_possible_is_said(wish, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TraceTransform(**wish)


def test_arrivals_are_drawn_at_a_rate() -> None:
    trace = [TraceRequest(number, 0.0, ((number, 5),), 1) for number in range(500)]
    shape = TraceTransform(rate=10)
    made = list(transform_trace(trace, shape))
    assert made == list(transform_trace(trace, shape))
    assert 40 < made[-1].at < 60
    assert [one.at for one in made] == sorted(one.at for one in made)
    late = list(transform_trace(trace, TraceTransform(rate=10, begin=0.5)))
    assert 200 < len(late) < 300
