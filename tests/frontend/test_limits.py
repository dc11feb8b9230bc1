import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequest, Overloaded, RateLimited
from pdserve.frontend.keys import ApiKey, KeyLimits
from pdserve.frontend.limits import Admission, Bucket


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
    bucket, now, spent = Bucket(per_minute, 0.0), 0.0, 0.0
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
