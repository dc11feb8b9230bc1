"""Sends control calls of an engine's transports to peers and matches the replies by number.

The node carries the calls over its links. Owned by a `LoopKvConnector` and used on its loop.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from pdserve.errors import DeadlineExceeded, LinkLost, Overloaded
from pdserve.messages.engine import OutboundControl
from pdserve.messages.engine_errors import error_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import NodeLife, Seconds
    from pdserve.messages.engine import OutboundControlReply
    from pdserve.messages.transfer import TransferControl
    from pdserve.transfer.base import CallPeer

__all__ = ["MAX_CONTROL_REQUESTS", "ControlRpc"]

MAX_CONTROL_REQUESTS: Final = 1024
"""Most calls under way; one more fails as `Overloaded`."""


class ControlRpc:
    """Matches control calls to peers with their replies. A call raises `LinkLost` when the
    transports close, `DeadlineExceeded` after its timeout, or the error that the peer replied
    with."""

    def __init__(self, say: Callable[[OutboundControl], None]) -> None:
        self._say = say
        self._waiting: dict[int, asyncio.Future[TransferControl]] = {}
        self._numbers = 0
        self._closed = False

    def of(self, backend: str) -> CallPeer:
        """The function by which the transport of this back end calls peers. "" is for calls that
        belong to no back end."""
        return partial(self._ask, backend)

    async def _ask(
        self, backend: str, peer: NodeLife, control: TransferControl, timeout: Seconds
    ) -> TransferControl:
        if self._closed:
            raise LinkLost("this engine's transports are closing", sent=False)
        if len(self._waiting) >= MAX_CONTROL_REQUESTS:
            raise Overloaded(f"{MAX_CONTROL_REQUESTS} calls to peers are under way")
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[TransferControl] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._say(
            OutboundControl(
                number=number,
                node=peer.node,
                epoch=peer.epoch,
                backend=backend,
                control=control,
                timeout=timeout,
            )
        )
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise DeadlineExceeded(f"{peer} has not answered within {timeout:g} s") from None
        finally:
            del self._waiting[number]

    def answered(self, answer: OutboundControlReply) -> None:
        """Complete the call that this reply belongs to. A reply after the timeout is dropped."""
        future = self._waiting.get(answer.number)
        if future is None or future.done():
            return
        if answer.control is None:
            future.set_exception(error_of(answer))
        else:
            future.set_result(answer.control)

    def close(self) -> None:
        """Fail all calls under way and every later one with `LinkLost`."""
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LinkLost("this engine's transports are closing"))
