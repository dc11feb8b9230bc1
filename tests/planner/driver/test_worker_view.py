from __future__ import annotations

from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdserve.ids import NodeId
from pdserve.messages.mode import ModeReport
from pdserve.messages.node import NodeCard
from pdserve.messages.planner import Instance
from pdserve.messages.routing import WorkerLoad
from pdserve.messages.status import DrainState, NodeReport
from pdserve.planner.changes.ids import change_id
from pdserve.planner.config import PoolConfig
from pdserve.planner.driver.worker_view import Sighting, fixed_workers, model_of, worker_view
from pdserve.runtime.registry import Member
from tests.planner.driver.site import SUMMARY
from tests.planner.support import worker

if TYPE_CHECKING:
    from pdserve.planner.pool import Worker

CARD = NodeCard(
    role="worker", models=(SUMMARY,), mode="decode", transfers=("tcp",), mode_generation=3
)
READY = WorkerLoad(
    ready=True, running=3, waiting=2, blocks_total=100, blocks_cached=5, kv_tokens=70
)


def seen(
    card: NodeCard = CARD, report: NodeReport | None = None, speed: float = 2.0, **more: Any
) -> Worker:
    member = Member(NodeId("w"), 7, "w:7000", "worker", card)
    sighting = Sighting(member, **{"load": READY, "report": report} | more)
    found = worker_view(sighting, "m", {NodeId("w"): speed})
    assert found is not None
    return found


def test_a_ready_worker() -> None:
    worker = seen(instance=Instance(change="c", kind="gpu", hard_end=60.0))
    assert (worker.state, worker.mode, worker.generation, worker.speed) == (
        "ready",
        "decode",
        3,
        2.0,
    )
    assert (worker.kv_tokens, worker.running, worker.live_tokens, worker.hot_tokens) == (
        *(1600, 5, 70, 80),
    )
    assert (worker.kind, worker.hard_end, worker.can_switch) == ("gpu", 60.0, True)


def test_speeds_that_cannot_be_are_not_believed() -> None:
    told = (1e-9, 1e9, float("nan"), float("inf"), 1.4)
    assert [seen(speed=one).speed for one in told] == [0.1, 10.0, 1.0, 1.0, 1.4]


def test_its_paths_tell_how_fast_kv_moves_until_it_is_measured() -> None:
    card = replace(CARD, kv_block_bytes=16 * 320_000, disagg="predict")
    assert (seen(card).disagg, seen(card).transfer_token) == ("predict", 320_000 / 1.25e9)
    for paths, rate in ((("rdma", "tcp"), 12.5e9), (("shm", "tcp"), 1.25e9), (("shm",), 5e9)):
        assert seen(replace(card, transfers=paths)).transfer_token == 320_000 / rate
    for unknown in (replace(card, transfers=("odd",)), replace(card, kv_block_bytes=0), CARD):
        assert seen(unknown).transfer_token == 0.0
    assert seen(card).measured_token == 0.0
    assert seen(card, load=replace(READY, transfer_token=2e-5)).measured_token == 2e-5


def test_both_is_told_from_aggregated_by_its_share() -> None:
    card = replace(CARD, mode="aggregated", prompt_share=0.3)
    assert (seen(card).mode, seen(card).share) == ("both", 0.3)
    assert seen(replace(card, prompt_share=0.0)).mode == "aggregated"


def test_its_state_is_that_of_its_card_and_of_its_own_report() -> None:
    assert seen(replace(CARD, models=(), reason="starting")).state == "loading"
    assert seen(load=replace(READY, ready=False)).state == "loading"
    assert seen(load=None).state == "ready"
    leaving = replace(CARD, leaving=True)
    assert seen(leaving).state == "leaving"
    mode = ModeReport(mode="decode", state="proving", target="prefill")
    proving = seen(leaving, NodeReport(mode=mode))
    assert (proving.state, proving.target) == ("proving", "prefill")
    back = seen(CARD, NodeReport(mode=ModeReport(state="serving", target="x", failed="no KV")))
    assert (back.state, back.target, back.failed) == ("ready", "", "no KV")


def test_a_drain_is_a_planners_if_it_has_a_term() -> None:
    draining = replace(CARD, draining=True)
    assert not seen(draining).ordered
    assert not seen(draining, NodeReport(drain=DrainState())).ordered
    ordered = seen(draining, NodeReport(drain=DrainState(term=9)))
    assert (ordered.state, ordered.ordered) == ("draining", True)


def test_a_drain_has_the_workers_own_limit_if_it_says_one() -> None:
    draining = replace(CARD, draining=True)
    assert seen(draining).drain_left is None
    for said, known in ((70.0, 70.0), (-1.0, 0.0), (float("nan"), None), (float("inf"), None)):
        report = NodeReport(drain=DrainState(term=9, remaining=said))
        assert seen(draining, report).drain_left == known


def test_an_engine_without_kv_and_an_old_release_keep_their_mode() -> None:
    assert not seen(replace(CARD, transfers=())).can_switch
    assert not seen(replace(CARD, mode_generation=0)).can_switch


def test_a_worker_that_loads_has_the_model_that_it_was_started_for() -> None:
    loading = NodeCard(role="worker", change=change_id("b", "decode", 1, 1, 0))
    assert model_of(loading, "", ["a", "b"]) == "b"
    assert model_of(loading, "a", ["a", "b"]) == "a"
    assert model_of(NodeCard(role="worker", change="by-hand"), "", ["a"]) == ""
    assert model_of(CARD, "", []) == "m"


def test_one_without_a_card_is_not_seen() -> None:
    assert worker_view(Sighting(Member(NodeId("w"), 1, "", "worker")), "m", {}) is None


def test_workers_whose_mode_is_fixed_are_named_where_there_is_a_choice() -> None:
    fixed = with_fields(worker(1), can_switch=False)
    second, third, last = (with_fields(worker(n), can_switch=n == 2) for n in (2, 3, 4))
    workers = (fixed, with_fields(second, mode="decode"), third, with_fields(last, state="loading"))
    modes: Any = ("aggregated", "decode", "prefill")
    pools = (PoolConfig(model="m", modes=modes), PoolConfig(model="other", modes=modes))
    names = (fixed.node, third.node)
    assert fixed_workers(pools, workers) == {"m": names}
    assert fixed_workers((PoolConfig(model="m"),), workers) == {"m": names}
    assert fixed_workers((PoolConfig(model="m"),), (fixed,)) == {}
