"""Errors across the wire: an exception becomes a record at the node that failed and an exception of
the same class at the node that asked. Only names from `pdserve.errors` and text pass."""

from __future__ import annotations

import msgspec

from pdserve import errors
from pdserve.errors import LinkError, PdserveError, Unavailable
from pdserve.wire.codec import decoder, encode

__all__ = ["Failure", "decode_failure", "encode_failure", "error_of", "failure_of"]

_LONGEST = 2000
"""Characters of a message that travel: a `Failure` must fit its frame."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a request or a stream ended; the body of ERROR and RESET."""

    kind: str
    """Name of a class in `pdserve.errors`."""
    message: str
    retry_after: float | None = None
    """Seconds."""
    param: str | None = None


decode_failure = decoder(Failure)


def encode_failure(failure: Failure) -> bytes:
    """The frame's body."""
    return encode(failure)


def failure_of(error: BaseException) -> Failure:
    """The record of `error`.

    A link that failed *there* says nothing about the link the record travels on, so it becomes
    `Unavailable`; a foreign exception becomes the root, and its type is part of the text.
    """
    if isinstance(error, LinkError):
        return Failure(Unavailable.__name__, _cut(error.message))
    if isinstance(error, PdserveError):
        param = None if error.param is None else error.param[:200]
        return Failure(type(error).__name__, _cut(error.message), error.retry_after, param)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(PdserveError.__name__, _cut(text))


def error_of(failure: Failure) -> PdserveError:
    """The exception that a record stands for; the root class if this version does not know it."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, PdserveError)):
        return PdserveError(f"{failure.kind}: {failure.message}")
    if issubclass(kind, LinkError):
        return Unavailable(failure.message)
    return kind(failure.message, param=failure.param, retry_after=failure.retry_after)


def _cut(text: str) -> str:
    """At most what fits, in UTF-8."""
    return text.encode("utf-8", "replace")[:_LONGEST].decode("utf-8", "ignore")
