"""Reading of results: copies, positions, logprobs, ends and statistics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.errors import InvalidRequest, StepFailed
from pdserve_engines.tensorrt_llm.choices import error_of, failure_of
from pdserve_engines.tensorrt_llm.outputs import (
    PoolStats,
    end_of,
    new_logprobs,
    new_tokens,
    pool_stats,
)
from tests.engines.tensorrt_llm.fake_llm import RequestError


def output(tokens: list[int], logprobs: Any = None, reason: str | None = None) -> Any:
    return SimpleNamespace(token_ids=tokens, logprobs=logprobs, finish_reason=reason)


def entry(**logprobs: float) -> dict[int, Any]:
    return {
        int(name[1:]): SimpleNamespace(logprob=value, rank=None) for name, value in logprobs.items()
    }


def test_tokens_are_copied_and_counted_by_position():
    shared = [5, 6]
    first = new_tokens(output(shared), 0)
    shared.append(7)
    assert first == [5, 6]
    assert new_tokens(output(shared), 2) == [7]


def test_logprobs_have_the_sampled_token_and_the_likeliest_others():
    given = [entry(t5=-1.0, t6=-0.5, t7=-3.0)]
    (found,) = new_logprobs(output([5], given), 0, 1, 2)
    assert (found.token, found.logprob, found.rank) == (5, -1.0, 2)
    assert found.top == [(6, -0.5), (5, -1.0)]


def test_no_alternatives_are_given_if_none_are_asked_for():
    (found,) = new_logprobs(output([5], [entry(t5=-1.0, t6=-0.5)]), 0, 1, 0)
    assert found.top == []


def test_positions_of_logprobs_count_from_the_end():
    """A handed-over request has none for its first token."""
    given = [entry(t6=-1.0), entry(t7=-2.0)]
    found = new_logprobs(output([5, 6, 7], given), 1, 2, 1)
    assert [each.token for each in found] == [6, 7]
    (last,) = new_logprobs(output([5, 6, 7], given), 2, 1, 1)
    assert last.token == 7


def test_plain_numbers_are_logprobs_without_alternatives():
    (found,) = new_logprobs(output([5], [-0.25]), 0, 1, 2)
    assert (found.logprob, found.top) == (-0.25, [])


@pytest.mark.parametrize(
    ("reason", "finished", "end"),
    [
        (None, False, ""),
        ("stop", True, "stop"),
        ("length", True, "length"),
        ("cancelled", True, "cancelled"),
        ("timeout", True, "timeout"),
        ("not_finished", True, "prefilled"),
        (None, True, "error"),
        ("something new", True, "error"),
    ],
)
def test_only_a_known_reason_is_a_normal_end(reason, finished, end):
    assert end_of(output([], None, reason), finished) == end
    failure = failure_of(end)
    assert (failure is None) == (end in ("", "stop", "length"))
    if failure is not None:
        assert isinstance(failure, StepFailed)


def test_errors_of_one_request_and_of_the_engine_are_told_apart():
    assert isinstance(error_of(RequestError("full")), StepFailed)
    assert isinstance(error_of(ValueError("too long")), InvalidRequest)
    own = StepFailed("x")
    assert error_of(own) is own
    assert error_of(RuntimeError("LLM is shutting down")) is None
    assert error_of(AssertionError()) is None


def test_statistics_survive_missing_fields():
    assert pool_stats({}) == PoolStats()
    assert pool_stats({"kvCacheStats": None, "numQueuedRequests": 2}).waiting == 2
