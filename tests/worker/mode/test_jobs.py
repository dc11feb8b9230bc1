"""Which worker is needed, as its own view of the cluster says."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from pdserve.ids import NodeId
from pdserve.messages.engine import PathState
from pdserve.messages.node import NodeCard, summarize_card
from pdserve.runtime.registry import Member
from pdserve.worker.mode.jobs import card_mode, jobs_of, undone_without, unreachable_decode
from tests.worker.disagg.cluster import CARD

ME = NodeId("w5")
OFFER = summarize_card(CARD)[0]


def worker(name: str, mode: Any, *, suspect: bool = False, **fields: Any) -> Member:
    card = NodeCard(role="worker", mode=mode, models=(OFFER,), transfers=("shm",))
    return Member(NodeId(name), 1, "", "worker", replace(card, **fields), suspect)


def undone(mode: Any, target: Any, *others: Member, sure: bool = False) -> str:
    return undone_without(ME, mode, target, ["m"], others, sure=sure)


def test_both_is_aggregated_to_those_who_do_not_know_it() -> None:
    assert [card_mode(mode) for mode in ("aggregated", "prefill", "decode", "both")] == [
        *("aggregated", "prefill", "decode", "aggregated")
    ]
    assert jobs_of("both") > jobs_of("aggregated")
    assert jobs_of("a mode of a later release") == frozenset()


def test_the_last_one_is_needed_for_the_jobs_that_it_gives_up() -> None:
    assert "takes requests" in undone("aggregated", "prefill", worker("p", "prefill"))
    assert "has its prompts" in undone("decode", "prefill", worker("a", "aggregated"))
    assert "computes prompts" in undone("prefill", "decode", worker("d", "decode"))
    assert undone("decode", "prefill", worker("d", "decode")) == ""
    assert undone("prefill", "both") == ""
    assert undone("aggregated", "decode") == ""
    assert undone("aggregated", "prefill", worker("d", "decode")) == ""
    assert "has its prompts" in undone("decode", "aggregated", worker("p", "prefill"))
    swing = worker("b", "aggregated", prompt_share=0.5)
    assert undone("prefill", "decode", swing) == ""


def test_nobody_needs_prompts_where_nobody_decodes() -> None:
    assert undone("prefill", "", worker("a", "aggregated")) == ""
    assert undone("prefill", "aggregated", worker("a", "aggregated")) == ""
    assert undone("prefill", "", worker("d", "decode", models=())) == ""
    resting = worker("d", "decode", suspect=True, reason="the engine restarts")
    assert "computes prompts" in undone("prefill", "", resting)
    assert "computes prompts" in undone("prefill", "decode", worker("a", "aggregated"))


def test_nobody_needs_decoding_where_nobody_computes_prompts() -> None:
    others = worker("a", "aggregated"), worker("b", "aggregated", prompt_share=0.5)
    assert undone("decode", "", *others) == ""
    assert undone("decode", "aggregated", *others) == ""
    assert undone("decode", "", others[0], worker("p", "prefill", models=())) == ""
    resting = worker("p", "prefill", suspect=True, reason="the engine restarts")
    assert "has its prompts" in undone("decode", "", others[0], resting)
    assert "takes requests" in undone("decode", "")


def test_others_count_only_if_they_are_there_and_ready() -> None:
    for other in (
        worker("d", "decode", suspect=True),
        worker("d", "decode", draining=True),
        worker("d", "decode", reason="the engine restarts"),
        worker("d", "decode", models=()),
        worker("d", "decode", models=(replace(OFFER, name="another"),)),
        worker(ME, "decode"),
    ):
        assert undone("decode", "prefill", other), other


def test_of_two_that_leave_at_once_exactly_one_stays() -> None:
    greater = worker("w9", "decode", leaving=True, reason="changing its mode")
    smaller = worker("w1", "decode", leaving=True, reason="changing its mode")
    assert undone("decode", "prefill", greater) == ""
    assert undone("decode", "prefill", smaller)
    assert undone("decode", "prefill", greater, sure=True)  # its order may say --last


def test_a_worker_whose_both_modes_take_requests_goes_on_taking_them() -> None:
    swing = worker("w1", "aggregated", leaving=True)
    assert undone("aggregated", "prefill", swing, sure=True) == ""
    swing = worker("w1", "aggregated", leaving=True, prompt_share=0.5)
    assert "computes prompts" in undone("prefill", "decode", swing)


def test_a_worker_that_computes_prompts_reaches_some_decode_worker() -> None:
    cut = PathState(node="d", epoch=1, backend="none", down="refused")

    def missing(*others: Member, paths: tuple[PathState, ...] = ()) -> str:
        return unreachable_decode("m", ("shm",), paths, others)

    assert missing() == ""
    assert missing(worker("a", "aggregated"), paths=(cut,)) == ""
    assert missing(worker("d", "decode")) == ""
    assert missing(worker("d", "decode"), paths=(cut,)) == "no KV can reach d"
    assert missing(worker("d", "decode"), worker("e", "decode"), paths=(cut,)) == ""
    assert missing(worker("d", "decode", transfers=("rdma",))) == "no KV can reach d"
