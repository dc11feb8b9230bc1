"""A request moves while its worker still has it: another worker is found, is warmed up, and goes on
where the first one stops.

The first worker streams on until the other can begin at once: its KV is fetched or computed there
beforehand (the pre-copy), up to the tokens that had come by then. Nobody has room: it stays. The
first worker dies meanwhile: whoever runs this is cut short, and finds another one the ordinary way
(`errand`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pdserve.errors import (
    DeadlineExceeded,
    EngineDied,
    LinkError,
    Overloaded,
    PdserveError,
    Unavailable,
)
from pdserve.frontend.migration import warm_up

if TYPE_CHECKING:
    from pdserve.frontend.errand import Attempt, Errand, Ways
    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.routing import Routed

__all__ = ["move"]

_log = logging.getLogger(__name__)

_WARM: Final[Seconds] = 5.0
"""For the whole pre-copy; what is missing then is computed after the stop."""
_BLOCKS: Final = 4
"""Of a sequence; fewer are computed as fast as they are fetched."""
_NEWS: Final[Seconds] = 5.0
"""Who has to go asks again when there is news, or after so long."""
_PAUSE: Final[Seconds] = 0.05
_NOBODY: Final = (LinkError, Unavailable, Overloaded, EngineDied)


async def move(errand: Errand, ways: Ways, attempt: Attempt) -> None:
    """Until it is elsewhere, or stays where it is, for `attempt.moving`. Where it has left and was
    not taken, it is nowhere.

    Raises what ends a request. Cancellation: what was booked is given back, warm-ups are ended.
    """
    while True:
        reason = attempt.moving
        answer = await _ask(errand, ways)
        if answer is not None and await _go(errand, ways, attempt, *answer):
            return
        if errand.attempt is not attempt:
            return
        if attempt.moving == "drain":
            await ways.wait_news(timeout=_NEWS, at_least=_PAUSE)
        elif attempt.moving == reason:
            return


async def _ask(errand: Errand, ways: Ways) -> tuple[NodeId, Routed] | None:
    try:
        return await ways.route(errand)
    except (*_NOBODY, DeadlineExceeded) as error:
        _log.debug("a request stays where it is: %s", error)
        return None


async def _go(errand: Errand, ways: Ways, attempt: Attempt, router: NodeId, routed: Routed) -> bool:
    """Whether the worker that was named has it."""
    try:
        if attempt.moving != "queue":
            await _warm(errand, ways, attempt, routed)
        elif attempt.begun:  # a token came while the router was asked
            ways.give_back(router, routed)
            return False
    except BaseException:
        ways.give_back(router, routed)
        raise
    try:
        return await errand.place(router, routed, leave=attempt)
    except _NOBODY as error:
        errand.count_out((routed.worker, routed.epoch), error)
        return False


async def _warm(errand: Errand, ways: Ways, attempt: Attempt, routed: Routed) -> None:
    """Have the worker get the KV of all that has come. It may fail: then it computes it when it has
    the request."""
    request, received = errand.request, errand.received
    tokens = len(request.prompt) + received.longest
    if tokens < _BLOCKS * ways.block_size(request.model) or not attempt.begun:
        return
    source = attempt.life if ways.shares_kv(attempt.life[0], routed.worker) else None
    until = ways.now() + _WARM
    try:
        for choice in received.live:
            left = until - ways.now()
            if left <= 0:
                return
            wanted = warm_up(request, received.tokens(choice), source, left)
            await ways.warm(wanted, routed, left)
    except PdserveError as error:
        _log.info("worker %s was not warmed up: %s", routed.worker, error)
