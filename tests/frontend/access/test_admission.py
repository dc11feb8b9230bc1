import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest, Overloaded, RateLimited
from pdserve.frontend.access.admission import Admission, ConcurrencyLimit, TokenBucket
from pdserve.frontend.access.api_keys import ApiKey, KeyLimits


def key(name=b"1", **limits):
    return ApiKey(digest=name, tenant="t", limits=KeyLimits(**limits))


def test_the_frontends_bound_refuses_and_frees():
    admission = Admission(2, 1.0)
    first, _ = admission.admit(None, 0.0), admission.admit(None, 0.0)
    with pytest.raises(Overloaded) as caught:
        admission.admit(None, 0.0)
    assert caught.value.retry_after == 1.0
    assert not isinstance(caught.value, RateLimited)
    first.release(0, 0.0)
    first.release(0, 0.0)
    assert admission.in_flight == 1
    admission.admit(None, 0.0)


def test_a_keys_concurrency_is_its_own():
    admission, one, two = Admission(9, 1.0), key(max_concurrent_requests=1), key(b"2")
    ticket = admission.admit(one, 0.0)
    with pytest.raises(RateLimited):
        admission.admit(one, 0.0)
    admission.admit(two, 0.0)
    ticket.release(0, 0.0)
    admission.admit(one, 0.0)


def test_a_refused_request_holds_no_place():
    admission, limited = Admission(9, 1.0), key(requests_per_minute=1)
    admission.admit(limited, 0.0)
    with pytest.raises(RateLimited):
        admission.admit(limited, 0.0)
    assert admission.in_flight == 1


def held_by(admission, key=None):
    """What a refused client is told at 100 s."""
    with pytest.raises(Overloaded) as caught:
        admission.check(key, 100.0)
    return caught.value.retry_after


def test_who_finds_no_place_comes_back_when_the_oldest_has_ended():
    admission = Admission(2, 1.0)
    admission.admit(None, 0.0).release(0, 10.0)  # requests take 10 s
    admission.admit(None, 94.0)
    admission.admit(None, 98.0)
    assert held_by(admission) == pytest.approx(4.0 + 5.0)
    assert held_by(admission) == pytest.approx(4.0 + 10.0), "two places in 10 s"


def test_a_keys_own_places_have_their_own_pace():
    admission, one = Admission(99, 1.0), key(max_concurrent_requests=1)
    admission.admit(one, 0.0).release(0, 3.0)
    admission.admit(one, 99.0)
    assert held_by(admission, one) == pytest.approx(2.0 + 3.0)


def test_nobody_is_kept_away_for_longer_than_a_minute_nor_from_what_is_free_again():
    admission = Admission(10, 1.0)
    tickets = [admission.admit(None, 0.0) for _ in range(10)]
    tickets.pop().release(0, 100.0)
    tickets.append(admission.admit(None, 100.0))
    told = [held_by(admission) for _ in range(30)]
    assert max(told) == 60.0
    for ticket in tickets:
        ticket.release(0, 100.0)
    for _ in range(10):
        admission.admit(None, 100.0)
    assert held_by(admission) < 60.0 + 20.0
    assert admission.places.call_back(100.0) <= 60.0


@given(st.integers(8, 40), st.integers(1, 200), st.floats(0.01, 20))
def test_clients_that_obey_find_a_place_when_they_come_back(most, crowd, each):
    # A crowd comes at once; every request takes `each` seconds. Virtual time.
    places = ConcurrencyLimit(most, 1.0)
    places.take(0, -each)
    places.leave(0, 0.0)
    coming = [(0.0, client) for client in range(crowd)]
    ends: list[tuple[float, int]] = []
    refused: dict[int, int] = {}
    while coming:
        coming.sort(reverse=True)
        now, client = coming.pop()
        for end, number in [one for one in ends if one[0] <= now]:
            places.leave(number, end)
            ends.remove((end, number))
        if places.full:
            refused[client] = refused.get(client, 0) + 1
            coming.append((now + math.ceil(places.call_back(now)), client))  # as HTTP says it
        else:
            places.take(1 + client, now)
            ends.append((now + each, 1 + client))
    if each * crowd / most < 60:  # longer nobody is sent away for
        assert sum(refused.values()) <= 1.5 * len(refused) + 2, "most need to be told once"


def test_requests_per_minute_say_when_to_come_back():
    admission, limited = Admission(9, 1.0), key(requests_per_minute=60)
    for _ in range(60):
        admission.admit(limited, 0.0).release(0, 0.0)
    with pytest.raises(RateLimited) as caught:
        admission.admit(limited, 0.25)
    assert caught.value.retry_after == pytest.approx(0.75)
    admission.admit(limited, 1.0)


def test_tokens_are_paid_before_for_prompts_and_after_for_output():
    admission, limited = Admission(9, 1.0), key(tokens_per_minute=600)
    ticket = admission.admit(limited, 0.0)
    ticket.check_tokens(500, 0.0)
    ticket.release(200, 0.0)  # 100 in debt
    later = admission.admit(limited, 5.0)
    with pytest.raises(RateLimited) as caught:
        later.check_tokens(10, 5.0)
    assert caught.value.retry_after == pytest.approx(6.0)
    later.check_tokens(10, 11.0)


def test_a_prompt_beyond_a_minutes_tokens_can_never_pass():
    ticket = Admission(9, 1.0).admit(key(tokens_per_minute=10), 0.0)
    with pytest.raises(InvalidRequest):
        ticket.check_tokens(11, 0.0)


def test_rereading_keys_starts_their_limits_afresh():
    admission, limited = Admission(9, 1.0), key(max_concurrent_requests=1)
    old = admission.admit(limited, 0.0)
    admission.forget_keys()
    admission.admit(limited, 0.0)
    old.release(0, 0.0)
    with pytest.raises(RateLimited):
        admission.admit(limited, 0.0)


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 500)), max_size=30),
)
def test_a_bucket_never_gives_more_than_a_minute_and_its_refill(per_minute, steps):
    bucket, now, spent = TokenBucket(per_minute, 0.0), 0.0, 0.0
    for pause, amount in steps:
        now += pause
        wait = bucket.wait(amount, now)
        if math.isinf(wait):
            assert amount > per_minute
        elif wait:
            assert bucket.wait(amount, now + wait * 1.001 + 1e-6) <= 1e-3
            now += wait * 1.001 + 1e-6
        else:
            bucket.spend(amount, now)
            spent += amount
    assert spent <= per_minute * (1 + now / 60) * 1.001 + 1e-6
