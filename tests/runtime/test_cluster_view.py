"""One node's view as a record, from made-up members."""

from __future__ import annotations

import re
from dataclasses import replace

import msgspec
import pytest

from pdserve.ids import NodeId
from pdserve.messages.node import ModelSummary, NodeCard
from pdserve.messages.status import NodeReport, RouterStats
from pdserve.runtime.cluster_view import build_cluster_view, state_of
from pdserve.runtime.registry import Member

HASH = b"h" * 16
TINY = ModelSummary(
    name="tiny",
    aliases=("small",),
    max_model_len=64,
    vocab_size=100,
    block_size=32,
    tokenizer=HASH,
    tokenizer_config=HASH,
    engine="instant",
)


def member(name: str, role: str = "worker", *models: ModelSummary, **fields) -> Member:
    card = NodeCard(role=role, models=models, version="1.2.3", **fields)
    return Member(NodeId(name), 5000, f"{name}:7000", role, card)


def view(*members: Member, answers=None):
    me = member("r", "router")
    told = {NodeId(name): answer for name, answer in (answers or {}).items()}
    return build_cluster_view(cluster="test", me=me, members=members, answers=told, now=12.5)


def test_the_asked_node_is_a_member_of_its_own_view():
    status = view(answers={"r": NodeReport(router=RouterStats(3, 1, 2))})
    (only,) = status.members
    assert (status.asked, only.node, only.version) == ("r", "r", "1.2.3")
    assert only.report is not None
    assert only.report.router == RouterStats(3, 1, 2)


def test_members_are_listed_by_role_and_name():
    status = view(
        member("z"), member("x", "planner"), member("a"), member("f", "frontend"), member("b")
    )
    assert [m.node for m in status.members] == ["r", "f", "a", "b", "z", "x"]


def test_who_did_not_answer_is_listed_with_the_reason():
    status = view(
        member("a"), member("b"), answers={"a": "no answer", "b": NodeReport(reason="hm")}
    )
    _, a, b = status.members
    assert (a.silence, a.report) == ("no answer", None)
    assert (b.silence, b.report) == ("", NodeReport(reason="hm"))


def test_a_member_without_a_card_is_listed_with_what_is_known():
    status = view(replace(member("a"), card=None))
    assert status.members[1].address == "a:7000"
    assert status.members[1].started == 0
    assert status.members[1].reason.startswith("starting:")


@pytest.mark.parametrize(
    ("suspect", "reachable", "state"),
    [
        (False, True, "alive"),
        (True, True, "suspect"),
        (False, False, "unreachable"),
        (True, False, "unreachable"),
    ],
)
def test_an_own_lost_link_says_more_than_a_suspicion(suspect, reachable, state):
    assert state_of(replace(member("a"), suspect=suspect, reachable=reachable)) == state


def test_a_model_is_listed_once_with_all_who_serve_it():
    other = msgspec.structs.replace(TINY, max_model_len=128)
    status = view(
        member("b", "worker", TINY, started=1),
        member("a", "worker", TINY, started=2),
        member("c", "worker", other, started=3),
    )
    (model,) = status.models
    assert (model.name, model.aliases, model.workers) == ("tiny", ("small",), ("a", "b"))
    assert list(status.conflicts) == ["c"]
    assert "context length" in status.conflicts[NodeId("c")]


@pytest.mark.parametrize(
    ("first", "second", "promise"),
    [
        ("exact:native avx512", "exact:native avx512", "exact (native avx512)"),
        ("exact:native avx512", "exact:native avx2", "near ties may differ"),
        ("exact:native avx512", "bans", "near ties may differ"),
        (
            "exact:native avx512 close:float32",
            "exact:native avx512 close:float32",
            "exact (native avx512)",
        ),
        (
            "exact:native avx512 close:float32",
            "exact:native avx2 close:float32",
            "close (float32)",
        ),
        ("exact:native avx512 close:float32", "close:float32", "close (float32)"),
        ("exact:native avx512 close:float32", "bans", "near ties may differ"),
    ],
)
def test_tokens_are_exact_where_all_workers_compute_them_alike(first, second, promise):
    a, b = (
        msgspec.structs.replace(TINY, features=("grammar", *re.split(r" (?=close)", x)))
        for x in (first, second)
    )
    status = view(member("a", "worker", a), member("b", "worker", b))
    (model,) = status.models
    assert model.tokens == promise
    _, one, other = status.members
    assert one.tokens == ("exact (native avx512)",)
    assert other.tokens[0].startswith("exact") == second.startswith("exact")
