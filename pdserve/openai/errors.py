"""OpenAI's error object, in both directions. Which error is which status is said in `errors.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pdserve.errors import PdserveError


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What went wrong, in words and by name."""

    message: str
    type: str
    param: str | None = None
    """The field at fault, as a path: `messages[0].content`."""
    code: str | None = None
    """Stable; branch on this, not on `message`."""


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of every answer with a status of 400 or more, and of an error event in a stream."""

    error: ErrorDetail


def error_body(error: PdserveError) -> bytes:
    """The error as JSON."""
    return _encode(
        ErrorBody(
            error=ErrorDetail(
                message=error.message, type=error.error_type, param=error.param, code=error.code
            )
        )
    )


_encode = msgspec.json.Encoder().encode
