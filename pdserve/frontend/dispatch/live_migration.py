"""Moves a running request to another worker while the first one still streams.

The new worker fetches or computes the KV of the tokens so far (the pre-copy); the first worker
streams until the new one can start at once. If no worker has room, or a router or the new worker
fails, the request stays. A failed move never ends a request. If the first worker dies, the move
is cancelled and `dispatched_request` finds another worker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from pdserve.errors import PdserveError
from pdserve.frontend.dispatch.migration_state import prewarm_request
from pdserve.ids import NodeLife

if TYPE_CHECKING:
    from pdserve.frontend.dispatch.dispatched_request import (
        Assignment,
        ClusterPort,
        DispatchedRequest,
    )
    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.routing import RouteDecision

__all__ = ["migrate_live"]

_log = logging.getLogger(__name__)

_WARM: Final[Seconds] = 5.0
"""For the whole pre-copy; what is missing then is computed after the stop."""
_BLOCKS: Final = 4
"""Of a sequence; fewer are computed as fast as they are fetched."""
_NEWS: Final[Seconds] = 5.0
"""Who has to go asks again when there is news, or after so long."""
_PAUSE: Final[Seconds] = 0.05


async def migrate_live(
    dispatched: DispatchedRequest, ways: ClusterPort, attempt: Assignment
) -> None:
    """Until it is elsewhere, or stays where it is, for `attempt.moving`. Where it has left and was
    not taken, it is nowhere.

    Cancellation: what was booked is given back, warm-ups are ended.
    """
    while True:
        reason = attempt.moving
        answer = await _ask(dispatched, ways)
        if answer is not None and await _go(dispatched, ways, attempt, *answer):
            return
        if dispatched.attempt is not attempt:
            return
        if attempt.moving == "drain":
            await ways.wait_news(timeout=_NEWS, at_least=_PAUSE)
        elif attempt.moving == reason:
            return


async def _ask(
    dispatched: DispatchedRequest, ways: ClusterPort
) -> tuple[NodeId, RouteDecision] | None:
    try:
        return await ways.route(dispatched)
    except PdserveError as error:
        _log.debug("a request stays where it is: %s", error)
        return None


async def _go(
    dispatched: DispatchedRequest,
    ways: ClusterPort,
    attempt: Assignment,
    router: NodeId,
    routed: RouteDecision,
) -> bool:
    """Whether the worker that was named has it."""
    try:
        if attempt.moving != "queue":
            await _warm(dispatched, ways, attempt, routed)
        elif attempt.begun:  # a token came while the router was asked
            ways.give_back(router, routed)
            return False
    except BaseException:
        ways.give_back(router, routed)
        raise
    try:
        return await dispatched.place(router, routed, leave=attempt)
    except PdserveError as error:
        dispatched.count_out(NodeLife(routed.worker, routed.epoch), error)
        return False


async def _warm(
    dispatched: DispatchedRequest, ways: ClusterPort, attempt: Assignment, routed: RouteDecision
) -> None:
    """Have the worker get the KV of all that has come. It may fail: then it computes it when it has
    the request."""
    request, received = dispatched.request, dispatched.received
    tokens = len(request.prompt) + received.longest
    if tokens < _BLOCKS * ways.block_size(request.model) or not attempt.begun:
        return
    source = attempt.life if ways.shares_kv(attempt.life.node, routed.worker) else None
    until = ways.now() + _WARM
    try:
        for choice in received.live:
            left = until - ways.now()
            if left <= 0:
                return
            wanted = prewarm_request(request, received.tokens(choice), source, left)
            await ways.warm(wanted, routed, left)
    except PdserveError as error:
        _log.info("worker %s was not warmed up: %s", routed.worker, error)
