"""An account notices what a caller must never hear."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from pdserve.errors import EngineDied
from pdserve.messages.request import Finish, FirstTokenStats, TokenDelta
from pdserve.testing.scripted import reference_tokens
from tests.worlds.load_clients import TrackedRequest, draw_request

STARTED = FirstTokenStats(0, 0.0, 0.0, 0.0)


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def account(seed: int, complaints: list[str]) -> TrackedRequest:
    request = draw_request(random.Random(seed), "q", "m")
    plain = replace(request.sampling, logprobs=None, prompt_logprobs=None)  # none come here
    request = replace(request, sampling=plain)
    return TrackedRequest("q", request, 0.0, complaints.append)


def deltas(account: TrackedRequest) -> list[TokenDelta]:
    request = account.request
    every = []
    for choice in range(request.n):
        tokens = reference_tokens(request, choice, max_len=200)
        length = len(tokens) == request.sampling.max_tokens and tokens[-1] != 2
        finish = Finish(
            reason="length" if length else "stop",
            prompt_tokens=len(request.prompt),
            completion_tokens=len(tokens),
        )
        every.append(TokenDelta(1, choice, tokens, finish, started=STARTED))
    return every


def test_the_right_tokens_once_are_right(account: TrackedRequest, complaints: list[str]) -> None:
    for delta in deltas(account):
        account.on_delta(delta)
    assert account.outcome == "completed"
    assert complaints == []


def test_a_second_end_is_a_violation(account: TrackedRequest, complaints: list[str]) -> None:
    account.on_error(EngineDied("dead"))
    account.on_error(EngineDied("dead"))
    assert complaints == ["q ended twice: failed EngineDied, then failed EngineDied"]


def test_tokens_after_the_end_are_a_violation(
    account: TrackedRequest, complaints: list[str]
) -> None:
    account.end("cancelled")
    account.on_delta(deltas(account)[0])
    assert complaints == ["q hears of tokens after its end: cancelled"]


def test_other_tokens_are_a_violation(account: TrackedRequest, complaints: list[str]) -> None:
    wrong = (reference_tokens(account.request, 0, max_len=200)[0] + 1) % 97
    account.on_delta(TokenDelta(1, 0, [wrong], started=STARTED))
    account.end("cancelled")
    assert "are not the engine's" in complaints[0]


def test_a_first_token_without_its_story_is_a_violation(
    account: TrackedRequest, complaints: list[str]
) -> None:
    account.on_delta(TokenDelta(1, 0, reference_tokens(account.request, 0, max_len=200)[:1]))
    assert complaints == ["q: the first token does not say how it came about"]
    account.end("cancelled")
