"""Writes server-sent events, and parses them from bytes split anywhere.

Follows the event-stream format of the HTML standard (section 9.2) as far as the OpenAI API uses it.
Sans-I/O: bytes in, events out. It does not know what the data means, except for `[DONE]`.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

DONE = b"[DONE]"
"""Data of the last event of a complete stream."""


def encode_event(data: bytes) -> bytes:
    """Encode one event; a line break in the data starts another `data:` line."""
    if b"\n" not in data and b"\r" not in data:
        return b"data: " + data + b"\n\n"
    lines = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    return b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"


DONE_EVENT = encode_event(DONE)
WAITING_COMMENT = b": waiting for the first token\n\n"
"""A comment, which clients skip."""


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One event of a stream."""

    data: str
    event: str = "message"
    id: str = ""

    @property
    def done(self) -> bool:
        """True if this event is `[DONE]`, the end of OpenAI's streams."""
        return self.data == "[DONE]"


class EventTooLarge(ValueError):
    """An event is larger than the decoder's limit."""


class SseDecoder:
    """Decodes an event stream from pieces to whole events.

    Lines may end in LF, CR or CRLF, and any split, inside a character too, gives the same events.
    An event without a blank line at its end is not returned: the stream was cut inside it.
    """

    def __init__(self, max_event: int = 64 << 20) -> None:
        """Args: `max_event` is the limit in characters on one event and on one line."""
        self._max = max_event
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._line: list[str] = []
        self._line_size = 0
        self._after_cr = False
        self._data: list[str] = []
        self._data_size = 0
        self._event = ""
        self._id = ""

    def feed(self, chunk: bytes, *, final: bool = False) -> list[SseEvent]:
        """Add bytes; return the events that they complete.

        Errors: `EventTooLarge`; the decoder must not be used after it.
        """
        text = self._utf8.decode(chunk, final)
        if self._after_cr and text:
            text = text.removeprefix("\n")
            self._after_cr = False
        if text.endswith("\r"):
            self._after_cr = True
        events: list[SseEvent] = []
        *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for line in lines:
            self._keep(line)
            whole = "".join(self._line)
            self._line.clear()
            self._line_size = 0
            self._on_line(whole, events)
        self._keep(rest)
        return events

    def _keep(self, part: str) -> None:
        self._line_size += len(part)
        if self._line_size + self._data_size > self._max:
            raise EventTooLarge(f"an event is longer than {self._max} characters")
        if part:
            self._line.append(part)

    def _on_line(self, line: str, events: list[SseEvent]) -> None:
        if not line:
            self._dispatch(events)
            return
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._data_size += len(value) + 1
        elif name == "event":
            self._event = value
        elif name == "id" and "\0" not in value:
            self._id = value
        # Comments (an empty name), `retry` and unknown names carry nothing for an API client.

    def _dispatch(self, events: list[SseEvent]) -> None:
        if self._data:
            events.append(SseEvent("\n".join(self._data), self._event or "message", self._id))
        self._data.clear()
        self._data_size = 0
        self._event = ""
