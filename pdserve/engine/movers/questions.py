"""How transports reach their counterparts: questions leave by number, answers come back by it.

The node asks for them, over its links. Owned by a mover; lives on its loop.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final

from pdserve.engine.rejection import error_of
from pdserve.errors import DeadlineExceeded, LinkLost, Overloaded
from pdserve.messages.engine import TransferQuestion

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.messages.engine import TransferAnswered
    from pdserve.messages.transfer import Control
    from pdserve.transfer.base import Ask, PeerKey

__all__ = ["MAX_QUESTIONS", "Questions"]

MAX_QUESTIONS: Final = 1024
"""Under way; one more fails as `Overloaded`."""


class Questions:
    """See above."""

    def __init__(self, say: Callable[[TransferQuestion], None]) -> None:
        self._say = say
        self._waiting: dict[int, asyncio.Future[Control]] = {}
        self._numbers = 0
        self._closed = False

    def of(self, backend: str) -> Ask:
        """For one back end's transport; empty: for what is of none."""
        return partial(self._ask, backend)

    async def _ask(
        self, backend: str, peer: PeerKey, control: Control, timeout: Seconds
    ) -> Control:
        if self._closed:
            raise LinkLost("this engine's transports are closing", sent=False)
        if len(self._waiting) >= MAX_QUESTIONS:
            raise Overloaded(f"{MAX_QUESTIONS} questions to peers are under way")
        self._numbers += 1
        number = self._numbers
        future: asyncio.Future[Control] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        self._say(
            TransferQuestion(
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

    def answered(self, answer: TransferAnswered) -> None:
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
