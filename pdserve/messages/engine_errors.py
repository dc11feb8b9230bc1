"""Encodes exceptions as records at the engine port, and decodes them at the client.

Foreign exceptions are mapped here; only their text passes.
"""

from __future__ import annotations

from pdserve.errors import EngineError, PdserveError, error_class
from pdserve.messages.engine import (
    AttemptLost,
    CoreFailed,
    InboundControlReply,
    KvDropped,
    OutboundControlReply,
    PrefillSent,
    Rejected,
)

__all__ = ["error_of", "failed_event", "kind_and_message", "rejected_event"]


def rejected_event(handle: int, error: PdserveError) -> Rejected:
    """Returns the record that ends the submission `handle` with `error`."""
    return Rejected(
        handle=handle,
        kind=type(error).__name__,
        message=error.message,
        param=error.param,
        retry_after=error.retry_after,
    )


def failed_event(error: BaseException) -> CoreFailed:
    """Returns the last event of a core that ends with `error`."""
    if isinstance(error, PdserveError):
        return CoreFailed(kind=type(error).__name__, message=error.message)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return CoreFailed(kind=EngineError.__name__, message=text)


def kind_and_message(error: BaseException) -> tuple[str, str]:
    """Returns the kind and message of an exception, as records carry them."""
    record = failed_event(error)
    return record.kind, record.message


_Record = (
    Rejected
    | CoreFailed
    | AttemptLost
    | PrefillSent
    | InboundControlReply
    | OutboundControlReply
    | KvDropped
)


def error_of(record: _Record) -> PdserveError:
    """Returns the exception for a record; `EngineError` if this version does not know its kind."""
    kind = error_class(record.kind)
    if kind is None:
        return EngineError(f"{record.kind}: {record.message}")
    if isinstance(record, Rejected):
        return kind(record.message, param=record.param, retry_after=record.retry_after)
    return kind(record.message)
