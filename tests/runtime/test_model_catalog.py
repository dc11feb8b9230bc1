from __future__ import annotations

from random import Random
from typing import Any

from pdserve.ids import NodeId
from pdserve.messages.lora import LoraSummary
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
    late = worker("a", offered(dtype="bfloat16"), started=2)
    first = worker("b", offered(dtype="float32"), started=1)
    served = build_catalog([late, first]).names["tiny"]
    assert (served.holder, served.offer.dtype, served.workers) == ("b", "float32", ("a", "b"))


def test_two_engines_under_one_name_are_refused_by_name() -> None:
    first = worker("b", offered(engine="torch"), started=1)
    late = worker("a", offered(engine="vllm"), offered("other"), started=2)
    found = build_catalog([late, first])
    assert found.names["tiny"].workers == ("b",)
    assert "other" not in found.names
    assert found.conflicts[NodeId("a")] == (
        "its 'tiny' is computed by the engine vllm, and the one served before it by torch: serve "
        "it under another name, or by one engine"
    )


def test_engines_may_differ_under_different_names() -> None:
    one, two = worker("a", offered(engine="torch")), worker("b", offered("big", engine="vllm"))
    found = build_catalog([one, two])
    assert not found.conflicts
    assert {name: served.workers for name, served in found.names.items()} == {
        "tiny": ("a",),
        "big": ("b",),
    }


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


# ---------------------------------------------------------------------- adapters


def adapted(*names: str, revision: str = "1", **changes: Any) -> ModelSummary:
    loras = tuple(LoraSummary(name=name, revision=revision) for name in names)
    return offered(loras=loras, **changes)


def test_an_adapter_is_a_name_of_the_workers_that_have_it() -> None:
    found = build_catalog(
        [worker("a", adapted("poet")), worker("b", adapted("clerk", "poet"), started=2)]
    )
    assert found.conflicts == {}
    assert found.names["tiny"].workers == found.names["poet"].workers == ("a", "b")
    assert found.names["clerk"].workers == ("b",)
    for entry in found.names.values():
        assert [lora.name for lora in entry.offer.loras] == ["clerk", "poet"]
        assert entry.offer.name == "tiny"


def test_workers_without_adapters_share_the_model() -> None:
    found = build_catalog([worker("a", offered()), worker("b", adapted("poet"), started=2)])
    assert found.names["tiny"].workers == ("a", "b")
    assert found.names["poet"].workers == ("b",)
    assert found.conflicts == {}


def test_other_files_under_one_adapters_name_are_refused_by_name() -> None:
    first, second = adapted("poet", revision="1f"), adapted("clerk", "poet", revision="2e")
    for members in ([("a", first, 1), ("b", second, 2)], [("b", second, 2), ("a", first, 1)]):
        found = build_catalog([worker(n, offer, started=at) for n, offer, at in members])
        assert found.conflicts == {
            "b": "its adapter 'poet' has other files (revision 2e) than the one served before it "
            "(revision 1f)"
        }
        assert found.names["poet"].workers == found.names["tiny"].workers == ("a",)
        assert "clerk" not in found.names


def test_an_adapter_and_a_model_cannot_share_a_name() -> None:
    model = worker("a", offered("poet", compat_hash="y"))
    found = build_catalog([model, worker("b", adapted("poet"), started=2)])
    assert list(found.conflicts) == ["b"]
    assert "another model" in found.conflicts[NodeId("b")]
    alias = worker("a", offered(aliases=("poet",)))
    found = build_catalog([alias, worker("b", adapted("poet"), started=2)])
    assert found.conflicts[NodeId("b")].startswith(
        "its 'poet' is an adapter, and the model is served"
    )
    found = build_catalog([worker("b", adapted("poet")), replace_start(alias, 2)])
    assert found.conflicts[NodeId("a")].startswith(
        "its 'poet' is the model, and an adapter is served"
    )


def replace_start(member: Member, started: int) -> Member:
    assert member.card is not None
    return worker(member.node, *member.card.models, started=started)


def test_an_adapter_that_only_prefill_workers_have_is_not_served() -> None:
    found = build_catalog([prefiller("p", adapted("poet")), worker("d", offered(), started=2)])
    assert set(found.names) == {"tiny"}
    assert found.names["tiny"].offer.loras == ()


def test_a_prefill_worker_with_other_files_is_refused_and_one_without_is_not() -> None:
    serves = worker("d", adapted("poet"))
    other = prefiller("p", adapted("poet", revision="2"), started=2)
    assert list(build_catalog([serves, other]).conflicts) == ["p"]
    assert build_catalog([serves, prefiller("p", offered(), started=2)]).conflicts == {}
