"""One HTTP request as its endpoint sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.frontend.replies import request_id_line
from pdserve.observe import logs

if TYPE_CHECKING:
    from aiohttp import web

    from pdserve.frontend.keys import ApiKey


class Call:
    """Lives as long as the request's task; changed by nobody else."""

    __slots__ = ("_cors_lines", "http", "id_headers", "key", "request_id", "rest")

    def __init__(self, http: web.BaseRequest, cors_lines: bytes) -> None:
        """Args: `cors_lines` are header lines of every answer."""
        self._cors_lines = cors_lines
        self.http = http
        self.request_id = ""
        self.id_headers: tuple[bytes, ...] = (b"x-request-id",)
        """By which names its answer tells it."""
        self.key: ApiKey | None = None
        """None: no authentication is configured, or the endpoint needs none."""
        self.rest = ""
        """What follows the route's path, for routes that end in a name."""

    def name(self, request_id: str) -> None:
        """Give the request its id, for its answer and for every log line of its task."""
        self.request_id = request_id
        logs.request_id.set(request_id)  # the task's own context: nothing to reset

    @property
    def headers(self) -> bytes:
        """Header lines of the answer, each with its CRLF."""
        ids = [request_id_line(self.request_id, name) for name in self.id_headers]
        return b"".join((*ids, self._cors_lines))
