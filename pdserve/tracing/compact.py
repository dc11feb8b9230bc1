"""Encodes traces compactly, to be held in memory.

Encoded, a trace has a known size, nobody can change it, and the garbage collector need not look at
it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdserve.messages.trace import Trace

__all__ = ["decode_trace", "encode_trace", "well_formed"]

_encode: Final = msgspec.msgpack.Encoder().encode
decode_trace: Final = msgspec.msgpack.Decoder(Trace).decode
"""The trace of an encoding."""


def encode_trace(trace: Trace) -> bytes:
    """The encoding. Text that is no Unicode, as in a header of arbitrary bytes, is repaired."""
    try:
        return _encode(trace)
    except UnicodeEncodeError:
        return _encode(well_formed(msgspec.to_builtins(trace, builtin_types=(bytes,))))


def well_formed(value: Any) -> Any:
    """The same value with every text made UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list | tuple):
        return [well_formed(one) for one in value]
    if isinstance(value, dict):
        return {well_formed(name): well_formed(one) for name, one in value.items()}
    return value
