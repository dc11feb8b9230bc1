"""Defines OpenAI's error object, and encodes errors as it.

`pdserve.errors` defines the HTTP status of each error; the client reads the object by its records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from pdserve.errors import PdserveError


class ErrorDetail(msgspec.Struct, kw_only=True):
    """Message, type and code of an error."""

    message: str
    type: str
    param: str | None = None
    """Path of the faulty field: `messages[0].content`."""
    code: str | None = None
    """Stable error code; branch on this, not on `message`."""


class ErrorBody(msgspec.Struct, kw_only=True):
    """The body of every answer with a status of 400 or more, and of an error event in a stream."""

    error: ErrorDetail


def error_body(error: PdserveError) -> bytes:
    """Encode an error as JSON."""
    return _encode(
        ErrorBody(
            error=ErrorDetail(
                message=error.message, type=error.error_type, param=error.param, code=error.code
            )
        )
    )


_encode = msgspec.json.Encoder().encode
