"""The node's side of an engine's transports: what they ask of peers, and what peers ask of them.

Questions and answers pass by number between the core, which has the transports, and the node, which
has the links. It posts commands and takes events; it knows neither sockets nor loops. Whoever
implements the engine port over a core owns one, and says when a life of the core begins and ends:
numbers are those of one life, so nothing of an earlier one is answered to a later one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.errors import NotReady, Overloaded, PdserveError, TransferRefused
from pdserve.ids import NodeId
from pdserve.messages.engine import (
    Admitted,
    AttemptBlocksOpened,
    AttemptLost,
    InboundControl,
    InboundControlReply,
    OutboundControl,
    OutboundControlReply,
    PathState,
    PathStates,
    PeerGone,
    SetNodeLife,
)
from pdserve.messages.engine_errors import error_of, kind_and_message
from pdserve.messages.handoff import TransportCall, TransportReply

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine.port import Answered, AskPeer, RemotePrefillSink
    from pdserve.ids import Epoch
    from pdserve.messages.engine import Command

__all__ = ["MAX_CALLS", "TransferController", "deliver_remote_event"]


MAX_CALLS: Final = 1024
"""Calls of peers that the core has not replied to; one more is refused as `Overloaded`."""


class TransferController:
    """See above."""

    def __init__(self, post: Callable[[Command], None]) -> None:
        """`post` reaches the present core; it is called between `begin` and `end` only."""
        self.paths: list[PathState] = []
        self._post = post
        self._ask: AskPeer | None = None
        self._attached: SetNodeLife | None = None
        self._life = 0
        self._up = False
        self._replies: dict[int, Answered] = {}
        self._numbers = 0

    # ------------------------------------------------------------------ lives of the core

    def begin(self) -> None:
        """A core that has transports is ready."""
        self._life += 1
        self._up = True
        if self._attached is not None:
            self._post(self._attached)

    def end(self, error: PdserveError) -> None:
        """No event will come from this core any more. Idempotent."""
        self._up = False
        self.paths = []
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply(error)

    # ------------------------------------------------------------------ from the node

    def on_transfer(self, ask: AskPeer) -> None:
        """See `port.Engine`."""
        self._ask = ask

    def attach(self, node: NodeId, epoch: Epoch) -> None:
        """See `port.Engine`."""
        self._attached = SetNodeLife(node=node, epoch=epoch)
        if self._up:
            self._post(self._attached)

    def peer_gone(self, node: NodeId, epoch: Epoch) -> None:
        """See `port.Engine`."""
        if self._up:
            self._post(PeerGone(node=node, epoch=epoch))

    def call(self, node: NodeId, epoch: Epoch, ask: TransportCall, reply: Answered) -> None:
        """See `port.Engine.transfer_call`."""
        if not self._up:
            reply(NotReady("no engine is ready here that could move KV", retry_after=1.0))
            return
        if len(self._replies) >= MAX_CALLS:
            reply(Overloaded(f"{MAX_CALLS} questions to the transports wait", retry_after=1.0))
            return
        self._numbers += 1
        self._replies[self._numbers] = reply
        self._post(
            InboundControl(
                number=self._numbers,
                node=node,
                epoch=epoch,
                backend=ask.backend,
                control=ask.control,
            )
        )

    # ------------------------------------------------------------------ from the core

    def take(self, event: OutboundControl | InboundControlReply | PathStates) -> None:
        """What the core's transports say."""
        match event:
            case OutboundControl():
                self._question(event)
            case InboundControlReply():
                reply = self._replies.pop(event.number, None)
                if reply is not None:
                    control = event.control
                    reply(error_of(event) if control is None else TransportReply(control))
            case PathStates():
                self.paths = event.paths

    def _question(self, event: OutboundControl) -> None:
        life, number = self._life, event.number

        def answered(answer: TransportReply | PdserveError) -> None:
            if life == self._life and self._up:
                self._post(_answered(number, answer))

        if self._ask is None:
            answered(TransferRefused("this engine's node cannot ask others"))
            return
        ask = TransportCall(event.epoch, event.backend, event.control)
        self._ask(NodeId(event.node), event.epoch, ask, event.timeout, answered)


def _answered(number: int, answer: TransportReply | PdserveError) -> OutboundControlReply:
    if isinstance(answer, TransportReply):
        return OutboundControlReply(number=number, control=answer.control)
    kind, message = kind_and_message(answer)
    return OutboundControlReply(number=number, control=None, kind=kind, message=message)


def deliver_remote_event(
    sink: RemotePrefillSink, event: Admitted | AttemptBlocksOpened | AttemptLost
) -> None:
    """The call that an event of a remote submission stands for."""
    match event:
        case Admitted():
            sink.on_admitted(event.cached_tokens)
        case AttemptBlocksOpened():
            sink.on_opened(event.attempt, event.ticket)
        case AttemptLost():
            sink.on_attempt_lost(event.attempt, error_of(event))
