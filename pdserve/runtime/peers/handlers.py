"""Declares what a part of a role serves to other nodes. Such a part is an actor.

    @answers(METHOD)         a request, answered at once, or later by its call
    @answers_later(METHOD)   a request, answered by a task of the node
    @hears(NOTICE)           a one-way message
    @accepts(NUMBER)         a stream that a peer opens

The decorators mark methods; `Node.host` enters an actor's marked methods into the node's table. A
method that replaces a marked one, in a subclass or a test, needs a mark of its own.
An actor of another node is reached by `runtime.peers.peer_ref`. Messages are decoded here, so that
actors see records only, wherever the other node is; what they mean is the actors' business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

from pdserve.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from pdserve.net.base import IncomingCall, IncomingStream, Peer
    from pdserve.runtime.tasks import Tasks
    from pdserve.wire.codec import Method, Notice
    from pdserve.wire.parser import Buffer

    Answer = Callable[["S", "Q", IncomingCall], "R | None"]
    Work = Callable[["S", "Q", IncomingCall], Coroutine[Any, Any, "R"]]
    Hear = Callable[["S", "Q", Peer], None]
    Opened = Callable[["S", IncomingStream, Buffer], None]

__all__ = ["ActorTable", "accepts", "answers", "answers_later", "hears"]

S = TypeVar("S")
Q = TypeVar("Q")
R = TypeVar("R")
F = TypeVar("F")

_MARK: Final = "_enter_served"
"""Attribute of a marked method: the function that enters it, bound to its actor, into a table."""


class ActorTable:
    """What the actors of one node serve, by number on the wire. The node passes messages to it."""

    def __init__(self, tasks: Tasks) -> None:
        self.answers: dict[int, Callable[[IncomingCall], None]] = {}
        self.notices: dict[int, Callable[[Peer, Buffer], None]] = {}
        self.records: dict[int, Callable[[Any, Peer], None]] = {}
        """The same as `notices`, for messages that need no decoding."""
        self.streams: dict[int, Callable[[IncomingStream, Buffer], None]] = {}
        self.tasks = tasks

    def host(self, actor: object) -> None:
        """Enters an actor's marked methods; for the same number the last actor counts."""
        for name in dir(type(actor)):
            enter = getattr(getattr(type(actor), name), _MARK, None)
            if enter is not None:
                enter(getattr(actor, name), self)


def answers(method: Method[Q, R]) -> Callable[[Answer[S, Q, R]], Answer[S, Q, R]]:
    """Marks the handler of a request. What it returns or raises is the answer. After None it
    answers later, with the call's `reply` or `fail`."""

    def enter(handler: Callable[[Q, IncomingCall], R | None], table: ActorTable) -> None:
        def on_call(call: IncomingCall) -> None:
            reply = handler(call.read(method), call)
            if reply is not None:
                call.reply(reply)

        table.answers[method.id] = on_call

    return _marker(enter)


def answers_later(
    method: Method[Q, R], *, at_once: int
) -> Callable[[Work[S, Q, R]], Work[S, Q, R]]:
    """Marks the handler of a request that takes time: it runs as a task, which is cancelled when
    the caller gives up. Beyond `at_once` tasks a request is refused as `Overloaded`."""

    def enter(
        handler: Callable[[Q, IncomingCall], Coroutine[Any, Any, R]], table: ActorTable
    ) -> None:
        running: dict[object, None] = {}

        async def work(message: Q, call: IncomingCall) -> None:
            try:
                call.reply(await handler(message, call))
            except Exception as error:  # a bug, too: the caller waits
                call.fail(error)

        def on_call(call: IncomingCall) -> None:
            message = call.read(method)
            if len(running) >= at_once:
                raise Overloaded(f"too many requests at once: {method.name}", retry_after=1.0)
            name = f"{method.name} for {call.life.node}"
            task = table.tasks.spawn(work(message, call), name)
            running[task] = None
            task.add_done_callback(lambda ended: running.pop(ended, None))

            def unwanted() -> None:
                task.cancel()

            call.on_cancel = unwanted

        table.answers[method.id] = on_call

    return _marker(enter)


def hears(notice: Notice[Q]) -> Callable[[Hear[S, Q]], Hear[S, Q]]:
    """Marks the handler of a one-way message."""

    def enter(handler: Callable[[Q, Peer], None], table: ActorTable) -> None:
        table.notices[notice.id] = lambda peer, body: handler(notice.decode(body), peer)
        table.records[notice.id] = handler

    return _marker(enter)


def accepts(number: int) -> Callable[[Opened[S]], Opened[S]]:
    """Marks the handler of new streams; it accepts or aborts them. What it raises ends the
    stream."""

    def enter(handler: Callable[[IncomingStream, Buffer], None], table: ActorTable) -> None:
        table.streams[number] = handler

    return _marker(enter)


def _marker(enter: Callable[[Any, ActorTable], None]) -> Callable[[F], F]:
    def mark(handler: F) -> F:
        setattr(handler, _MARK, enter)
        return handler

    return mark
