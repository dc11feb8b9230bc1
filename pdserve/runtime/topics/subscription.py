"""Follows a topic: one stream to each member that publishes it, reopened while the member lives.

The registry's events tell of members. A stream that ends is opened anew after a jittered back-off;
a log then resumes at its position. Messages go to the member's `Following`. When the member is
gone, or its card no longer names the topic, `gone` is called once and nothing follows. Owned by
`service`.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pdserve.errors import Cancelled, DialFailed, Draining, LinkLost, ProtocolError
from pdserve.net.redial import Redial
from pdserve.runtime.registry import MemberGone
from pdserve.runtime.topics.messages import LOG, STATE, Subscribe
from pdserve.runtime.topics.reader import LogReader
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable
    from random import Random

    from pdserve.ids import Epoch, NodeId, Seconds
    from pdserve.net.base import ItemStream
    from pdserve.net.timers import Timer, Timers
    from pdserve.runtime.peers.peer_ref import PeerRef
    from pdserve.runtime.registry import Member, MemberEvent
    from pdserve.runtime.tasks import Tasks
    from pdserve.runtime.topics.config import TopicsConfig
    from pdserve.runtime.topics.reader import LogTarget
    from pdserve.wire.parser import Buffer

__all__ = ["Following", "LogFollower", "StateFollower", "Subscription", "TopicsNode"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class TopicsNode(Protocol):
    """The part of `runtime.node.Node` that topics use."""

    tasks: Tasks
    random: Random

    @property
    def epoch(self) -> Epoch: ...

    def now(self) -> Seconds: ...

    def host(self, actor: object) -> None: ...

    def ref(self, node: NodeId, epoch: Epoch | None = None) -> PeerRef: ...

    def on_member(self, listener: Callable[[MemberEvent], None]) -> Callable[[], None]: ...


class Following(Protocol):
    """Handles the messages of one life of a publisher."""

    member: Member
    method: int

    def opening(self) -> Subscribe:
        """The message that opens a stream."""
        ...

    def window(self, config: TopicsConfig) -> int:
        """Credit to grant to the publisher."""
        ...

    def hear(self, body: Buffer) -> bytes | None:
        """Handle a message; returns the answer to send, if any."""
        ...

    def recheck(self) -> bytes | None:
        """Compare what is held with what the publisher said last; returns the message to send, if
        any."""
        ...

    def lost(self) -> None:
        """The stream has ended; another may follow."""
        ...

    def gone(self) -> None:
        """The publisher is gone, or no longer publishes; called once."""
        ...

    def stats(self) -> dict[str, int]: ...


F = TypeVar("F", bound=Following)


class StateFollower(Generic[T]):
    """Follows the latest value that one life of a publisher has of a state topic."""

    method = STATE

    def __init__(
        self,
        name: str,
        member: Member,
        decode: Callable[[Buffer], T],
        on_value: Callable[[Member, T], None],
        on_gone: Callable[[Member], None] | None,
    ) -> None:
        self.member = member
        self._name = name
        self._decode = decode
        self._on_value = on_value
        self._on_gone = on_gone
        self._last: bytes | None = None
        self._values = 0

    @property
    def last(self) -> bytes | None:
        """The newest value, encoded."""
        return self._last

    def opening(self) -> Subscribe:
        return Subscribe(self._name)

    def window(self, config: TopicsConfig) -> int:
        return config.state_window

    def hear(self, body: Buffer) -> None:
        value = self._decode(body)
        if body == self._last:
            return  # another stream begins with the value that the last one ended with
        self._last = bytes(body)
        self._values += 1
        self._on_value(self.member, value)

    def recheck(self) -> None:
        """Nothing to do: there is only the last value."""

    def lost(self) -> None:
        """The last value stays valid."""

    def gone(self) -> None:
        if self._on_gone is not None:
            self._on_gone(self.member)

    def stats(self) -> dict[str, int]:
        return {"values": self._values}


class LogFollower:
    """Follows a log topic of one life of a publisher, and applies its entries to a target."""

    method = LOG

    def __init__(
        self,
        name: str,
        member: Member,
        target: LogTarget,
        on_gone: Callable[[Member], None] | None,
    ) -> None:
        self.member = member
        self.reader = LogReader(target)
        self._name = name
        self._on_gone = on_gone

    def opening(self) -> Subscribe:
        return Subscribe(self._name, self.reader.resume())

    def window(self, config: TopicsConfig) -> int:
        return config.log_window

    def hear(self, body: Buffer) -> bytes | None:
        return self.reader.hear(body)

    def recheck(self) -> bytes | None:
        return self.reader.recheck()

    def lost(self) -> None:
        self.reader.lost()

    def gone(self) -> None:
        self.reader.forget()
        if self._on_gone is not None:
            self._on_gone(self.member)

    def stats(self) -> dict[str, int]:
        return self.reader.stats()


class Subscription(Generic[F]):
    """One topic and the members that this node follows in it."""

    def __init__(
        self,
        name: str,
        node: TopicsNode,
        timers: Timers,
        config: TopicsConfig,
        make: Callable[[Member], F],
    ) -> None:
        self.name = name
        self.node = node
        self.timers = timers
        self.config = config
        self.on_close: Callable[[], None] | None = None
        self.streams = 0
        """Ever opened."""
        self._make = make
        self._followed: dict[NodeId, _FollowedStream[F]] = {}
        self._past: Counter[str] = Counter()  # counters of those that are gone
        self._stop: Callable[[], None] | None = None
        self._closed = False

    def start(self) -> None:
        """Follow present and later publishers."""
        self._stop = self.node.on_member(self._on_member)

    def get(self, node: NodeId) -> F | None:
        """How this node follows `node`; None: it does not."""
        followed = self._followed.get(node)
        return None if followed is None else followed.following

    def recheck(self) -> None:
        """Find states that differ from what their publishers said last. Call it if a target may
        want a snapshot while its log rests."""
        for followed in tuple(self._followed.values()):
            followed.recheck()

    def _on_member(self, event: MemberEvent) -> None:
        member = event.member
        followed = self._followed.get(member.node)
        if followed is not None and followed.following.member.epoch != member.epoch:
            return  # the registry ends one life before it begins the next
        publishes = member.card is not None and self.name in member.card.topics
        if followed is not None:
            followed.following.member = member
            if isinstance(event, MemberGone) or not publishes:
                self._end(followed)
        elif publishes and not isinstance(event, MemberGone) and not self._closed:
            followed = self._followed[member.node] = _FollowedStream(self, self._make(member))
            followed.connect()

    def _end(self, followed: _FollowedStream[F]) -> None:
        following = followed.following
        del self._followed[following.member.node]
        followed.cut()
        self._past.update(following.stats())
        try:
            following.gone()
        except Exception:  # of its owner: the others have to end all the same
            _log.exception("%s: the end of %s", self.name, following.member.node)

    def stats(self) -> dict[str, int]:
        """Counters, summed over all members, also those that are gone."""
        total = Counter(self._past)
        for followed in self._followed.values():
            total.update(followed.following.stats())
        open_now = sum(followed.open for followed in self._followed.values())
        now = {"members": len(self._followed), "open": open_now, "streams": self.streams}
        return {**total, **now}

    def close(self) -> None:
        """Stop to follow. Idempotent."""
        self._closed = True
        if self._stop is not None:
            self._stop()
        for followed in tuple(self._followed.values()):
            self._end(followed)
        if self.on_close is not None:
            self.on_close()


class _FollowedStream(Generic[F]):
    """The stream to one member (its `Sink`), and the way to the next one: at any time there is a
    stream, a task that opens one, or a timer before that; none after `cut`."""

    def __init__(self, subscription: Subscription[F], following: F) -> None:
        self.following = following
        self._subscription = subscription
        self._redial = Redial(subscription.node.random)
        self._stream: ItemStream | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: Timer | None = None
        self._heard = False
        self._over = False

    @property
    def open(self) -> bool:
        return self._stream is not None

    def connect(self) -> None:
        """Begin to open a stream."""
        name, member = self._subscription.name, self.following.member
        try:
            self._task = self._subscription.node.tasks.spawn(
                self._connect(), f"follow {name} of {member.node}"
            )
        except Draining:
            _log.debug("%s of %s is not followed: the node is closing", name, member.node)

    async def _connect(self) -> None:
        subscription, following = self._subscription, self.following
        node, member = subscription.node, following.member
        try:
            publisher = node.ref(member.node, member.epoch)
            link = await publisher.link(timeout=subscription.config.link_timeout)
            self._heard = False
            self._stream = link.open_stream(
                following.method,
                encode(following.opening()),
                self,
                window=following.window(subscription.config),
            )
            subscription.streams += 1
        except Exception as error:
            _log.debug("cannot follow %s of %s: %s", subscription.name, member.node, error)
            self._later(error)

    def _later(self, error: BaseException | None) -> None:
        """Try again after the back-off."""
        self._stream = None
        self.following.lost()
        if self._over:
            return
        now = self._subscription.node.now()
        if isinstance(error, DialFailed):
            delay = self._redial.failed(error)
        else:
            delay = self._redial.lost(now)
        self._timer = self._subscription.timers.call_later(delay, self.connect)

    def recheck(self) -> None:
        """Ask the publisher for a snapshot if the state differs from its last watermark."""
        stream = self._stream
        question = None if stream is None else self.following.recheck()
        if stream is None or question is None:
            return
        with suppress(LinkLost):  # `on_end` follows
            if not stream.try_send(question):
                error = ProtocolError("the publisher granted no credit for a question")
                self._later(error)
                stream.abort(error)

    def cut(self) -> None:
        """End the stream, or the attempt to open one."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        if self._stream is not None:
            self._stream.abort(Cancelled("the subscriber has gone"))
            self._stream = None

    # ------------------------------------------------------------------ net.base.Sink

    def on_data(self, body: Buffer) -> None:
        if not self._heard:
            self._heard = True
            self._redial.connected(self._subscription.node.now())
        stream = self._stream
        try:
            answer = self.following.hear(body)
            if answer is None or stream is None or self._stream is not stream:
                return
            if not stream.try_send(answer):
                raise ProtocolError("the publisher granted no credit for an answer")
        except LinkLost:
            return  # `on_end` follows
        except Exception as error:
            self._later(error)
            raise  # the link says it to the log and to the peer, and ends the stream

    def on_end(self, error: BaseException | None) -> None:
        stream = self._stream
        self._later(error)
        if stream is not None:
            stream.end()

    def on_unblocked(self) -> None:
        """Nothing to do: answers are not queued."""
