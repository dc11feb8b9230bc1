"""Defines the client's errors, as one tree.

    ClientError
    ├── APIError                the server answered with an error
    │   ├── InvalidRequest      400, 405, 408, 413, 422: the request is wrong
    │   ├── Unauthorized        401
    │   ├── Forbidden           403
    │   ├── NotFound            404: no such model or path
    │   ├── Overloaded          429: a queue of the server is full
    │   │   └── RateLimited         the API key's own limit
    │   ├── Unavailable         503: no worker can serve it now
    │   ├── DeadlineExceeded    504: the server's deadline passed
    │   └── ServerError         every other status from 500 on
    ├── ConnectionFailed        no connection, or it broke before the answer began
    ├── Timeout                 one of the client's own timeouts passed
    ├── StreamBroken            a stream ended early; `text` is what had arrived
    └── BadAnswer               the answer does not follow the API

`retryable` says whether a retry may help; `attempts` is how often the request was sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.errors import PdserveError
from pdserve.protocols.openai_errors import ErrorBody, ErrorDetail

if TYPE_CHECKING:
    from pdserve.ids import Seconds

_decode_error = msgspec.json.Decoder(ErrorBody).decode
_SHOWN: Final = 200
"""Characters of a stranger's body that a message repeats."""


class ClientError(PdserveError):
    """Base of all errors that the client raises."""

    code: str | None = None  # type: ignore[misc]  # the server's word, of each error its own
    retryable = False
    attempts: int = 1
    """How often the client sent, or tried to send, the request."""
    request_id: str | None = None


class APIError(ClientError):
    """The server's answer is an error."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str | None = None,
        type: str | None = None,
        param: str | None = None,
        request_id: str | None = None,
        retry_after: Seconds | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after)
        self.status = status
        self.code = code
        self.type = type
        self.request_id = request_id
        self.body = b""
        """The body that was received; empty if the error came within a stream."""

    def __str__(self) -> str:
        return f"{self.message} ({self.status})"


class InvalidRequest(APIError):
    """A field is missing, malformed or out of range; `param` names it."""


class Unauthorized(APIError):
    """The API key is missing or unknown."""


class Forbidden(APIError):
    """The API key does not allow this."""


class NotFound(APIError):
    """No such model or path."""


class Overloaded(APIError):
    """The server accepts no more requests now."""

    retryable = True


class RateLimited(Overloaded):
    """The API key's limit is reached."""


class Unavailable(APIError):
    """No worker can serve the request now."""

    retryable = True


class DeadlineExceeded(APIError):
    """The request's deadline passed at the server. The client does not retry, since another try
    would take as long."""


class ServerError(APIError):
    """The server failed internally."""


class ConnectionFailed(ClientError):
    """The connection was refused, reset or impossible before the answer began. `refused`: no
    process listens there."""

    retryable = True

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


class Timeout(ClientError):
    """One of the client's timeouts passed; `stage` is connect, first, between or total."""

    def __init__(self, stage: str, message: str, text: str = "") -> None:
        super().__init__(message)
        self.stage = stage
        self.text = text
        """What a stream had brought."""


class StreamBroken(ClientError):
    """A stream ended early. It is not retried, because its text has been given out."""

    def __init__(self, message: str, text: str, error: APIError | None = None) -> None:
        super().__init__(message)
        self.text = text
        """Text of the first choice, so far."""
        self.error = error
        """What the server said, if it said why."""


class BadAnswer(ClientError):
    """The answer does not follow the OpenAI API."""


_BY_STATUS: Final[dict[int, type[APIError]]] = {
    400: InvalidRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    405: InvalidRequest,
    408: InvalidRequest,
    413: InvalidRequest,
    422: InvalidRequest,
    429: Overloaded,
    503: Unavailable,
    504: DeadlineExceeded,
}
_BY_CODE: Final[dict[str, type[APIError]]] = {
    "rate_limit_exceeded": RateLimited,
    "deadline_exceeded": DeadlineExceeded,
}


def api_error(
    status: int,
    body: bytes,
    *,
    request_id: str | None = None,
    retry_after: Seconds | None = None,
) -> APIError:
    """The error for an answer of this status, by whatever server."""
    detail = detail_of(body) or _unworded(status, body)
    error = _named(status, detail, request_id, retry_after)
    error.body = body
    return error


def event_error(detail: ErrorDetail, request_id: str | None = None) -> APIError:
    """The error for an error event within a stream, whose status was already sent."""
    return _named(_status_of(detail), detail, request_id, None)


def detail_of(body: bytes | str) -> ErrorDetail | None:
    """OpenAI's error object, if the body is one."""
    try:
        return _decode_error(body).error
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _named(
    status: int, detail: ErrorDetail, request_id: str | None, retry_after: Seconds | None
) -> APIError:
    fallback = ServerError if status >= 500 else InvalidRequest
    kind = _BY_CODE.get(detail.code or "") or _BY_STATUS.get(status, fallback)
    return kind(
        detail.message,
        status=status,
        code=detail.code,
        type=detail.type,
        param=detail.param,
        request_id=request_id,
        retry_after=retry_after,
    )


def _unworded(status: int, body: bytes) -> ErrorDetail:
    text = body[:_SHOWN].decode("utf-8", "replace").strip()
    return ErrorDetail(message=text or f"the server answered with status {status}", type="")


def _status_of(detail: ErrorDetail) -> int:
    words = {
        "invalid_request_error": 400,
        "rate_limit_error": 429,
        "service_unavailable": 503,
        "timeout_error": 504,
    }
    return words.get(detail.type, 500)
