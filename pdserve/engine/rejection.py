"""Errors across the engine port: an exception becomes a record in the core and one again at the
client. Foreign exceptions are mapped here, and only their text passes."""

from __future__ import annotations

from pdserve import errors
from pdserve.errors import EngineError, PdserveError
from pdserve.messages.engine import (
    AttemptLost,
    Failed,
    Rejected,
    Sent,
    TransferAnswered,
    TransferReply,
)

__all__ = ["error_of", "failed", "rejected", "words_of"]


def rejected(handle: int, error: PdserveError) -> Rejected:
    """The record that ends the submission `handle` with `error`."""
    return Rejected(
        handle=handle,
        kind=type(error).__name__,
        message=error.message,
        param=error.param,
        retry_after=error.retry_after,
    )


def failed(error: BaseException) -> Failed:
    """The last event of a core that ends with `error`."""
    if isinstance(error, PdserveError):
        return Failed(kind=type(error).__name__, message=error.message)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failed(kind=EngineError.__name__, message=text)


def words_of(error: BaseException) -> tuple[str, str]:
    """Kind and message, as records carry them."""
    record = failed(error)
    return record.kind, record.message


_Record = Rejected | Failed | AttemptLost | Sent | TransferReply | TransferAnswered


def error_of(record: _Record) -> PdserveError:
    """The exception that a record stands for; `EngineError` if this version does not know it."""
    kind = getattr(errors, record.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, PdserveError)):
        return EngineError(f"{record.kind}: {record.message}")
    if isinstance(record, Rejected):
        return kind(record.message, param=record.param, retry_after=record.retry_after)
    return kind(record.message)
