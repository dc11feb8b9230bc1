"""Actors of a few lines, for nodes of tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.runtime.peers.handlers import accepts, answers

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.net.base import IncomingCall, IncomingStream
    from pdserve.wire.codec import Method
    from pdserve.wire.parser import Buffer

Q = TypeVar("Q")
R = TypeVar("R")


def answering(method: Method[Q, R], answer: Callable[[Q, IncomingCall], R | None]) -> object:
    """An actor that answers one method with `answer`."""

    class Answering:
        @answers(method)
        def answer(self, message: Q, call: IncomingCall) -> R | None:
            return answer(message, call)

    return Answering()


def silent(method: Method[Any, Any]) -> object:
    """An actor that never answers."""
    return answering(method, lambda message, call: None)


def accepting(number: int, opened: Callable[[IncomingStream, Buffer], None]) -> object:
    """An actor that takes one kind of stream."""

    class Accepting:
        @accepts(number)
        def opened(self, stream: IncomingStream, body: Buffer) -> None:
            opened(stream, body)

    return Accepting()
