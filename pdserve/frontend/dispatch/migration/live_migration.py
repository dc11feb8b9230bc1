"""Moves a running request to another worker while the first one still streams.

The new worker fetches or computes the KV of the tokens so far (the pre-copy); the first worker
streams until the new one can start at once. If no worker has room, or a router or the new worker
fails, the request stays. A failed move never ends a request. If the first worker dies, the move
is cancelled and `dispatched_request` finds another worker.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from pdserve.errors import PdserveError
from pdserve.frontend.dispatch.migration.kv_prewarm import prewarm
from pdserve.frontend.dispatch.migration.migration_state import prewarm_request
from pdserve.ids import NodeLife

if TYPE_CHECKING:
    from pdserve.frontend.dispatch.assignment import Assignment
    from pdserve.frontend.dispatch.dispatched_request import DispatchContext, DispatchedRequest
    from pdserve.frontend.dispatch.router_client import RouterBooking
    from pdserve.ids import Seconds
    from pdserve.messages.routing import RouteDecision

__all__ = ["migrate_live"]

_log = logging.getLogger(__name__)

_WARM: Final[Seconds] = 5.0
"""Seconds for the whole pre-copy; KV that is missing then is computed at the new worker."""
_BLOCKS: Final = 4
"""Minimum number of KV blocks to fetch; fewer are computed as fast."""
_CHANGE: Final[Seconds] = 5.0
"""A request that must leave asks again when membership changes, or after this many seconds."""
_PAUSE: Final[Seconds] = 0.05


async def migrate_live(
    dispatched: DispatchedRequest, context: DispatchContext, attempt: Assignment
) -> None:
    """Tries to move the request to another worker; `attempt.moving` is the reason.

    Returns when another worker has it, or when it stays. If it has left the first worker and the
    second did not accept it, no worker has it, and the caller finds one.

    Cancellation: bookings are given back and prewarm requests are cancelled.
    """
    while True:
        reason = attempt.moving
        booking = await _ask(dispatched)
        if booking is not None and await _go(dispatched, context, attempt, booking):
            return
        if dispatched.attempt is not attempt:
            return
        if attempt.moving == "drain":
            await context.members.wait_change(timeout=_CHANGE, at_least=_PAUSE)
        elif attempt.moving == reason:
            return


async def _ask(dispatched: DispatchedRequest) -> RouterBooking | None:
    try:
        return await dispatched.route()
    except PdserveError as error:
        _log.debug("a request stays at its worker: %s", error)
        return None


async def _go(
    dispatched: DispatchedRequest,
    context: DispatchContext,
    attempt: Assignment,
    booking: RouterBooking,
) -> bool:
    """Moves the request to the worker of the booking; returns False if it was not moved."""
    try:
        if attempt.moving != "queue":
            await _prewarm(dispatched, context, attempt, booking.decision)
        elif attempt.begun:
            # The request began while the router was asked, so moving it to begin sooner is
            # pointless.
            booking.end("unreached")
            return False
    except BaseException:
        booking.end("unreached")
        raise
    try:
        return await dispatched.place(booking, leave=attempt)
    except PdserveError as error:
        dispatched.refused(booking.life, error)
        return False


async def _prewarm(
    dispatched: DispatchedRequest,
    context: DispatchContext,
    attempt: Assignment,
    decision: RouteDecision,
) -> None:
    """Lets the worker get the KV of all tokens so far: from the worker that has them, or else what
    others have of the prompt. Failures are ignored: the worker then computes the KV when it has the
    request."""
    request, received, members = dispatched.request, dispatched.received, context.members
    tokens = len(request.prompt) + received.longest
    if tokens < _BLOCKS * members.block_size(request.model) or not attempt.begun:
        return
    source = attempt.life if members.shares_kv(attempt.life.node, decision.worker) else None
    until = context.now() + _WARM
    try:
        for choice in received.live:
            left = until - context.now()
            if left <= 0:
                return
            wanted = prewarm_request(request, received.tokens(choice), source, left)
            if source is None:
                wanted = replace(wanted, kv_sources=decision.kv_sources)
            life = NodeLife(decision.worker, decision.epoch)
            await prewarm(context.workers, life, wanted, left)
    except PdserveError as error:
        _log.info("prewarming worker %s failed: %s", decision.worker, error)
