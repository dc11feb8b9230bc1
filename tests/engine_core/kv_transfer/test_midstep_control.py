"""What passes the core within a step, and what does not."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from pdserve.engine_core.core_socket import CoreSocket, CoreSocketClosed
from pdserve.engine_core.kv_transfer.connector import NodeMessage
from pdserve.engine_core.kv_transfer.midstep_control import MidStepControl
from pdserve.errors import ProtocolError
from pdserve.messages.engine import (
    Abort,
    Event,
    InboundControl,
    InboundControlReply,
    OutboundControlReply,
    PeerGone,
    SetNodeLife,
)
from pdserve.messages.transfer import ControlDone, StopTicket
from pdserve.wire.codec import encode
from pdserve.wire.length_prefixed import FrameDecoder, encode_frame

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.messages.engine import Command

STOP = InboundControl(number=1, node="d", epoch=2, backend="rdma", control=StopTicket(1, 0, 0))
ANSWERED = OutboundControlReply(number=4, control=ControlDone())
REPLY = InboundControlReply(number=1, control=ControlDone())


class Mover:
    """Remembers, and answers at once."""

    def __init__(self) -> None:
        self.taken: list[Command] = []
        self.said: list[NodeMessage] = []

    def take(self, command: Command) -> None:
        self.taken.append(command)
        self.said.append(NodeMessage(REPLY))

    def says(self) -> list[NodeMessage]:
        said, self.said = self.said, []
        return said


class Rig:
    def __init__(self) -> None:
        self.node, theirs = socket.socketpair()
        self.node.settimeout(10)
        self.link = CoreSocket(theirs)
        self.mover = Mover()
        self.control = MidStepControl(self.link, cast("Any", self.mover))

    def post(self, *commands: Command) -> None:
        for command in commands:
            self.node.sendall(encode_frame(encode(command)))

    def heard(self) -> list[Event]:
        bodies = FrameDecoder().feed(self.node.recv(1 << 16))
        return [msgspec.msgpack.decode(body, type=Event) for body in bodies]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.node.close()
    made.link.close()


def test_a_fence_is_answered_within_a_step(rig: Rig) -> None:
    rig.post(Abort(3), STOP, ANSWERED, Abort(4))
    rig.control.pass_on()
    assert rig.mover.taken == [STOP, ANSWERED]
    assert rig.heard() == [REPLY, REPLY]
    assert rig.control.take() == ([Abort(3), Abort(4)], 2)
    assert rig.control.take() == ([], 0)


@pytest.mark.parametrize("life", [SetNodeLife(node="p", epoch=9), PeerGone(node="d", epoch=2)])
def test_nothing_passes_a_life_that_begins_or_ends(rig: Rig, life: Command) -> None:
    rig.post(life, STOP)
    rig.control.pass_on()
    assert rig.mover.taken == []
    assert rig.control.take() == ([life, STOP], 0)
    rig.post(STOP)
    rig.control.pass_on()
    assert rig.mover.taken == [STOP]


def test_a_link_that_ends_within_a_step_is_told_of_after_it(rig: Rig) -> None:
    rig.node.close()
    rig.control.pass_on()
    rig.control.pass_on()
    with pytest.raises(CoreSocketClosed):
        rig.control.take()


def test_so_is_what_cannot_be_read(rig: Rig) -> None:
    rig.node.sendall(encode_frame(b"\xc1"))
    rig.control.pass_on()
    with pytest.raises(ProtocolError):
        rig.control.take()
