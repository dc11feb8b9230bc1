"""Passes control calls between a core's transports and their peers, on the node's side.

The core has the transports, in a thread of their own, and the node has the links. They talk by a
socket beside the core's, so the thread that computes is not on the way. A life of the node, and the
end of a peer's, are told to both threads: the transports act on them, in one order with the calls,
and the core drops what it fetches. Calls and replies are matched by numbers, which
hold for one run of the core: a reply to a call of an earlier run is dropped. It posts commands and
takes events; it knows neither sockets nor event loops. `CoreClient` owns one and says when a run of
the core begins and ends.
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
    MakePath,
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
    from pdserve.messages.engine import Command, ControlCommand, ControlEvent

__all__ = ["MAX_CALLS", "TransferController", "deliver_remote_event"]


MAX_CALLS: Final = 1024
"""Calls of peers that the core has not replied to; one more is refused as `Overloaded`."""


class TransferController:
    """Matches the control calls of one core's transports with their replies."""

    def __init__(
        self, post: Callable[[Command], None], control: Callable[[ControlCommand], None]
    ) -> None:
        """`post` sends a command to the running core, `control` one to its transports; they are
        called between `begin` and `end` only."""
        self.paths: list[PathState] = []
        self._post = post
        self._control = control
        self._ask: AskPeer | None = None
        self._attached: SetNodeLife | None = None
        self._life = 0
        self._up = False
        self._transports = False
        """Whether the core's own transports hear what they are told."""
        self._replies: dict[int, Answered] = {}
        self._numbers = 0

    # ------------------------------------------------------------------ lives of the core

    def begin(self, *, transports: bool = True) -> None:
        """A core that can exchange KV is ready. `transports`: by transports of its own, else its
        library does."""
        self._life += 1
        self._up = True
        self._transports = transports
        if self._attached is not None:
            self._tell_both(self._attached)

    def end(self, error: PdserveError) -> None:
        """The core sends no more events: every open call of a peer gets `error`. Idempotent."""
        self._up = False
        self.paths = []
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply(error)

    # ------------------------------------------------------------------ from the node

    def on_transfer(self, ask: AskPeer) -> None:
        """Set the function that calls peers; without it the core's calls are refused."""
        self._ask = ask

    def attach(self, node: NodeId, epoch: Epoch) -> None:
        """Exchange KV as this (node, epoch) from now on, also after a restart of the core."""
        self._attached = SetNodeLife(node=node, epoch=epoch)
        if self._up:
            self._tell_both(self._attached)

    def peer_gone(self, node: NodeId, epoch: Epoch, *, returns: bool = False) -> None:
        """Tell the core that (node, epoch) is dead, or its engine. `returns`: that starts again."""
        if self._up:
            self._tell_both(PeerGone(node=node, epoch=epoch, returns=returns))

    def make_path(self, node: NodeId, epoch: Epoch) -> None:
        """Make the path to (node, epoch) in advance, if a core with transports of its own is up."""
        if self._up and self._transports:
            self._control(MakePath(node=node, epoch=epoch))

    def _tell_both(self, command: SetNodeLife | PeerGone) -> None:
        if self._transports:
            self._control(command)
        self._post(command)

    def call(self, node: NodeId, epoch: Epoch, ask: TransportCall, reply: Answered) -> None:
        """Pass a peer's control call to the core. `reply` is called once: with the answer,
        `NotReady` without a core that can move KV, `TransferRefused` by one without transports of
        its own, `Overloaded` beyond `MAX_CALLS`, or the error given to `end`."""
        if not self._up:
            reply(NotReady("no engine that can move KV is ready here", retry_after=1.0))
            return
        if not self._transports:
            reply(TransferRefused("this engine's KV takes other ways than transports of this node"))
            return
        if len(self._replies) >= MAX_CALLS:
            reply(Overloaded(f"{MAX_CALLS} calls to the transports wait", retry_after=1.0))
            return
        self._numbers += 1
        self._replies[self._numbers] = reply
        self._control(
            InboundControl(
                number=self._numbers,
                node=node,
                epoch=epoch,
                backend=ask.backend,
                control=ask.control,
            )
        )

    # ------------------------------------------------------------------ from the core

    def take(self, event: ControlEvent) -> None:
        """Handle an event of the core's transports."""
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
                self._control(_answered(number, answer))

        if self._ask is None:
            answered(TransferRefused("this engine's node cannot call its peers"))
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
    """Call the sink's method for this event."""
    match event:
        case Admitted():
            sink.on_admitted(event.cached_tokens)
        case AttemptBlocksOpened():
            sink.on_opened(event.attempt, event.ticket)
        case AttemptLost():
            sink.on_attempt_lost(event.attempt, error_of(event))
