"""Formats log lines: text for people, JSON for collectors, with the request id in each.

The process's start-up calls `configure` once; libraries and roles only use `logging`. The request
id travels in a context variable. Lines go to standard error and stay one line each, so that text
from a client cannot forge a second one.
"""

from __future__ import annotations

import contextvars
import datetime
import io
import json
import logging
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Mapping

LogFormat = Literal["text", "json"]
TextStream = TextIO | io.TextIOBase

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""The current request's id, set by the frontend for the request's task; empty elsewhere."""

trace_ids: contextvars.ContextVar[tuple[str, str]] = contextvars.ContextVar(
    "trace_ids", default=("", "")
)
"""Ids of the current request's trace and of its first span, in hex, if its trace is certain to be
kept; set like `request_id`."""

LEVELS = ("debug", "info", "warning", "error")

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROL |= {0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x2028: "\\u2028", 0x2029: "\\u2029"}
_CONTROL |= {code: f"\\u{code:04x}" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
"""What would steer a terminal, end a line or change the order of its text."""

_IDS = ("request_id", "trace_id", "span_id")
"""Fields that say which request a line is about."""

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of every log record; all others came by `extra=`."""


def configure(
    form: LogFormat = "text",
    level: str = "info",
    stream: TextStream | None = None,
    said: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Sends the process's log to `stream` (default: standard error). Replaces earlier handlers.

    `said` is added to every JSON record as it is at that time: the process's identity. `level` is
    one of `LEVELS` and applies to pdserve; other libraries log from warning upwards, or from info
    when pdserve is at debug.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter(said) if form == "json" else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO if level == "debug" else logging.WARNING)
    logging.getLogger("pdserve").setLevel(level.upper())
    logging.getLogger("pdserve_engines").setLevel(level.upper())
    logging.captureWarnings(True)


class NamedRequest(Protocol):
    """A request as log lines name it."""

    @property
    def request_id(self) -> str: ...

    @property
    def trace_id(self) -> bytes:
        """Empty: it is not traced."""
        ...


def about(request: NamedRequest, **more: object) -> dict[str, object]:
    """For `extra=`: a line that is about a request, outside of the request's own task."""
    traced = {"trace_id": request.trace_id.hex()} if request.trace_id else {}
    return {"request_id": request.request_id, **traced, **more}


class TextFormatter(logging.Formatter):
    """Formats `12:00:00.123 INFO frontend.service: message key=value [req-1]`, tracebacks below
    it.
    """

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        name = record.name.removeprefix("pdserve.")
        line = f"{when} {record.levelname} {name}: {record.getMessage()}"
        extras = _extras(record)
        current = extras.get("request_id", "") or request_id.get()
        line += "".join(f" {key}={value}" for key, value in extras.items() if key not in _IDS)
        if current:
            line += f" [{current}]"
        line = line.translate(_CONTROL)
        if record.exc_info and record.exc_info[0] is not None:
            line += "".join(map(_indented, self.formatException(record.exc_info).split("\n")))
        return line


def _indented(line: str) -> str:
    """Indents a line of a traceback, which may quote a client, so that it never looks like a log
    line.
    """
    return f"\n    {line.translate(_CONTROL)}"


class JsonFormatter(logging.Formatter):
    """Formats one JSON object per line: time, level, logger, message, process identity, request_id,
    exception, extras.
    """

    def __init__(self, said: Mapping[str, object] = MappingProxyType({})) -> None:
        super().__init__()
        self._said = said

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._said,
        }
        extras = _extras(record)
        line |= _request(extras)
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | {**extras, **line}, default=str)


def _request(extras: dict[str, object]) -> dict[str, object]:
    """The ids of the request that a line is about: what the caller says, else the task's."""
    trace_id, span_id = trace_ids.get()
    current: dict[str, object] = {
        "request_id": request_id.get(),
        "trace_id": trace_id,
        "span_id": span_id,
    }
    if "request_id" in extras:
        # The ids of the task's own trace belong to another request.
        current = {} if extras["request_id"] != current["request_id"] else current
        current |= {name: extras[name] for name in _IDS if name in extras}
    return {name: value for name, value in current.items() if value}


def _extras(record: logging.LogRecord) -> dict[str, object]:
    """What the caller passed as `extra=`, in its order."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
