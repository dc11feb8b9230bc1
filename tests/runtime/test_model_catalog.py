from __future__ import annotations

from random import Random
from typing import Any

from pdserve.ids import NodeId
from pdserve.messages.node import ModelSummary, NodeCard
from pdserve.runtime.model_catalog import build_catalog
from pdserve.runtime.registry import Member


def offered(name: str = "tiny", **changes: Any) -> ModelSummary:
    fields: dict[str, Any] = {
        "name": name,
        "max_model_len": 64,
        "vocab_size": 100,
        "block_size": 32,
        "tokenizer": b"t" * 16,
        "tokenizer_config": b"c" * 16,
        "compat_hash": "x",
    }
    return ModelSummary(**fields | changes)


def worker(node: str, *offers: ModelSummary, started: int = 1) -> Member:
    card = NodeCard(role="worker", started=started, models=offers)
    return Member(NodeId(node), 1, f"{node}:1", "worker", card)


def prefiller(node: str, *offers: ModelSummary, started: int = 1) -> Member:
    card = NodeCard(role="worker", started=started, models=offers, mode="prefill")
    return Member(NodeId(node), 1, f"{node}:1", "worker", card)


def test_prefill_workers_serve_nobody_by_themselves() -> None:
    alone = prefiller("p", offered())
    assert build_catalog([alone]).names == {}
    both = build_catalog([alone, worker("d", offered(), started=2)])
    assert both.names["tiny"].workers == ("d",)
    assert both.names["tiny"].holder == "d"  # although the other was there first


def test_prefill_workers_must_have_the_same_model() -> None:
    found = build_catalog(
        [worker("d", offered()), prefiller("p", offered(compat_hash="y"), started=2)]
    )
    assert list(found.conflicts) == ["p"]
    assert found.names["tiny"].workers == ("d",)


def test_a_prefill_worker_that_was_there_first_shuts_nobody_out() -> None:
    for changes in ({"compat_hash": "y"}, {"max_model_len": 32}):
        first = prefiller("p", offered(**changes))
        found = build_catalog([first, worker("d", offered(), started=2)])
        assert list(found.conflicts) == ["p"]
        assert found.names["tiny"].workers == ("d",)
        assert found.names["tiny"].offer == offered()


def test_a_prefill_worker_may_have_a_longer_context_than_those_who_serve() -> None:
    long = prefiller("p", offered(max_model_len=128))
    found = build_catalog([long, worker("d", offered(), started=2)])
    assert not found.conflicts
    assert found.names["tiny"].offer.max_model_len == 64


def test_names_and_aliases_lead_to_those_who_serve_them() -> None:
    two = offered("other", aliases=("o", "other"))
    found = build_catalog([worker("b", offered()), worker("a", offered(), two)])
    assert {name: served.workers for name, served in found.names.items()} == {
        "tiny": ("a", "b"),
        "other": ("a",),
        "o": ("a",),
    }
    assert not found.conflicts


def test_members_without_a_card_or_a_model_serve_nothing() -> None:
    bare = Member(NodeId("x"), 1, "x:1", "worker")
    assert build_catalog([bare, worker("y")]).names == {}


def test_the_one_that_started_first_holds_the_name() -> None:
    late = worker("a", offered(engine="torch"), started=2)
    first = worker("b", offered(engine="sim"), started=1)
    served = build_catalog([late, first]).names["tiny"]
    assert (served.holder, served.offer.engine, served.workers) == ("b", "sim", ("a", "b"))


def test_another_model_under_the_same_name_is_a_conflict() -> None:
    for changed in (
        {"compat_hash": "y"},
        {"tokenizer": b"u" * 16},
        {"tokenizer_config": b"u" * 16},
        {"chat_template": b"u" * 16},
        {"max_model_len": 65},
    ):
        late = worker("a", offered(**changed), started=2)
        found = build_catalog([late, worker("b", offered())])
        assert found.names["tiny"].workers == ("b",)
        assert "'tiny'" in found.conflicts[NodeId("a")]


def test_a_worker_in_conflict_serves_none_of_its_names() -> None:
    """Nor does it hold one against those that come later."""
    first = worker("a", offered("one", aliases=("default",)), started=1)
    second = worker("b", offered("two", aliases=("default",)), started=2)
    third = worker("c", offered("two", compat_hash="z"), started=3)
    found = build_catalog([third, second, first])
    assert set(found.conflicts) == {"b"}
    assert found.names["default"].offer.name == "one"
    assert found.names["two"].workers == ("c",)


def test_workers_of_one_model_may_have_different_aliases() -> None:
    old = worker("a", offered(aliases=("x",)), started=1)
    new = worker("b", offered(aliases=("y",)), started=2)
    names = build_catalog([old, new]).names
    assert names["tiny"].workers == ("a", "b")
    assert (names["x"].workers, names["y"].workers) == (("a",), ("b",))
    assert names["y"].offer.name == "tiny"


def test_the_order_of_the_members_does_not_matter(seed: int) -> None:
    random = Random(seed)
    members = [
        worker(
            f"w{number}",
            offered(compat_hash=random.choice("xy"), aliases=(random.choice("ab"),)),
            started=random.randrange(3),
        )
        for number in range(8)
    ]
    once = build_catalog(members)
    random.shuffle(members)
    assert build_catalog(members) == once


def test_a_name_has_the_features_that_all_have_who_take_part_in_it() -> None:
    first = worker("a", offered(features=("bans", "grammar")))
    same = worker("b", offered(features=("grammar", "bans", "thinking")), started=2)
    assert build_catalog([first, same]).names["tiny"].offer.features == ("bans", "grammar")
    older = worker("c", offered(), started=3)
    assert build_catalog([first, older]).names["tiny"].offer.features == ()
    first_tokens = prefiller("p", offered(features=("bans",)), started=3)
    assert build_catalog([first, first_tokens]).names["tiny"].offer.features == ("bans",)
    stranger = worker("d", offered(compat_hash="y"), started=3)
    assert build_catalog([first, stranger]).names["tiny"].offer.features == ("bans", "grammar")
