"""Publishes a node's topics and follows those of other nodes.

The publisher's side is here: for each stream that a peer opened, a `_Subscriber` moves messages
from a feed into the stream as its credit allows. `subscription` follows others. `state` and
`publisher` decide what is sent; this file owns streams and timers. The node's owner owns it and
closes it before the node.

A node's card lists the topics that it publishes: the code that makes the card copies
`Topics.names`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from pdserve.errors import Overloaded, PdserveError, ProtocolError, Unavailable
from pdserve.runtime.peers.handlers import accepts
from pdserve.runtime.topics.config import TopicsConfig
from pdserve.runtime.topics.messages import LOG, STATE, decode_subscribe
from pdserve.runtime.topics.publisher import LogPublisher
from pdserve.runtime.topics.replicated_set import SetLog
from pdserve.runtime.topics.state import StatePublisher
from pdserve.runtime.topics.subscription import LogFollower, StateFollower, Subscription

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import NodeId, Seconds
    from pdserve.net.base import IncomingStream
    from pdserve.net.timers import Timer, Timers
    from pdserve.runtime.registry import Member
    from pdserve.runtime.topics.messages import Subscribe
    from pdserve.runtime.topics.publisher import LogSource
    from pdserve.runtime.topics.reader import LogTarget
    from pdserve.runtime.topics.subscription import Following, TopicsNode
    from pdserve.wire.parser import Buffer

__all__ = ["LogTopic", "StateTopic", "Topics"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSED: Final = "the topic is no longer published here"


class Topics:
    """All topics of one node."""

    def __init__(
        self, node: TopicsNode, timers: Timers, config: TopicsConfig | None = None
    ) -> None:
        self.node = node
        self.timers = timers
        self.config = config or TopicsConfig()
        self._published: dict[tuple[int, str], Publication] = {}
        self._subscriptions: dict[Subscription[Any], None] = {}
        self._logs = 0  # ever published
        node.host(self)

    # ------------------------------------------------------------------ publishing

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the published topics, for the node's card."""
        return tuple(name for _, name in self._published)

    def publish_state(
        self,
        name: str,
        encode: Callable[[T], bytes],
        *,
        interval: Seconds = 0.0,
        on_subscribe: Callable[[], None] = lambda: None,
    ) -> StateTopic[T]:
        """Publish a value; each subscriber gets the latest one, at most once per `interval`.
        `on_subscribe` is called for each new subscriber: the value may be made for those alone.

        Errors: `ValueError` if the name is taken.
        """
        machine = StatePublisher(encode, interval=interval)
        topic = StateTopic(self, name, machine, on_subscribe)
        return self._publish(STATE, topic)

    def publish_log(self, name: str, source: LogSource) -> LogTopic:
        """Publish the log of changes of `source`. Errors: `ValueError` if the name is taken."""
        self._logs += 1
        # Readers keep a position for one life of this node at most, so a count would do; the life
        # helps readers of a trace. It is 0 for logs that are published before the node starts.
        epoch = (self.node.epoch, self._logs)
        return self._publish(
            LOG, LogTopic(self, name, LogPublisher(epoch, source, self.config.log))
        )

    def publish_set(self, name: str) -> SetLog:
        """Publish a set (`SetLog`). Changes that its owner does not flush are published within
        `linger`.

        Errors: `ValueError` if the name is taken.
        """
        source = SetLog()
        topic = self.publish_log(name, source)
        timers, linger = self.timers, self.config.linger
        source.connect(topic.append, lambda: timers.call_later(linger, source.flush))
        return source

    def _publish(self, method: int, topic: P) -> P:
        if any(name == topic.name for _, name in self._published):
            raise ValueError(f"the topic {topic.name!r} is published already")
        self._published[method, topic.name] = topic
        return topic

    def withdraw(self, name: str) -> None:
        """Stop to publish a topic and tell its subscribers. Idempotent."""
        for method in (STATE, LOG):
            topic = self._published.pop((method, name), None)
            if topic is not None:
                topic.close()

    @accepts(STATE)
    def _open_state(self, stream: IncomingStream, body: Buffer) -> None:
        self._open(STATE, stream, body)

    @accepts(LOG)
    def _open_log(self, stream: IncomingStream, body: Buffer) -> None:
        self._open(LOG, stream, body)

    def _open(self, method: int, stream: IncomingStream, body: Buffer) -> None:
        """A peer subscribes to a topic. An exception is its answer."""
        subscribe = decode_subscribe(body)
        topic = self._published.get((method, subscribe.topic))
        if topic is None:
            raise Unavailable(f"the topic {subscribe.topic!r} is not published here")
        topic.open(stream, subscribe)

    # ------------------------------------------------------------------ subscribing

    def subscribe_state(
        self,
        name: str,
        decode: Callable[[Buffer], T],
        on_value: Callable[[Member, T], None],
        on_gone: Callable[[Member], None] | None = None,
    ) -> Subscription[StateFollower[T]]:
        """Follow the value of every member whose card names the topic.

        `on_gone` is called once for each followed life: when it ends, no longer publishes, or the
        subscription is closed. No value follows it.
        """
        return self._subscribe(name, lambda m: StateFollower(name, m, decode, on_value, on_gone))

    def subscribe_log(
        self,
        name: str,
        make_target: Callable[[Member], LogTarget],
        on_gone: Callable[[Member], None] | None = None,
    ) -> Subscription[LogFollower]:
        """Follow the log of every member whose card names the topic, each with its own target.

        When a life ends, no longer publishes, or the subscription is closed, its target is emptied,
        then `on_gone` is called, once.
        """
        return self._subscribe(name, lambda m: LogFollower(name, m, make_target(m), on_gone))

    def _subscribe(self, name: str, make: Callable[[Member], F]) -> Subscription[F]:
        subscription = Subscription(name, self.node, self.timers, self.config, make)
        self._subscriptions[subscription] = None
        subscription.on_close = lambda: self._subscriptions.pop(subscription, None)
        subscription.start()
        return subscription

    # ------------------------------------------------------------------ looking, ending

    def published(self, name: str) -> Publication | None:
        """What this node publishes under `name`; None: nothing."""
        return next((topic for (_, n), topic in self._published.items() if n == name), None)

    def following(self, name: str, node: NodeId) -> Following | None:
        """How this node follows `node` under `name`; None: it does not."""
        found = (s.get(node) for s in self._subscriptions if s.name == name)
        return next((following for following in found if following is not None), None)

    def stats(self) -> dict[str, dict[str, int]]:
        """Counters by `published/NAME` and `followed/NAME`."""
        found = {f"published/{topic.name}": topic.stats() for topic in self._published.values()}
        for subscription in self._subscriptions:
            found[f"followed/{subscription.name}"] = subscription.stats()
        return found

    def close(self) -> None:
        """End all subscriptions as if all members were gone, and tell subscribers. Idempotent."""
        for subscription in tuple(self._subscriptions):
            subscription.close()
        for name in self.names:
            self.withdraw(name)


class _Feed(Protocol):
    """What `StateFeed` and `LogFeed` have in common."""

    due: Seconds | None

    def poll(self, now: Seconds) -> bytes | None: ...

    def hear(self, body: Buffer, now: Seconds) -> None: ...

    def close(self) -> None: ...


class Publication:
    """One topic and its subscribers."""

    def __init__(self, topics: Topics, name: str) -> None:
        self.name = name
        self.subscribers: dict[_Subscriber, None] = {}
        self._topics = topics

    def feed(self, subscribe: Subscribe) -> _Feed:
        raise NotImplementedError

    def stats(self) -> dict[str, int]:
        raise NotImplementedError

    def open(self, stream: IncomingStream, subscribe: Subscribe) -> None:
        """Serve a peer that subscribes. Errors: `Overloaded`, `ProtocolError`."""
        limit = self._topics.config.subscribers
        if len(self.subscribers) >= limit:
            raise Overloaded(f"{self.name!r} has {limit} subscribers", retry_after=1.0)
        subscriber = _Subscriber(self, self._topics, stream, self.feed(subscribe))
        self.subscribers[subscriber] = None
        subscriber.start()

    def pump(self) -> None:
        """Send what is new."""
        for subscriber in tuple(self.subscribers):
            subscriber.pump()

    def close(self) -> None:
        """Tell the subscribers that the topic has ended."""
        for subscriber in tuple(self.subscribers):
            subscriber.drop(Unavailable(_CLOSED))


P = TypeVar("P", bound=Publication)
F = TypeVar("F", bound="Following")


class StateTopic(Publication, Generic[T]):
    """A value that this node publishes."""

    def __init__(
        self,
        topics: Topics,
        name: str,
        machine: StatePublisher[T],
        on_subscribe: Callable[[], None],
    ) -> None:
        super().__init__(topics, name)
        self._machine = machine
        self._on_subscribe = on_subscribe

    def set(self, value: T) -> None:
        """Publish a new value; an equal one is ignored."""
        if self._machine.set(value):
            self.pump()

    @property
    def value(self) -> bytes | None:
        """The present value, encoded; None: none yet."""
        return self._machine.value

    def feed(self, subscribe: Subscribe) -> _Feed:
        self._on_subscribe()
        return self._machine.feed()

    def stats(self) -> dict[str, int]:
        return {"subscribers": len(self.subscribers), "values": self._machine.sent}


class LogTopic(Publication):
    """A log that this node publishes."""

    def __init__(self, topics: Topics, name: str, machine: LogPublisher) -> None:
        super().__init__(topics, name)
        self._machine = machine

    def append(self, event: bytes) -> None:
        """Append an event that has changed the source. Errors: `PayloadTooLarge`; readers then
        notice the change at the next watermark and take a snapshot."""
        try:
            self._machine.append(event)
        finally:
            self.pump()

    def digest(self) -> int:
        """Digest of the source's present state."""
        return self._machine.source.digest()

    def feed(self, subscribe: Subscribe) -> _Feed:
        if subscribe.resume is None:
            raise ProtocolError("a subscriber of a log sent no position")
        return self._machine.feed(subscribe.resume, self._topics.node.now())

    def stats(self) -> dict[str, int]:
        return {"subscribers": len(self.subscribers), **self._machine.stats()}


class _Subscriber:
    """One subscriber's stream (a `Sink`) and its feed."""

    def __init__(
        self, topic: Publication, topics: Topics, stream: IncomingStream, feed: _Feed
    ) -> None:
        self._topic = topic
        self._topics = topics
        self._stream = stream
        self._feed = feed
        self._timer: Timer | None = None
        self._armed: Seconds = 0.0
        self._over = False

    def start(self) -> None:
        """Begin to send. Errors: `Overloaded`."""
        try:
            self._stream.accept(self, window=self._topics.config.resume_window)
        except Overloaded as error:
            self.drop(error)
            raise
        self.pump()

    def pump(self) -> None:
        """Send messages as long as there are some and the stream has credit."""
        stream, feed = self._stream, self._feed
        if self._over:
            return
        now = self._topics.node.now()
        try:
            while stream.sendable:
                message = feed.poll(now)
                if message is None:
                    self._arm(feed.due)
                    return
                stream.try_send(message)
        except PdserveError as error:
            self.drop(error)
        except Exception as error:  # of the source: its owner, who may have called us, lives on
            _log.exception("%s cannot be published to %s", self._topic.name, stream.link)
            self.drop(error)

    def _arm(self, due: Seconds | None) -> None:
        """Pump again at that time; if a timer fires earlier, it sets the next one itself."""
        if due is None or (self._timer is not None and self._armed <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._armed = due
        self._timer = self._topics.timers.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.pump()

    def drop(self, error: BaseException) -> None:
        """End this subscriber's stream with an error. Idempotent."""
        if self._over:
            return
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self._topic.subscribers.pop(self, None)
        self._feed.close()
        self._stream.abort(error)

    # ------------------------------------------------------------------ net.base.Sink

    def on_data(self, body: Buffer) -> None:
        try:
            self._feed.hear(body, self._topics.node.now())
        except ProtocolError as error:
            self.drop(error)
            raise
        self.pump()

    def on_end(self, error: BaseException | None) -> None:
        self.drop(error or Unavailable("the subscriber has gone"))

    def on_unblocked(self) -> None:
        self.pump()
