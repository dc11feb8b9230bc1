"""A file to the trace that it is: by its first line, whatever its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.sim.traces.azure import COLUMNS, AzureTrace
from pdserve.sim.traces.lines import read_lines
from pdserve.sim.traces.mooncake import MooncakeTrace

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pdserve.sim.traces.base import TraceRequest

__all__ = ["open_trace"]


def open_trace(path: Path) -> Iterable[TraceRequest]:
    """Raises `ConfigError` for a file that is no trace; bad lines show when they are read."""
    _, first = next(read_lines(path), (0, b""))
    if first.startswith(b"{"):
        return MooncakeTrace(path)
    if first.startswith((COLUMNS[0].encode(), b"\xef\xbb\xbf")):
        return AzureTrace(path)
    raise ConfigError(
        f"{path} is no trace that pdserve reads: neither Mooncake's JSONL (a line begins with "
        f"'{{') nor Azure's CSV (its first line is {','.join(COLUMNS)})"
    )
