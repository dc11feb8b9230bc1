"""Defines the HTTP request that an endpoint gets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.frontend.http.http_response import request_id_line
from pdserve.observe import logs

if TYPE_CHECKING:
    from aiohttp import web

    from pdserve.frontend.access.api_keys import ApiKey
    from pdserve.frontend.http.body_reader import RequestBody
    from pdserve.ids import Seconds
    from pdserve.tracing.phases import RequestPhases


_OLLAMA = "/api/"
_MESSAGES = "/v1/messages"
_MODELS = "/v1/models"


class HttpRequest:
    """One HTTP request. Lives as long as its task; only that task changes it."""

    __slots__ = (
        "_cors_lines",
        "began",
        "body",
        "http",
        "id_headers",
        "key",
        "log_fields",
        "phases",
        "request_id",
        "rest",
        "route",
        "served_lines",
        "trace_line",
    )

    def __init__(self, http: web.BaseRequest, cors_lines: bytes) -> None:
        """Args: `cors_lines` are header lines of every answer."""
        self._cors_lines = cors_lines
        self.http = http
        self.body: RequestBody | None = None
        """The body, once read; released at the end of the call, if not before."""
        self.request_id = ""
        self.id_headers: tuple[bytes, ...] = (b"x-request-id",)
        """Names of the response headers that carry the request id."""
        self.key: ApiKey | None = None
        """The API key; None if authentication is off or the endpoint needs none."""
        self.rest = ""
        """The rest of the path, for routes that end in a name."""
        self.served_lines = b""
        """Header lines added to an error: the worker that had the request, and other details."""

        self.route = "other"
        """Path of the endpoint, as metrics and traces name it."""
        self.phases: RequestPhases | None = None
        """What the request goes through; None: it is not recorded."""
        self.trace_line = b""
        """Header line with the trace's id, if it is certain that the trace is kept."""
        self.began: Seconds = 0.0
        """When it arrived; only noted for `--log-requests`."""
        self.log_fields: dict[str, Any] | None = None
        """What the request's line in the log says of its work; None: it did not get that far."""

    def name(self, request_id: str) -> None:
        """Sets the request id, for the answer and for every log line of the task."""
        self.request_id = request_id
        # Each task has a context of its own, so this needs no reset.
        logs.request_id.set(request_id)

    def close(self) -> None:
        """Releases what the request holds. Idempotent."""
        if self.body is not None:
            self.body.release()

    @property
    def is_anthropic(self) -> bool:
        """True if the client expects Anthropic's error format."""
        path = self.http.rel_url.path
        if path == _MODELS or path.startswith(f"{_MODELS}/"):
            return "anthropic-version" in self.http.headers
        return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")

    @property
    def is_ollama(self) -> bool:
        """True if the client expects Ollama's error format."""
        return self.http.rel_url.path.startswith(_OLLAMA)

    @property
    def headers(self) -> bytes:
        """Header lines of the answer, each with its CRLF."""
        ids = [request_id_line(self.request_id, name) for name in self.id_headers]
        return b"".join((*ids, self._cors_lines, self.served_lines, self.trace_line))
