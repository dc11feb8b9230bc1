"""Chooses the reader of a trace file by its first line; the file name does not matter."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.errors import ConfigError
from pdserve.sim.workloads.lines import read_lines
from pdserve.sim.workloads.mooncake import MooncakeTrace
from pdserve.sim.workloads.sharegpt import ShareGptTrace, is_sharegpt
from pdserve.sim.workloads.table import TableTrace, columns_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdserve.sim.workloads.trace_request import TraceRequest

__all__ = ["TraceFile", "open_trace"]

_FORMS = (
    "give JSON lines (timestamp in ms, input_length, output_length, perhaps hash_ids, as in "
    "Mooncake's traces), a CSV file with a header (Azure's, or any with --columns "
    "at=NAME,input=NAME,output=NAME), or ShareGPT's conversations"
)


class TraceFile(Protocol):
    """The requests of a file, read anew by each iteration."""

    @property
    def timed(self) -> bool:
        """False if the file has no arrival times."""
        ...

    def __iter__(self) -> Iterator[TraceRequest]: ...


def open_trace(path: Path, columns: str = "") -> TraceFile:
    """The requests of `path`; a bad line raises when it is read.

    Args: `columns` names the columns of a table, see `columns_of`.
    Errors: `ConfigError` for a file that is not a trace.
    """
    if path.is_fifo():
        raise ConfigError(f"{path} is a pipe, and a trace is read more than once: give a file")
    named = columns_of(columns) if columns else None
    if named is None and is_sharegpt(_head(path)):
        return ShareGptTrace(path)
    _, first = next(read_lines(path), (0, b""))
    if not first:
        raise ConfigError(f"{path} is empty, and no trace that pdserve reads: {_FORMS}")
    if first.startswith(b"["):
        raise ConfigError(
            f"{path} is a JSON array: write one object per line (jq -c '.[]' FILE); {_FORMS}"
        )
    if named is None and first.startswith(b"{"):
        return MooncakeTrace(path)
    if b"," not in first:
        for name, sign in (("semicolons", b";"), ("tabs", b"\t")):
            if sign in first:
                raise ConfigError(f"{path} has {name} between its fields: write commas")
        raise ConfigError(f"{path} is no trace that pdserve reads: {_FORMS}")
    return TableTrace(path, named)


_HEAD: Final = 1 << 16


def _head(path: Path) -> bytes:
    """The beginning of the file; empty if it cannot be read, which its reader reports."""
    try:
        with path.open("rb") as file:
            return file.read(_HEAD).removeprefix(codecs.BOM_UTF8)
    except OSError:
        return b""
