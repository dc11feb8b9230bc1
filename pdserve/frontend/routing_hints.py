"""Reads a client's hints on where and how soon to serve its request.

Two headers, a body field and the API key become one record, which routers get with the request.
Pure; routers decide what the hints do.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.ids import NodeId, Seconds

if TYPE_CHECKING:
    from multidict import CIMultiDictProxy

    from pdserve.frontend.access.api_keys import ApiKey

__all__ = ["NO_HINTS", "RoutingHints", "parse_hints"]

_SLO: Final = "x-pdserve-slo-ttft-ms"
_WORKER: Final = "x-pdserve-worker"
_MAX_SLO: Final = 86_400_000.0
"""Milliseconds; a day. More is a mistake in the unit."""
_MAX_WORKERS: Final = 32
"""Names in one request: more than a client pins by hand; routers keep them while it waits."""
_NAME: Final = re.compile(r'["-~]{1,128}')
"""Printable ASCII but for blanks and the mark of what is to be avoided."""
_NUMBER: Final = re.compile(
    r"[+]?[0-9]*+(?:[.][0-9]*+)?(?:e[+-]?[0-9]++)?", re.ASCII | re.IGNORECASE
)
"""`float` alone takes underscores and the digits of every script. Possessive: eight kilobytes of
digits would take seconds to refuse otherwise."""


class RoutingHints(msgspec.Struct, frozen=True, kw_only=True):
    """What travels with a request besides what is computed."""

    session_id: str = ""
    """Requests of one conversation or agent."""
    tenant: str = ""
    """Whom the API key belongs to; empty without keys."""
    weight: float = 1.0
    """The tenant's share."""
    allowed: tuple[NodeId, ...] = ()
    """Only these workers; empty: all."""
    denied: tuple[NodeId, ...] = ()
    """None of these."""
    slo_ttft: Seconds | None = None
    """From arrival to the first token, as the client can bear it."""
    waited: Seconds = 0.0
    """Since the request arrived, until the backend got it."""

    def takes(self, worker: NodeId) -> bool:
        """Whether the client will have this worker."""
        return worker not in self.denied and (not self.allowed or worker in self.allowed)


NO_HINTS: Final = RoutingHints()


def parse_hints(
    headers: CIMultiDictProxy[str], session_id: str | None, key: ApiKey | None
) -> RoutingHints:
    """Errors: `InvalidRequest` names the header."""
    allowed, denied = _workers(",".join(headers.getall(_WORKER, ())))
    return RoutingHints(
        session_id=session_id or "",
        tenant="" if key is None else key.tenant,
        weight=1.0 if key is None else key.weight,
        allowed=allowed,
        denied=denied,
        slo_ttft=_slo(headers.getall(_SLO, ())),
    )


def _slo(values: list[str] | tuple[str, ...]) -> Seconds | None:
    if not values:
        return None
    try:
        (text,) = values
        number = float(text) if _NUMBER.fullmatch(text.strip()) else math.nan
    except ValueError:
        number = math.nan
    if not 0 < number <= _MAX_SLO:
        raise InvalidRequest(
            f"the header '{_SLO}' must be one number of milliseconds, greater than 0 and at most "
            f"{_MAX_SLO:.0f} (a day)",
            param=_SLO,
        )
    return number / 1000


def _workers(text: str) -> tuple[tuple[NodeId, ...], tuple[NodeId, ...]]:
    """Names with commas between them; `!` before a name: not this one."""
    if not text:
        return (), ()
    words = [word.strip() for word in text.split(",")]
    if len(words) > _MAX_WORKERS:
        raise InvalidRequest(
            f"the header '{_WORKER}' names {len(words)} workers; the limit is {_MAX_WORKERS}",
            param=_WORKER,
        )
    allowed: list[NodeId] = []
    denied: list[NodeId] = []
    for word in words:
        name = word.removeprefix("!")
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"the header '{_WORKER}' must be names of workers with commas between them, each "
                "with '!' before it if it is to be avoided: a,b or !a",
                param=_WORKER,
            )
        (denied if word != name else allowed).append(NodeId(name))
    return tuple(allowed), tuple(denied)
