"""Carries errors between nodes: an exception becomes a record, and the record an exception of the
same class.

Only class names from `pdserve.errors` and text pass.
"""

from __future__ import annotations

import msgspec

from pdserve.errors import LinkError, PdserveError, Unavailable, error_class
from pdserve.wire.codec import decoder, encode

__all__ = ["Failure", "decode_failure", "encode_failure", "error_of", "failure_of"]

_FOREIGN = "the node failed inside; its log says how"
_LONGEST = 2000
"""Most characters of a message, so that a `Failure` fits its frame."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Why a request or a stream ended; the body of ERROR and RESET."""

    kind: str
    """Name of a class in `pdserve.errors`."""
    message: str
    retry_after: float | None = None
    """Seconds until a retry makes sense."""
    param: str | None = None


decode_failure = decoder(Failure)


def encode_failure(failure: Failure) -> bytes:
    """Encodes an error as a frame's body."""
    return encode(failure)


def failure_of(error: BaseException) -> Failure:
    """The record of `error`.

    A `LinkError` concerns another link than the one that carries the record, so it becomes
    `Unavailable`. A foreign exception becomes the root class without its message, because that may
    contain private text and would reach clients; the failing node logs it.
    """
    if isinstance(error, LinkError):
        return Failure(Unavailable.__name__, _cut(error.message))
    if isinstance(error, PdserveError):
        param = None if error.param is None else error.param[:200]
        return Failure(type(error).__name__, _cut(error.message), error.retry_after, param)
    return Failure(PdserveError.__name__, _FOREIGN)


def error_of(failure: Failure) -> PdserveError:
    """The exception of a record; the root class if this version does not know its name."""
    kind = error_class(failure.kind)
    if kind is None:
        return PdserveError(f"{failure.kind}: {failure.message}")
    if issubclass(kind, LinkError):
        return Unavailable(failure.message)
    return kind(failure.message, param=failure.param, retry_after=failure.retry_after)


def _cut(text: str) -> str:
    """Cuts a text to the bytes that fit, in UTF-8."""
    return text.encode("utf-8", "replace")[:_LONGEST].decode("utf-8", "ignore")
