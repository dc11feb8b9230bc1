"""Reads Mooncake's traces (JSONL), whose lines name 512-token prompt blocks by `hash_ids`.

Equal ids mean equal blocks after equal prefixes, so the ids themselves are the prompt's contents. A
line without ids shares nothing with another one. Times count from the trace's zero; those of a
clock, which began long before, from the first line.
The conversation trace's timestamps are multiples of three seconds, with up to 28 requests at one
time: replay it with jitter, or report that you did not.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.sim.workloads.lines import bad_line, check_span, read_lines
from pdserve.sim.workloads.trace_request import MOST_TOKENS, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from pdserve.sim.workloads.trace_request import PromptPiece

__all__ = ["BLOCK", "OWN_CONTENT", "MooncakeTrace", "block_pieces"]

BLOCK: Final = 512
"""Tokens per id."""
OWN_CONTENT: Final = 1 << 29
"""Contents of prompts without ids: above the ids of the known traces, below what `tokens_of` tells
apart."""


class _Line(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]
    """Milliseconds."""
    input_length: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    output_length: Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
    hash_ids: list[Annotated[int, Meta(ge=0)]] | None = None


_CLOCK: Final = 86_400_000.0
"""A first line after so many milliseconds has the time of a clock: a replay would wait as long."""
_decoder = msgspec.json.Decoder(_Line)


class MooncakeTrace:
    """The requests of a file, read anew by each iteration."""

    timed: Final = True

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[TraceRequest]:
        """Raises `ConfigError` at the first bad line."""
        zero: float | None = None
        first = inf
        for count, (number, text) in enumerate(read_lines(self._path)):
            try:
                line = _decoder.decode(text)
            except msgspec.MsgspecError as error:
                what = f"{error}; expected timestamp (ms), input_length, output_length, hash_ids"
                raise bad_line(self._path, number, what) from None
            try:
                pieces = block_pieces(line.hash_ids or (), line.input_length, BLOCK)
            except ValueError as error:
                raise bad_line(self._path, number, str(error)) from None
            if zero is None:
                zero = line.timestamp if line.timestamp > _CLOCK else 0.0
            if line.timestamp < zero:
                raise bad_line(self._path, number, "is earlier than the first: sort the file")
            first = min(first, line.timestamp)
            check_span(self._path, number, (line.timestamp - first) / 1000, "milliseconds")
            pieces = pieces or ((OWN_CONTENT + count, line.input_length),)
            # An engine answers with one token at least.
            output = max(1, line.output_length)
            yield TraceRequest(count, (line.timestamp - zero) / 1000, pieces, output)


def block_pieces(ids: Sequence[int], length: int, block: int) -> tuple[PromptPiece, ...]:
    """The pieces of a prompt whose blocks have these ids; none without ids. Errors:
    `ValueError`."""
    if not ids:
        return ()
    wanted = -(-length // block)
    if len(ids) != wanted:
        raise ValueError(
            f"input_length {length} needs {wanted} hash_ids of {block} tokens, not {len(ids)}; "
            "leave hash_ids out if prompts share nothing"
        )
    *whole, last = ids
    return (*((content, block) for content in whole), (last, length - len(whole) * block))
