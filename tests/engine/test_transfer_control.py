"""Questions and answers pass by number, and none from one life of a core to the next."""

from __future__ import annotations

from pdserve.engine import transfer_control as transfer_control
from pdserve.engine.transfer_control import TransferController
from pdserve.errors import EngineDied, LinkLost, NotReady, Overloaded, TransferRefused
from pdserve.ids import NodeId
from pdserve.messages.engine import (
    InboundControl,
    InboundControlReply,
    MakePath,
    OutboundControl,
    OutboundControlReply,
    PathState,
    PathStates,
    PeerGone,
    SetNodeLife,
)
from pdserve.messages.handoff import TransportCall, TransportReply
from pdserve.messages.transfer import ControlDone, PathReady

PEER = NodeId("p")
QUESTION = OutboundControl(
    number=7, node="p", epoch=3, backend="shm", control=PathReady(1), timeout=2.0
)


class Controlled:
    """A controller and all that passes over it."""

    def __init__(self) -> None:
        self.posted: list[object] = []
        self.asked: list[tuple] = []
        self.told: list[object] = []
        """What the thread that computes is told."""
        self.control = TransferController(self.told.append, self.posted.append)
        self.control.on_transfer(lambda *question: self.asked.append(question))

    def call(self) -> list[object]:
        replies: list[object] = []
        self.control.call(PEER, 3, TransportCall(1, "shm", PathReady(2)), replies.append)
        return replies


def test_only_transports_that_are_up_make_paths() -> None:
    d = Controlled()
    d.control.make_path(PEER, 3)
    d.control.begin(transports=False)
    d.control.make_path(PEER, 3)
    assert d.posted == []
    d.control.begin()
    d.control.make_path(PEER, 3)
    assert d.posted == [MakePath(node="p", epoch=3)]
    assert d.told == []


def test_a_call_is_replied_to_once() -> None:
    d = Controlled()
    d.control.begin()
    first, second = d.call(), d.call()
    numbers = [command.number for command in d.posted if isinstance(command, InboundControl)]
    assert len(set(numbers)) == 2
    d.control.take(InboundControlReply(number=numbers[1], control=ControlDone()))
    assert (first, second) == ([], [TransportReply(ControlDone())])
    d.control.take(
        InboundControlReply(number=numbers[0], control=None, kind="TransferRefused", message="no")
    )
    d.control.take(InboundControlReply(number=numbers[0], control=ControlDone()))
    (error,) = first
    assert isinstance(error, TransferRefused)
    assert error.message == "no"


def test_without_a_core_nothing_waits() -> None:
    d = Controlled()
    assert isinstance(d.call()[0], NotReady)
    d.control.begin()
    waiting = d.call()
    d.control.end(EngineDied("gone"))
    assert isinstance(waiting[0], EngineDied)
    assert isinstance(d.call()[0], NotReady)
    d.control.end(EngineDied("gone again"))
    assert len(waiting) == 1


def test_calls_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(transfer_control, "MAX_CALLS", 2)
    d = Controlled()
    d.control.begin()
    waiting = [d.call() for _ in range(3)]
    assert waiting[:2] == [[], []]
    assert isinstance(waiting[2][0], Overloaded)


def test_an_answer_reaches_the_core_that_asked_and_no_other() -> None:
    d = Controlled()
    d.control.begin()
    d.control.take(QUESTION)
    ((node, epoch, ask, timeout, answered),) = d.asked
    assert (node, epoch, timeout) == ("p", 3, 2.0)
    assert ask == TransportCall(3, "shm", PathReady(1))
    d.control.end(EngineDied("gone"))
    answered(TransportReply(ControlDone()))
    d.control.begin()
    answered(LinkLost("late"))
    assert d.posted == []
    d.control.take(QUESTION)
    d.asked[1][4](LinkLost("nobody is there"))
    assert d.posted == [
        OutboundControlReply(number=7, control=None, kind="LinkLost", message="nobody is there")
    ]


def test_every_core_is_attached_in_the_newest_name() -> None:
    d = Controlled()
    d.control.attach(NodeId("d"), 1)
    d.control.peer_gone(PEER, 3)
    assert d.posted == []
    d.control.begin()
    d.control.attach(NodeId("d"), 2)
    d.control.peer_gone(PEER, 3)
    d.control.end(EngineDied("gone"))
    d.control.begin()
    assert d.posted == [
        SetNodeLife(node="d", epoch=1),
        SetNodeLife(node="d", epoch=2),
        PeerGone(node="p", epoch=3),
        SetNodeLife(node="d", epoch=2),
    ]
    assert d.told == d.posted


def test_calls_do_not_pass_the_thread_that_computes() -> None:
    d = Controlled()
    d.control.begin()
    d.call()
    d.control.take(QUESTION)
    d.asked[0][4](LinkLost("nobody is there"))
    assert len(d.posted) == 2
    assert d.told == []


def test_a_node_that_cannot_ask_says_so() -> None:
    posted: list[object] = []
    control = TransferController(posted.append, posted.append)
    control.begin()
    control.take(QUESTION)
    (answer,) = posted
    assert isinstance(answer, OutboundControlReply)
    assert answer.kind == "TransferRefused"


def test_paths_are_those_of_the_present_core() -> None:
    d = Controlled()
    d.control.begin()
    d.control.take(PathStates([PathState(node="p", epoch=3, backend="shm")]))
    assert [path.backend for path in d.control.paths] == ["shm"]
    d.control.end(EngineDied("gone"))
    assert d.control.paths == []


def test_an_engine_whose_library_moves_kv_has_no_transports_to_tell() -> None:
    d = Controlled()
    d.control.begin(transports=False)
    d.control.attach(NodeId("d"), 1)
    d.control.peer_gone(PEER, 3)
    assert d.posted == []
    assert d.told == [SetNodeLife(node="d", epoch=1), PeerGone(node="p", epoch=3)]
    assert isinstance(d.call()[0], TransferRefused)
    assert d.posted == []
