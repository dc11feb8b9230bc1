"""Questions, orders and answers of KV fetches pass by number, none to the next run of a core."""

from __future__ import annotations

from pdserve.engine import kv_pulls as module
from pdserve.engine.kv_pulls import AbsorbResult, KvPullController
from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import (
    AbsorbKv,
    KvAbsorbed,
    KvChainsListed,
    KvPullAnswer,
    KvPullEnded,
    KvPullOpened,
    KvPullServed,
    ListKvChains,
    ServeKvPull,
    StopKvPull,
)
from pdserve.messages.kv_pull import KvChains, KvPullGrant, OfferedChain, PullKv
from pdserve.messages.transfer import TransferTicket

PEER = NodeLife(NodeId("p"), 3)
TICKET = TransferTicket(
    transfer="pull 1",
    attempt=0,
    epoch=1,
    slot=0,
    generation=1,
    first_token=0,
    tokens=4,
    blocks=(5,),
)
HASHES = bytes(range(16))
OPENED = KvPullOpened(number=7, node="p", epoch=3, hashes=HASHES, ticket=TICKET, timeout=2.0)
QUESTION = PullKv(epoch=3, hashes=HASHES, ticket=TICKET, timeout=2.0)
CHAIN = OfferedChain(0, HASHES, HASHES)
GRANT = KvPullGrant(granted=1, parts=1, checksums=(9,))


class Controlled:
    """A controller and all that passes over it; its own `PullPeers`."""

    def __init__(self) -> None:
        self.posted: list[object] = []
        self.asked: list[tuple] = []
        self.forgotten: list[object] = []
        self.ends: list[KvPullEnded] = []
        self.control = KvPullController(self.posted.append)
        self.control.peers = self

    def ask(self, message, peer, answered) -> None:
        self.asked.append((message, peer, answered))

    def forget(self, answered) -> None:
        self.forgotten.append(answered)

    def ended(self, event: KvPullEnded) -> None:
        self.ends.append(event)


def test_a_pull_is_asked_and_answered_once() -> None:
    d = Controlled()
    d.control.begin()
    d.control.take(OPENED)
    ((message, peer, answered),) = d.asked
    assert (message, peer) == (QUESTION, PEER)
    answered(GRANT)
    answered(GRANT)
    assert d.posted == [KvPullAnswer(7, GRANT)]
    end = KvPullEnded(7, 1)
    d.control.take(end)
    assert (d.ends, d.forgotten) == ([end], [])


def test_a_pull_that_has_ended_wants_no_answer() -> None:
    d = Controlled()
    d.control.begin()
    d.control.take(OPENED)
    d.control.take(KvPullEnded(7, 0, "deadline"))
    ((_, _, answered),) = d.asked
    assert d.forgotten == [answered]
    answered(GRANT)
    assert d.posted == []


def test_no_answer_reaches_the_next_run() -> None:
    d = Controlled()
    d.control.begin()
    d.control.take(OPENED)
    d.control.end()
    assert len(d.forgotten) == 1
    d.control.begin()
    d.control.take(OPENED)
    (_, _, old), (_, _, new) = d.asked
    old(GRANT)
    assert d.posted == []
    new(GRANT)
    assert d.posted == [KvPullAnswer(7, GRANT)]


def test_without_a_network_pulls_are_refused() -> None:
    d = Controlled()
    d.control.peers = None
    d.control.begin()
    d.control.take(OPENED)
    assert d.posted == [KvPullAnswer(7, KvPullGrant(refused="unready"))]
    d.control.take(KvPullEnded(7, 0, "unready"))


def test_a_peers_question_is_served_or_stopped() -> None:
    d = Controlled()
    d.control.begin()
    replies: list[KvPullGrant] = []
    stops = [d.control.serve(PEER, QUESTION, replies.append) for _ in range(2)]
    first, second = (one for one in d.posted if isinstance(one, ServeKvPull))
    assert (first.node, first.epoch, first.hashes, first.timeout) == ("p", 3, HASHES, 2.0)
    d.control.take(KvPullServed(second.number, GRANT))
    d.control.take(KvPullServed(second.number, GRANT))
    assert replies == [GRANT]
    stops[1]()
    stops[0]()
    stops[0]()
    assert d.posted[2:] == [StopKvPull(first.number)]
    d.control.take(KvPullServed(first.number, GRANT))
    assert replies == [GRANT]


def test_orders_are_answered_by_the_core() -> None:
    d = Controlled()
    d.control.begin()
    results: list[AbsorbResult] = []
    lists: list[KvChains] = []
    d.control.absorb(PEER, CHAIN, 3.0, results.append)
    d.control.list_chains(10, lists.append)
    order, wanted = d.posted
    assert isinstance(order, AbsorbKv)
    assert (order.node, order.epoch, order.first, order.timeout) == ("p", 3, 0, 3.0)
    assert isinstance(wanted, ListKvChains)
    d.control.take(KvAbsorbed(order.number, 4, 3, "busy"))
    d.control.take(KvChainsListed(wanted.number, KvChains((CHAIN,))))
    assert results == [AbsorbResult(4, 3, "busy")]
    assert lists == [KvChains((CHAIN,))]


def test_the_end_of_a_core_answers_everything() -> None:
    d = Controlled()
    d.control.begin()
    replies: list[KvPullGrant] = []
    results: list[AbsorbResult] = []
    lists: list[KvChains] = []
    stop = d.control.serve(PEER, QUESTION, replies.append)
    d.control.absorb(PEER, CHAIN, 3.0, results.append)
    d.control.list_chains(10, lists.append)
    before = list(d.posted)
    d.control.end()
    d.control.end()
    d.control.begin()
    stop()
    assert d.posted == before
    unready = KvPullGrant(refused="unready")
    assert (replies, results, lists) == ([unready], [AbsorbResult(0, 0, "unready")], [KvChains()])


def test_without_a_core_nothing_waits() -> None:
    d = Controlled()
    answers: list[object] = []
    d.control.serve(PEER, QUESTION, answers.append)()
    d.control.absorb(PEER, CHAIN, 3.0, answers.append)
    d.control.list_chains(10, answers.append)
    assert answers == [
        KvPullGrant(refused="unready"),
        AbsorbResult(0, 0, "unready"),
        KvChains(),
    ]
    assert d.posted == []


def test_questions_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_QUESTIONS", 2)
    d = Controlled()
    d.control.begin()
    replies: list[KvPullGrant] = []
    for _ in range(3):
        d.control.serve(PEER, QUESTION, replies.append)
    assert replies == [KvPullGrant(refused="busy")]
    assert len(d.posted) == 2
