"""Checks periodically that the host name this node advertises can be resolved.

Other nodes dial that name; with a mistyped one the node dials out and no other can reach it. A name
may appear after the process starts, as a pod's does, so the node starts anyway, degraded.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from pdserve.net.address import without_port
from pdserve.net.transport.sockets import resolve

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.observe.degraded import Degradations

__all__ = ["watch_advertised_name"]

_AGAIN: Final[Seconds] = 10.0
_REASON: Final = "advertise_unresolved"


async def watch_advertised_name(advertise: str, degradations: Degradations) -> None:
    """Waits until the name resolves here, and reports a degradation until then."""
    host = without_port(advertise).strip("[]")
    while True:
        try:
            await resolve(host, 0)
        except OSError as error:
            degradations.add(
                _REASON,
                f"--advertise {advertise}: {host} does not resolve on this host "
                f"({error.strerror or error}); other nodes dial that name and cannot reach this "
                "one: correct it, or advertise an IP address",
            )
        else:
            degradations.clear(_REASON)
            return
        await asyncio.sleep(_AGAIN)
