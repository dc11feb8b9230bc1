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
"""Largest SLO in milliseconds, a day: a larger one has the wrong unit."""
_MAX_WORKERS: Final = 32
"""Most worker names in one request: more than a client lists by hand; routers store them while the
request waits."""
_NAME: Final = re.compile(r'["-~]{1,128}')
"""Printable ASCII except blanks and `!`, the mark of a worker to avoid."""
_NUMBER: Final = re.compile(
    r"[+]?[0-9]*+(?:[.][0-9]*+)?(?:e[+-]?[0-9]++)?", re.ASCII | re.IGNORECASE
)
"""`float` alone also accepts underscores and the digits of every script. Possessive: otherwise
refusing eight kilobytes of digits would take seconds."""


class RoutingHints(msgspec.Struct, frozen=True, kw_only=True):
    """A client's routing hints, sent to routers with the request."""

    session_id: str = ""
    """Names the conversation or agent that the request belongs to."""
    tenant: str = ""
    """Tenant of the API key; empty without keys."""
    weight: float = 1.0
    """Weight of the tenant."""
    allowed: tuple[NodeId, ...] = ()
    """The only workers that may take the request; empty: all."""
    denied: tuple[NodeId, ...] = ()
    """None of these."""
    slo_ttft: Seconds | None = None
    """Seconds from arrival to the first token that the client accepts; None: no limit."""
    waited: Seconds = 0.0
    """Seconds from the request's arrival until the backend got it."""

    def takes(self, worker: NodeId) -> bool:
        """True if the client allows this worker."""
        return worker not in self.denied and (not self.allowed or worker in self.allowed)


NO_HINTS: Final = RoutingHints()


def parse_hints(
    headers: CIMultiDictProxy[str], session_id: str | None, key: ApiKey | None
) -> RoutingHints:
    """Reads the hints. Errors: `InvalidRequest` names the header."""
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
    """Reads worker names separated by commas; `!` marks one to avoid."""
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
