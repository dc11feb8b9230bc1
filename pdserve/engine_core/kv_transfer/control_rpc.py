"""How transports reach their counterparts: questions leave by number, answers come back by it.

The node asks for them, over its links. Owned by a mover; lives on its loop.
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
"""Under way; one more fails as `Overloaded`."""


class ControlRpc:
    """See above."""

    def __init__(self, say: Callable[[OutboundControl], None]) -> None:
        self._say = say
        self._waiting: dict[int, asyncio.Future[TransferControl]] = {}
        self._numbers = 0
        self._closed = False

    def of(self, backend: str) -> CallPeer:
        """For one back end's transport; empty: for what is of none."""
        return partial(self._ask, backend)

    async def _ask(
        self, backend: str, peer: NodeLife, control: TransferControl, timeout: Seconds
    ) -> TransferControl:
        if self._closed:
            raise LinkLost("this engine's transports are closing", sent=False)
        if len(self._waiting) >= MAX_CONTROL_REQUESTS:
            raise Overloaded(f"{MAX_CONTROL_REQUESTS} questions to peers are under way")
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
        """One has come; late ones are dropped."""
        future = self._waiting.get(answer.number)
        if future is None or future.done():
            return
        if answer.control is None:
            future.set_exception(error_of(answer))
        else:
            future.set_result(answer.control)

    def close(self) -> None:
        """Nobody carries them any more: those under way fail, and so does every later one."""
        self._closed = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(LinkLost("this engine's transports are closing"))
