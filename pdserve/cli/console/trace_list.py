"""Formats lists of traces as text and traces as JSON, for `pdserve trace`. Pure."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.tracing.waterfall import plain_text, seconds_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pdserve.messages.trace import Trace, TraceReply, TraceSummary

__all__ = [
    *("cut", "reply_as_json", "summary_as_json", "summary_line", "trace_as_json"),
    *("trace_list", "trace_list_head"),
]

_SHORT: Final = 12
"""Least characters of a request id: two ids of pdserve's own rarely begin with the same."""
_LONGEST_ID: Final = 40
_MODEL: Final = 18
_HEADS: Final = ("TIME", "REQUEST", "MODEL", "TOOK", "TTFT", "STATUS", "KEPT")


def trace_list(summaries: Sequence[TraceSummary], width: int, now: datetime.datetime) -> list[str]:
    """A table, with ids shortened to what tells them apart. `now` decides how a day is written."""
    short = _short_ids([one.request_id for one in summaries])
    model = max([len(one.model) for one in summaries], default=0)
    columns = (short, max(len("MODEL"), min(model, _MODEL)))
    lines = [summary_line(one, now, columns) for one in summaries]
    return [cut(line, width) for line in (trace_list_head(columns), *lines)]


def cut(line: str, width: int) -> str:
    """The line, with a mark where it would be wider."""
    return line if len(line) <= width else f"{line[: width - 1]}…"


def trace_list_head(columns: tuple[int, int]) -> str:
    """The head of a table whose ids and models have these widths."""
    return _joined(_HEADS, columns)


def summary_line(summary: TraceSummary, now: datetime.datetime, columns: tuple[int, int]) -> str:
    """One line of the table."""
    began = datetime.datetime.fromtimestamp(summary.began / 1e9, now.tzinfo)
    form = "%H:%M:%S" if began.date() == now.date() else "%d %b"
    why = ", ".join(summary.kept) + (f": {summary.error}" if summary.error else "")
    cells = (
        began.strftime(form),
        summary.request_id,
        summary.model or "-",
        seconds_text(summary.duration),
        "-" if summary.ttft is None else seconds_text(summary.ttft),
        str(summary.status or "-"),
        why,
    )
    return _joined(tuple(map(plain_text, cells)), columns)


def _joined(cells: tuple[str, ...], columns: tuple[int, int]) -> str:
    when, request, model, took, ttft, status, kept = cells
    short, wide = columns
    return (
        f"{when:8}  {request[:short]:{short}}  {model[:wide]:{wide}}  {took:>7}  {ttft:>7}  "
        f"{status:>6}  {kept}"
    ).rstrip()


def _short_ids(ids: Iterable[str]) -> int:
    """How many characters tell different ids apart."""
    different = set(ids)
    for length in range(_SHORT, _LONGEST_ID):
        if len({one[:length] for one in different}) == len(different):
            return length
    return _LONGEST_ID


def reply_as_json(reply: TraceReply) -> dict[str, Any]:
    """A list of traces for `json.dumps`."""
    return {
        "traces": [_plain(one) for one in reply.summaries],
        "frontends": list(reply.frontends),
        "silent": reply.silent,
    }


def summary_as_json(summary: TraceSummary) -> dict[str, Any]:
    """One line of a list for `json.dumps`."""
    found: dict[str, Any] = _plain(summary)
    return found


def trace_as_json(trace: Trace) -> dict[str, Any]:
    """A whole trace for `json.dumps`: ids in hex, times in seconds since `began`, that in
    nanoseconds of Unix time."""
    found: dict[str, Any] = _plain(trace)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value
