"""Refused keys are told of by address, in a bounded number of lines."""

from __future__ import annotations

import pytest

from pdserve.frontend.access.api_keys import KeyRefused
from pdserve.frontend.access.auth_failures import AuthFailures
from pdserve.observe.metrics import Metrics
from tests.frontend.support import HELLO, frontend

UNKNOWN = KeyRefused("the API key is not known", "unknown")


def lines(caplog) -> list[str]:
    return [each.getMessage() for each in caplog.records if "refused an API key" in each.message]


@pytest.fixture
def metrics():
    return Metrics()


@pytest.fixture
def refusals(metrics):
    return AuthFailures(metrics, 0.0)


def test_an_address_is_told_of_now_and_then_with_what_came_before(refusals, metrics, caplog):
    for number in range(100):
        refusals.note(UNKNOWN, "192.0.2.1", number / 10)
    refusals.note(UNKNOWN, "192.0.2.1", 10.0)
    assert lines(caplog) == [
        "refused an API key from 192.0.2.1: unknown",
        "refused an API key from 192.0.2.1: unknown, 99 more before",
    ]
    assert metrics.api_keys_refused.labels("unknown").value == 101


def test_many_addresses_do_not_fill_the_log(refusals, caplog):
    for number in range(5000):
        refusals.note(UNKNOWN, f"192.0.{number // 256}.{number % 256}", 1.0)
    assert len(lines(caplog)) <= 61
    assert len(refusals._last) == 1024


def test_an_address_that_is_not_known_is_told_of_too(refusals, caplog):
    refusals.note(UNKNOWN, None, 0.0)
    assert lines(caplog) == ["refused an API key from an unknown address: unknown"]


async def test_a_request_that_is_refused_is_counted_and_told_of_without_its_key(tmp_path, caplog):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nkey = "a-key-of-this-test"\ntenant = "t"\n')
    keys.chmod(0o600)
    async with frontend(api_keys_file=keys) as client:
        for headers in (None, {"Authorization": "Basic x"}, {"x-api-key": "a-strangers-key"}):
            status, _, _ = await client.post("/v1/chat/completions", HELLO, headers)
            assert status == 401
        counts = client.service.metrics.api_keys_refused
        assert [counts.labels(each).value for each in ("missing", "malformed", "unknown")] == [
            1
        ] * 3
    assert lines(caplog) == ["refused an API key from 127.0.0.1: missing"]
    assert "strangers" not in caplog.text
