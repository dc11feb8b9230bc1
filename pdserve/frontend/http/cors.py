"""Builds CORS headers for browsers; adds none unless origins are configured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.frontend.placement import HEADER_NAMES, TRACE_ID_HEADER

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFLIGHT = (
    b"Access-Control-Allow-Methods: GET, POST, DELETE, OPTIONS\r\n"
    b"Access-Control-Allow-Headers: authorization, *\r\n"
    b"Access-Control-Max-Age: 600\r\n"
)
"""Official clients add a dozen headers of their own. `*` does not cover Authorization, which is
named besides (Fetch standard, "CORS non-wildcard request-header name")."""
_EXPOSED = b", ".join(
    (
        *(b"x-request-id", b"request-id", b"x-pdserve-seed", b"retry-after"),
        *(TRACE_ID_HEADER, *HEADER_NAMES),
    )
)


class Cors:
    """Which origins may read answers."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._any = "*" in origins
        self._origins = frozenset(origins)

    def lines(self, origin: str | None) -> bytes:
        """Header lines for an answer to `origin`; empty where it may not read."""
        if origin is None or not (self._any or origin in self._origins):
            return b""
        allowed = "*" if self._any else origin
        return (
            b"Access-Control-Allow-Origin: %s\r\nVary: Origin\r\n"
            b"Access-Control-Expose-Headers: %s\r\n" % (allowed.encode("ascii"), _EXPOSED)
        )

    def preflight_lines(self, origin: str | None) -> bytes:
        """Header lines for an answer to a preflight request."""
        lines = self.lines(origin)
        return lines + _PREFLIGHT if lines else b""
