"""Mooncake's traces (JSONL): a line names the prompt's blocks of 512 tokens by `hash_ids`.

Equal ids mean equal blocks after equal prefixes, so the ids themselves are the prompt's contents.
The conversation trace's timestamps are multiples of three seconds, with up to 28 requests in one
instant: replay it with jitter, or say that you did not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.sim.traces.base import TraceRequest
from pdserve.sim.traces.lines import bad_line, read_lines

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["BLOCK", "MooncakeTrace"]

BLOCK: Final = 512
"""Tokens that an id stands for."""


class _Line(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    """Milliseconds."""
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[Annotated[int, Meta(ge=0)]]


_decoder = msgspec.json.Decoder(_Line)


class MooncakeTrace:
    """The requests of a file, read anew by each iteration."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[TraceRequest]:
        """Raises `ConfigError` at the first bad line."""
        for count, (number, text) in enumerate(read_lines(self._path)):
            try:
                line = _decoder.decode(text)
            except msgspec.MsgspecError as error:
                what = f"{error}; expected timestamp (ms), input_length, output_length, hash_ids"
                raise bad_line(self._path, number, what) from None
            most = len(line.hash_ids) * BLOCK
            if not most - BLOCK < line.input_length <= most:
                what = (
                    f"input_length {line.input_length} does not fit {len(line.hash_ids)} hash_ids "
                    f"of {BLOCK} tokens: one of them is wrong"
                )
                raise bad_line(self._path, number, what)
            pieces = [(content, BLOCK) for content in line.hash_ids]
            pieces[-1] = (line.hash_ids[-1], line.input_length - most + BLOCK)
            # An engine answers with one token at least.
            output = max(1, line.output_length)
            yield TraceRequest(count, line.timestamp / 1000, tuple(pieces), output)
