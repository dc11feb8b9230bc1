"""Traces that are made up."""

from __future__ import annotations

import itertools

import pytest

from pdserve.errors import ConfigError
from pdserve.sim.workloads.generate import (
    KINDS,
    Agentic,
    MultiTurn,
    SharedPrefix,
    Unique,
    generator,
)
from pdserve.sim.workloads.trace_request import length_of


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_one_trace(kind: str) -> None:
    one, same, other = (list(generator(kind, {"requests": "50"}, seed=s)) for s in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("kind", KINDS)
def test_what_all_kinds_keep(kind: str) -> None:
    requests = list(generator(kind, {"requests": "321"}, seed=3))
    assert [request.number for request in requests] == list(range(321))
    assert all(a.at <= b.at for a, b in itertools.pairwise(requests))
    for request in requests:
        assert length_of(request.pieces) >= 1
        assert request.output_tokens >= 1
        if request.after is not None:
            before = requests[request.after]
            assert request.after < request.number
            assert before.at == request.at, "a conversation is read at once"
            assert before.session == request.session != ""


def test_groups_share_their_prefix_and_nothing_else() -> None:
    requests = list(SharedPrefix(requests=100, groups=4, prefix=600, question=50))
    groups = {request.pieces[0] for request in requests}
    assert len(groups) == 4
    assert len({request.pieces[1] for request in requests}) == 100


def test_nothing_is_shared_by_unique_prompts() -> None:
    requests = list(Unique(requests=100))
    assert len({content for request in requests for content, _ in request.pieces}) == 100


def test_turns_follow_each_other_in_a_chain() -> None:
    requests = list(MultiTurn(requests=200, turns=5))
    followed = [request.after for request in requests if request.after is not None]
    assert len(followed) == len(set(followed)), "one question follows an answer"
    assert 0 < len(followed) < len(requests)


def test_agents_call_several_at_once_now_and_then() -> None:
    requests = list(Agentic(requests=300, fans=0.5, fan_out=4))
    followed = [request.after for request in requests if request.after is not None]
    most = max(followed.count(number) for number in set(followed))
    assert most == 4


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("multiturn", {}, "did you mean 'multi-turn'"),
        ("nothing", {}, "Known: shared-prefix"),
        ("unique", {"turns": "3"}, "unique has no option 'turns'. Options: seed"),
        ("unique", {"requests": "many"}, "is no number of its kind"),
        ("unique", {"requests": "-1"}, "requests must not be negative"),
        ("unique", {"rate": "0"}, "rate must be positive"),
    ],
)
def test_what_cannot_be_made_is_said(kind: str, options, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generator(kind, options)
