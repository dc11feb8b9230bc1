"""How log lines look: text for people, JSON for collectors, the request's id in every one.

`configure` is called once by whoever owns the process; libraries and roles only use `logging`.
The request id travels in a context variable, so a line deep inside a request carries it unasked.
Lines go to standard error and stay one line each: what a client sent cannot forge a second one.
"""

from __future__ import annotations

import contextvars
import datetime
import io
import json
import logging
import sys
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]
TextStream = TextIO | io.TextIOBase

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
"""Set by the frontend for the life of a request's task; empty elsewhere."""

LEVELS = ("debug", "info", "warning", "error")

_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}
_CONTROL |= {0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t", 0x2028: "\\u2028", 0x2029: "\\u2029"}

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes every record has; all others came in by `extra=`."""


def configure(
    form: LogFormat = "text", level: str = "info", stream: TextStream | None = None
) -> None:
    """Send the process's log to `stream` (default: standard error). Replaces earlier handlers.

    `level` is one of `LEVELS` and holds for pdserve; other libraries speak from warning upwards,
    or from info when pdserve is at debug.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO if level == "debug" else logging.WARNING)
    logging.getLogger("pdserve").setLevel(level.upper())
    logging.getLogger("pdserve_engines").setLevel(level.upper())
    logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """`12:00:00.123 INFO frontend.service: message key=value [req-1]`, tracebacks below it."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        name = record.name.removeprefix("pdserve.")
        line = f"{when} {record.levelname} {name}: {record.getMessage()}"
        line += "".join(f" {key}={value}" for key, value in _extras(record).items())
        if current := request_id.get():
            line += f" [{current}]"
        line = line.translate(_CONTROL)
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, message, request_id, exception, extras."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": when.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if current := request_id.get():
            line["request_id"] = current
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | {**_extras(record), **line}, default=str)


def _extras(record: logging.LogRecord) -> dict[str, object]:
    """What the caller passed as `extra=`, in its order."""
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}
