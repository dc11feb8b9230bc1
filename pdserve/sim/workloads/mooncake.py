"""Reads Mooncake's traces (JSONL), whose lines name 512-token prompt blocks by `hash_ids`.

Equal ids mean equal blocks after equal prefixes, so the ids themselves are the prompt's contents. A
line without ids shares nothing with another one.
The conversation trace's timestamps are multiples of three seconds, with up to 28 requests at one
time: replay it with jitter, or report that you did not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.sim.workloads.lines import bad_line, read_lines
from pdserve.sim.workloads.trace_request import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve.sim.workloads.trace_request import PromptPiece

__all__ = ["BLOCK", "MooncakeTrace"]

BLOCK: Final = 512
"""Tokens per id."""
_OWN: Final = 1 << 29
"""Contents of prompts without ids: above the ids of the known traces, below what `tokens_of` tells
apart."""


class _Line(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    """Milliseconds."""
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: list[Annotated[int, Meta(ge=0)]] = []


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
            wanted = -(-line.input_length // BLOCK)
            if line.hash_ids and len(line.hash_ids) != wanted:
                what = (
                    f"input_length {line.input_length} needs {wanted} hash_ids of {BLOCK} tokens, "
                    f"not {len(line.hash_ids)}; leave hash_ids out if prompts share nothing"
                )
                raise bad_line(self._path, number, what)
            pieces = _pieces(line, count)
            # An engine answers with one token at least.
            output = max(1, line.output_length)
            yield TraceRequest(count, line.timestamp / 1000, pieces, output)


def _pieces(line: _Line, count: int) -> tuple[PromptPiece, ...]:
    if not line.hash_ids:
        return ((_OWN + count, line.input_length),)
    *whole, last = line.hash_ids
    rest = line.input_length - len(whole) * BLOCK
    return (*((content, BLOCK) for content in whole), (last, rest))
