"""Who serves what, how busy it looks, and what is remembered of models that left."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.ids import NodeId
from pdserve.messages.card import ModelCard
from pdserve.messages.lora import LoraSummary
from pdserve.messages.node import NodeCard, summarize_card
from pdserve.messages.routing import WorkerLoad
from pdserve.router.bookings import Bookings
from pdserve.router.config import RouterConfig
from pdserve.router.policies.base import WorkerKv, WorkerView
from pdserve.router.worker_table import ModelView, WorkerEligibility, WorkerFacts, WorkerTable
from pdserve.runtime.registry import Member
from tests.router.support import facts, life, load

CONFIG = RouterConfig(gone_model_memory=300.0, gone_models=2, assumed_max_sequences=16)


class World:
    """A pool and its ledger, told the same."""

    def __init__(self):
        self.bookings = Bookings(CONFIG, Random(1))
        self.pool = WorkerTable(CONFIG, self.bookings)

    def put(self, worker: WorkerFacts, now=0.0):
        self.bookings.worker_up(worker.worker)
        self.pool.put(now, worker)

    def view(self, model="m", now=0.0) -> ModelView:
        return self.pool.view(now, model)

    def only(self, model="m") -> WorkerView:
        (worker,) = self.view(model).sound
        return worker

    def nodes(self, model="m"):
        view = self.view(model)
        return [w.node for w in view.sound], [w.node for w in view.doubtful]


@pytest.fixture
def world() -> World:
    return World()


# ------------------------------------------------------------------ who


def test_workers_stand_in_order_of_their_ids_whenever_they_came(world):
    for node in ("w3", "w1", "w2"):
        world.put(facts(node))
    assert world.nodes() == (["w1", "w2", "w3"], [])


def test_a_worker_stands_under_each_of_its_names(world):
    world.put(facts("w1", "m", "alias"))
    world.put(facts("w2", "other"))
    assert world.nodes("alias") == world.nodes("m") == (["w1"], [])
    assert world.view("none") == ModelView()


@pytest.mark.parametrize(
    ("changes", "report", "standing"),
    [
        ({}, None, WorkerEligibility.SOUND),
        ({}, load(), WorkerEligibility.SOUND),
        ({"suspect": True}, load(), WorkerEligibility.DOUBTFUL),
        ({"reachable": False}, None, WorkerEligibility.DOUBTFUL),
        ({}, load(ready=False), WorkerEligibility.UNREADY),
        ({"suspect": True}, load(ready=False), WorkerEligibility.UNREADY),
        ({"draining": True, "reachable": False}, load(), WorkerEligibility.DRAINING),
        ({"draining": True}, load(ready=False), WorkerEligibility.DRAINING),
        ({"prefill": True, "draining": True}, load(ready=False), WorkerEligibility.PREFILL),
    ],
)
def test_where_a_worker_stands(world, changes, report, standing):
    world.put(facts("w1", **changes))
    world.pool.report(life("w1"), report)
    assert world.pool.models() == {"m": {standing: 1}}
    view = world.view()
    counts = (len(view.sound), len(view.doubtful), view.draining, view.unready, view.prefill)
    order = tuple(WorkerEligibility)
    assert counts == tuple(int(one is standing) for one in order)


def test_nobody_asks_a_prefill_worker(world):
    world.put(facts("w1", prefill=True))
    world.put(facts("w2"))
    assert world.nodes() == (["w2"], [])
    assert [view.node for _, view in world.pool.workers("m")] == ["w2"]


def test_what_others_compute_for_a_decode_worker_is_not_its_work(world):
    world.put(facts("w1", decode=True))
    world.put(facts("w2"))
    for name in ("w1", "w2"):
        booking = world.bookings.place(0.0, life(name), life("f"), 1, 1000, work=0.5)
        world.bookings.held(life(name), booking.id)
    before = {view.node: view for view in world.view().sound}
    for name in ("w1", "w2"):  # it has the request, and nothing to compute
        world.bookings.reported(life(name))
        world.pool.report(life(name), load(1, uncomputed_tokens=0))
    after = {view.node: view for view in world.view().sound}
    assert before["w1"].work == before["w2"].work == after["w2"].work == 0.5
    assert (after["w1"].work, after["w1"].head, after["w1"].prefill_tokens) == (0.0, 0.0, 0)
    assert after["w2"].prefill_tokens == 1000
    assert [after[name].decode for name in ("w1", "w2")] == [True, False]


def test_it_may_come_back_from_any_standing(world):
    world.put(facts("w1"))
    world.put(facts("w2"))
    for changes in ({"suspect": True}, {}, {"draining": True}, {}, {"reachable": False}, {}):
        world.put(facts("w1", **changes))
    world.pool.report(life("w1"), load(ready=False))
    world.pool.report(life("w1"), load())
    assert world.nodes() == (["w1", "w2"], [])


def test_an_earlier_life_is_over_and_its_report_with_it(world):
    world.put(facts("w1"))
    world.pool.report(life("w1"), load(5))
    world.put(facts("w1", epoch=2))
    assert (world.only().epoch, world.only().sequences) == (2, 0)
    world.put(facts("w1", "old"))
    world.pool.report(life("w1"), load(7))
    world.pool.gone(0.0, life("w1"))
    assert (world.only().epoch, world.only().sequences) == (2, 0)
    assert world.view("old") == ModelView()


def test_a_member_becomes_a_worker_with_its_card():
    member = Member(NodeId("w1"), 7, "h:1", "worker", None, suspect=True)
    assert WorkerFacts.of(member) == WorkerFacts(life("w1", 7), ())
    model = ModelCard(
        name="m",
        aliases=("a", "m"),
        max_model_len=1,
        vocab_size=1,
        block_size=1,
        tokenizer_json=b"",
        loras=(LoraSummary(name="poet", revision="1"),),
    )
    card = NodeCard(models=(summarize_card(model)[0],), draining=True, max_sequences=4)
    member = Member(NodeId("w1"), 7, "h:1", "worker", card, suspect=True, reachable=False)
    assert WorkerFacts.of(member) == WorkerFacts(
        life("w1", 7), ("m", "a"), True, True, False, 4, frozenset({"poet@1"})
    )


def test_a_card_says_how_a_worker_s_kv_moves(world):
    card = NodeCard(host="h", transfers=("tcp",), kv_block_bytes=7, kv_layers=3, fetches=("rdma",))
    facts = WorkerFacts.of(Member(NodeId("w1"), 7, "h:1", "worker", card))
    assert facts.kv == WorkerKv("h", "", frozenset({"tcp"}), 7, layers=3)
    assert WorkerFacts.of(Member(NodeId("w1"), 7, "h:1", "worker", NodeCard())).kv.layers == 0


# ------------------------------------------------------------------ how busy


def test_load_is_the_report_and_what_was_placed_since(world):
    world.put(facts("w1"))
    world.pool.report(life("w1"), load(3, 2, blocks_total=9, blocks_used=4, blocks_cached=1))
    world.bookings.reported(life("w1"))
    world.bookings.place(0.0, life("w1"), life("f"), 2, 70)
    assert world.only() == WorkerView(
        NodeId("w1"),
        1,
        7,
        8,
        7 / 8,
        70,
        9,
        4,
        1,
        prefills=1,
        prefill_tokens=70,
        decodes=5,
        kv_tokens=70,
    )


def test_a_view_follows_every_change(world):
    world.put(facts("w1"))
    booking = world.bookings.place(0.0, life("w1"), life("f"), 1, 10)
    assert world.only().sequences == 1
    world.bookings.release(booking.id)
    assert world.only().sequences == 0
    world.pool.report(life("w1"), load(4))
    assert world.only().sequences == 4
    world.pool.report(life("w1"), None)
    assert world.only().sequences == 0


@pytest.mark.parametrize(
    ("said", "report", "size"),
    [(4, load(), 8), (4, WorkerLoad(ready=True), 4), (4, None, 4), (0, None, 16)],
)
def test_its_size_is_what_it_last_said_else_assumed(world, said, report, size):
    world.put(facts("w1", max_sequences=said))
    world.pool.report(life("w1"), report)
    assert world.only().max_sequences == size


def test_its_size_outlives_its_reports(world):
    world.put(facts("w1"))
    for report in (load(), WorkerLoad(ready=True), None):
        world.pool.report(life("w1"), report)
    world.put(facts("w1"))
    assert world.only().max_sequences == 8


def test_nothing_is_made_anew_where_nothing_changed(world):
    world.put(facts("w1"))
    world.put(facts("w2"))
    before = world.view().sound
    world.bookings.place(0.0, life("w2"), life("f"), 1, 10)
    after = world.view().sound
    assert before[0] is after[0]
    assert before[1].sequences == 0
    assert after[1].sequences == 1


# ------------------------------------------------------------------ what is remembered


def test_a_model_is_remembered_for_a_while(world):
    world.put(facts("w1", "m", "a"))
    world.pool.gone(10.0, life("w1"))
    assert world.view("m", 309.9) == world.view("a", 309.9) == ModelView(known=True)
    assert world.view("m", 310.0) == ModelView()
    world.pool.forget(310.0)
    assert not world.pool._gone


def test_one_that_is_no_longer_offered_is_remembered_too(world):
    world.put(facts("w1"))
    world.pool.put(0.0, WorkerFacts(life("w1"), ()))
    assert world.view() == ModelView(known=True)
    world.put(facts("w1"))
    assert not world.pool._gone
    assert world.nodes() == (["w1"], [])


def test_while_another_serves_it_nothing_is_gone(world):
    world.put(facts("w1"))
    world.put(facts("w2"))
    world.pool.chosen("m", NodeId("w1"))
    world.pool.gone(0.0, life("w1"))
    assert world.view() == ModelView(sound=(world.only(),), last=NodeId("w1"), known=True)


def test_a_change_of_the_only_worker_keeps_whose_turn_it_is(world):
    world.put(facts("w1"))
    world.pool.chosen("m", NodeId("w1"))
    world.put(facts("w1", "m", "more", suspect=True))
    assert world.view().last == "w1"


def test_memory_is_bounded_and_the_oldest_goes_first(world):
    for number, model in enumerate("abc"):
        world.put(facts("w1", model), now=number)
    world.pool.gone(3.0, life("w1"))
    assert [world.view(model, 4.0).known for model in "abc"] == [False, True, True]


def test_nothing_is_left_of_workers_that_left(world):
    for node in ("w1", "w2"):
        world.put(facts(node))
        world.bookings.place(0.0, life(node), life("f"), 1, 1)
    for node in ("w1", "w2"):
        world.bookings.worker_gone(life(node))
        world.pool.gone(0.0, life(node))
    world.pool.forget(1000.0)
    assert len(world.pool) == 0
    assert world.pool.models() == {}
    assert not world.pool._gone
    assert not world.bookings.touched
