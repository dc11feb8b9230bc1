"""Decides what becomes of spans on their way to a collector: what waits, what is sent again, when.

Pure: times are arguments, and nothing here sends anything. `exporter.py` performs it.
"""

from __future__ import annotations

import email.utils
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from pdserve.backoff import backoff_delay
from pdserve.tracing.compact import decode_trace, encode_trace
from pdserve.tracing.export.otlp import read_partial_success

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.trace import Trace

__all__ = [
    *("BATCH_SPANS", "QUEUE_SPANS", "RETRY_FOR"),
    *("CollectorAnswer", "SpanBatch", "SpanQueue", "DeliveryVerdict", "judge", "pause_before"),
]

BATCH_SPANS: Final = 512
"""Spans of one request to the collector."""
QUEUE_SPANS: Final = 4096
"""Most spans that wait."""
RETRY_FOR: Final[Seconds] = 30.0
"""How long one batch is tried."""

_BATCH_BYTES: Final[Bytes] = 1 << 20
"""Encoded spans of one request: long attributes must not make one that no collector takes."""
_QUEUE_BYTES: Final[Bytes] = 4 << 20
_FIRST_PAUSE: Final[Seconds] = 0.5
_LONGEST_PAUSE: Final[Seconds] = 8.0
_RETRYABLE: Final = frozenset((429, 502, 503, 504))
_QUOTED: Final = 200
"""Most characters of a collector's words in the log."""

DropReason = Literal["queue_full", "undelivered", "refused", "rejected", "invalid", "shutdown"]
"""Why spans are not exported: no room, the collector did not answer in time, it refused the request
or some of its spans, they could not be encoded, the process ended."""


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """Traces for one request to the collector."""

    spans: int
    encoded: list[bytes]

    def traces(self) -> Iterator[Trace]:
        """The traces, decoded one by one."""
        return map(decode_trace, self.encoded)


class SpanQueue:
    """Traces that wait for their export, as compact encodings, bounded in spans and bytes."""

    def __init__(self, spans: int = QUEUE_SPANS, limit: Bytes = _QUEUE_BYTES) -> None:
        self._most = spans
        self._limit = limit
        self._waiting: deque[tuple[int, bytes]] = deque()
        self.spans = 0
        """Spans that wait."""
        self.size: Bytes = 0

    def add(self, trace: Trace) -> bool:
        """Take a trace whole, or not at all: False."""
        number = len(trace.spans)
        if self.spans + number > self._most:
            return False
        encoded = encode_trace(trace)
        if self.size + len(encoded) > self._limit:
            return False
        self._waiting.append((number, encoded))
        self.spans += number
        self.size += len(encoded)
        return True

    def take(self) -> SpanBatch | None:
        """The next traces, for one request; None if none wait."""
        taken: list[bytes] = []
        spans = size = 0
        while self._waiting:
            number, encoded = self._waiting[0]
            if taken and (spans + number > BATCH_SPANS or size + len(encoded) > _BATCH_BYTES):
                break
            self._waiting.popleft()
            taken.append(encoded)
            spans += number
            size += len(encoded)
        self.spans -= spans
        self.size -= size
        return SpanBatch(spans, taken) if taken else None

    @property
    def full_batch(self) -> bool:
        """Whether there is enough for a request."""
        return self.spans >= BATCH_SPANS or self.size >= _BATCH_BYTES


@dataclass(frozen=True, slots=True)
class CollectorAnswer:
    """What came back for one request: an HTTP answer, or a failure to get one."""

    status: int = 0
    """HTTP status; 0: there was no answer."""
    retry_after: str = ""
    """The header of that name."""
    body: bytes = b""
    failure: str = ""
    """Why there was no answer."""


@dataclass(frozen=True, slots=True)
class DeliveryVerdict:
    """What an answer means."""

    retry: bool = False
    """Send the same again later."""
    refused: bool = False
    """The collector will never take it."""
    wait: Seconds = 0.0
    """The collector's own wish how much later; 0: it has none."""
    rejected: int = 0
    """Spans that the collector took notice of and dropped."""
    problem: str = ""
    """What is wrong, with the remedy; empty: all is well."""


def judge(answer: CollectorAnswer, wall: Seconds) -> DeliveryVerdict:
    """The meaning of an answer by OTLP/HTTP's rules; `wall` is the time of day, in Unix seconds."""
    status = answer.status
    if status == 0:
        problem = f"{answer.failure}; check that a collector listens there"
        return DeliveryVerdict(retry=True, problem=problem)
    if 200 <= status < 300:
        rejected, words = read_partial_success(answer.body)
        return DeliveryVerdict(rejected=rejected, problem=_rejection(rejected, words))
    if status in _RETRYABLE:
        wait = _retry_after(answer.retry_after, wall)
        return DeliveryVerdict(
            retry=True, wait=wait, problem=f"it answers {status}, which is busy or down"
        )
    return DeliveryVerdict(refused=True, problem=f"it answers {status}: {_remedy(status)}")


def pause_before(failures: int, wait: Seconds, draw: float) -> Seconds:
    """Seconds until the next attempt after `failures` ones that failed (at least 1).

    Args: `wait` is the collector's wish; `draw`, from 0 to 1, spreads many servers over time.
    """
    delay = backoff_delay(_FIRST_PAUSE, _LONGEST_PAUSE, failures - 1)
    return max(wait, delay * (0.5 + draw / 2))


def _rejection(rejected: int, words: str) -> str:
    said = words[:_QUOTED]
    if rejected:
        return f"it has not taken {rejected} spans" + (f": {said}" if said else "")
    return f"it warns: {said}" if said else ""


def _retry_after(text: str, wall: Seconds) -> Seconds:
    """Seconds, or a date. 0 for what is neither."""
    text = text.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - wall)
    except (ValueError, OverflowError):
        return 0.0


def _remedy(status: int) -> str:
    if 300 <= status < 400:
        return "give the URL that it redirects to"
    if status in (401, 403):
        return "give its credentials in OTEL_EXPORTER_OTLP_HEADERS"
    if status in (404, 405):
        return "give the URL of its OTLP/HTTP receiver, usually http://HOST:4318"
    if status == 415:
        return "it must take OTLP as JSON; a collector in between can translate"
    return "its log says more"
