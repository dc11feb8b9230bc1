"""Runs the membership machine of one node: its timer, its dials, its messages over links.

Every event passes through `_step`. Each effect is carried out here or, if it is about members,
passed to the owner's listener. Large parts of cards travel on bulk connections. `core` makes all
decisions. Owned by a node, one for each life; nothing is left after `close`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import DialFailed as DialError
from pdserve.errors import DialRefused, OwnAddress, PdserveError, ProtocolError
from pdserve.gossip import events as ev
from pdserve.gossip.core import Gossip
from pdserve.gossip.messages import TELL, PartReply, decode
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from random import Random

    from pdserve.gossip.config import GossipConfig
    from pdserve.gossip.messages import Card, MemberRecord, Message
    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.net.base import IncomingStream, Link, Network
    from pdserve.wire.parser import Buffer

__all__ = ["PARTS", "GossipService"]

_log = logging.getLogger(__name__)

PARTS: Final = 0x0101
"""Method number of one-shot bulk streams whose opening body is a `PartReply`."""

_TELLABLE: Final = 32 * 1024
"""Most bytes of a part's chunk that may travel between pings; larger ones take the bulk
connection."""
_BULK_TIMEOUT: Final[Seconds] = 10.0
_BULK_TRIES: Final = 3
_BULK_TASKS: Final = 64
"""Most chunks being sent at a time; further ones are dropped, and the requester asks again."""
_FAULT_PAUSE: Final[Seconds] = 1.0
_IDLE_CHECK: Final[Seconds] = 10.0
"""Time between two checks whether a link that membership no longer needs is idle."""


class GossipService:
    """Membership of one life of a node. Create it inside the running event loop."""

    def __init__(
        self,
        me: MemberRecord,
        network: Network,
        config: GossipConfig,
        random: Random,
        *,
        on_effect: Callable[[ev.Effect], None],
        on_dial_failed: Callable[[str, DialError], None],
    ) -> None:
        """`on_effect` gets effects about members, cards and this node's own life, in order, on the
        event loop."""
        self.machine = Gossip(me, config, random)
        self._network = network
        self._on_effect = on_effect
        self._on_dial_failed = on_dial_failed
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due: Seconds = float("inf")
        self._not_before: Seconds = 0.0
        """Earliest time of the next tick. After a fault the timer pauses; otherwise the fault would
        repeat at once and for ever."""
        self._dialling: set[str] = set()
        self._unneeded: dict[NodeId, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._encoded: tuple[Message | None, bytes] = (None, b"")
        self._stepping = False
        self._waiting: list[ev.Event] = []
        self._closed = False

    # ------------------------------------------------------------------ events from the node

    def start(self, start: ev.StartGossip) -> None:
        """Dials the seeds and announces this node."""
        self._step(start)

    def link_up(self, link: Link) -> None:
        """Handles a new link."""
        peer = link.peer
        self._dialling.discard(peer.address)
        self._keep(peer.node)
        self._step(ev.LinkUp(peer.node, peer.epoch, peer.address))

    def link_down(self, node: NodeId, epoch: Epoch, *, orderly: bool = False) -> None:
        """Handles the end of the last link to this life of the peer; `orderly`: one side has closed
        it on purpose."""
        self._keep(node)
        self._step(ev.LinkDown(node, epoch, orderly))

    def told(self, link: Link, body: Buffer) -> None:
        """Handles a gossip message of a peer. Errors: `ProtocolError`."""
        self._step(ev.MessageReceived(link.peer.node, link.peer.epoch, decode(body)))

    def opened(self, stream: IncomingStream, body: Buffer) -> None:
        """Handles a chunk of a part on the bulk connection. Errors: `ProtocolError`."""
        message = decode(body)
        if not isinstance(message, PartReply):
            raise ProtocolError("this stream is only for parts of cards")
        stream.accept(_Mute(), window=0)
        stream.end()
        self._step(ev.MessageReceived(stream.link.peer.node, stream.link.peer.epoch, message))

    def set_card(self, card: Card, parts: tuple[bytes, ...]) -> None:
        """Sets this node's card."""
        self._step(ev.SetCard(card, parts))

    def want_part(self, owner: NodeId, hash: bytes) -> None:
        """Fetches a part; the listener gets `PartReady` or `PartFailed`."""
        self._step(ev.WantPart(owner, hash))

    def leave(self) -> None:
        """Announces that this node leaves; `GossipStopped` follows."""
        self._step(ev.Leave())

    async def close(self) -> None:
        """Ends the timer and all tasks; the listener gets no further call."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for node in tuple(self._unneeded):
            self._keep(node)
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(tuple(self._tasks))

    # ------------------------------------------------------------------ steps and effects

    def _step(self, event: ev.Event) -> None:
        """Passes an event to the machine. The machine is not re-entrant: events caused by effects
        wait in a queue."""
        if self._closed:
            return
        self._waiting.append(event)
        if self._stepping:
            return
        self._stepping = True
        while self._waiting and not self._closed:
            self._take_in(self._waiting.pop(0))
        self._stepping = False
        self._waiting.clear()
        self._arm()

    def _take_in(self, event: ev.Event) -> None:
        """Handles one event. A failure must not lose the waiting events or the next timer."""
        try:
            for effect in self.machine.step(self._loop.time(), event):
                self._perform(effect)
        except Exception:
            # Only a failed tick pauses the timer: a peer's bad messages must not delay it.
            if isinstance(event, ev.Tick):
                self._not_before = self._loop.time() + _FAULT_PAUSE
            _log.exception("membership failed on %s", type(event).__name__)

    def _arm(self) -> None:
        due = self.machine.due
        if due is not None:
            due = max(due, self._not_before)
        if self._closed or due == self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = float("inf") if due is None else due
        self._timer = None if due is None else self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._due = float("inf")
        self._step(ev.Tick())

    def _perform(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Send):
            self._send(effect)
        elif isinstance(effect, ev.Dial):
            self._dial(effect.address)
        elif isinstance(effect, ev.Close):
            self._close_idle(effect.node)
        else:
            self._tell(effect)

    def _tell(self, effect: ev.Effect) -> None:
        """Calls the listener. A failure must not lose the effects that follow or the peer's
        link."""
        try:
            self._on_effect(effect)
        except Exception:
            _log.exception("the listener failed on %s", type(effect).__name__)

    # ------------------------------------------------------------------ messages

    def _send(self, effect: ev.Send) -> None:
        link = self._network.link(effect.node)
        if link is None:
            return
        body = self._encode(effect.message)
        if isinstance(effect.message, PartReply) and len(body) > _TELLABLE:
            if len(self._tasks) < _BULK_TASKS:
                self._spawn(self._send_bulk(link, body), f"part for {effect.node}")
            return
        try:
            link.tell(TELL, body)
        except PdserveError as error:
            # The link is ending or full; the next table comparison repairs the loss.
            _log.debug("gossip to %s was not sent: %s", effect.node, error)

    def _encode(self, message: Message) -> bytes:
        """Encodes a message; keeps the last one, because one `News` goes to several peers."""
        if self._encoded[0] is not message:
            self._encoded = (message, encode(message))
        return self._encoded[1]

    async def _send_bulk(self, link: Link, body: bytes) -> None:
        """Sends a chunk of a part. If two nodes dial each other at once, one of the two links ends;
        a chunk that was begun on it is sent again on the other."""
        for _ in range(_BULK_TRIES):
            try:
                await link.open_bulk_stream(
                    PARTS, body, _Mute(), timeout=_BULK_TIMEOUT, window=0, last=True
                )
            except PdserveError as error:
                _log.debug("a part was not sent to %s: %s", link.peer.node, error)
            else:
                return
            other = self._network.link(link.peer.node)
            # Without another link the chunk is dropped; the requester asks again.
            if other is None or other is link:
                return
            link = other

    # ------------------------------------------------------------------ links

    def _dial(self, address: str) -> None:
        self._dialling.add(address)
        self._spawn(self._dialled(address), f"gossip dial {address}")

    async def _dialled(self, address: str) -> None:
        """Dials and reports the result; the machine expects exactly one for each dial."""
        try:
            link = await self._network.dial(address)
        except Exception as error:
            self._dialling.discard(address)
            if not isinstance(error, DialError):
                _log.exception("dialling %s failed unexpectedly", address)
                error = DialError(f"{address}: {type(error).__name__}")
            self._on_dial_failed(address, error)
            refused, ours = isinstance(error, DialRefused), isinstance(error, OwnAddress)
            self._step(ev.DialAttemptFailed(address, refused=refused, ours=ours))
            return
        if address not in self._dialling:
            return
        self._dialling.discard(address)
        peer, now = link.peer, self._network.link(link.peer.node)
        if now is None or now.peer.epoch != peer.epoch:  # the link has ended
            self._step(ev.DialAttemptFailed(address, refused=False))
        else:
            # `link_up` did not see this address: the link is older, or the peer has two addresses.
            self._step(ev.LinkUp(peer.node, peer.epoch, address))

    def _close_idle(self, node: NodeId) -> None:
        """Closes a link once nothing is under way on it; other parts of the node may use it."""
        self._keep(node)
        link = self._network.link(node)
        if link is None:
            return
        now = link.stats()
        if now.pending or now.serving or now.streams:
            later = self._loop.call_later(_IDLE_CHECK, self._close_idle, node)
            self._unneeded[node] = later
        else:
            link.close("membership needs it no longer")

    def _keep(self, node: NodeId) -> None:
        timer = self._unneeded.pop(node, None)
        if timer is not None:
            timer.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error("%s failed", task.get_name(), exc_info=task.exception())


class _Mute:
    """A sink for streams that carry nothing back."""

    def on_data(self, body: Buffer) -> None:
        pass

    def on_end(self, error: BaseException | None) -> None:
        pass

    def on_unblocked(self) -> None:
        pass
