"""One request from its first byte to its end, as its client sees it: bytes in, a record out.

Sans-I/O but for the clock, which comes in as an argument. It judges nothing: see `checker`.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.protocols.sse import SseDecoder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.chaos.storm.storm_requests import StormRequest

LONG_GAP = 0.5
"""Seconds between two chunks that are told one by one."""


@dataclass
class Choice:
    """What has come of one."""

    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None
    logprobs: int = 0
    ends: int = 0
    """How often it was said to have ended."""

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class ClientRequest:
    """See above. Times are the monotonic clock's."""

    number: int
    question: StormRequest
    frontend: str
    streamed: bool
    asked: float
    hurried: bool = False
    """Asked where a deadline is near."""
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    done: bool = False
    """True if the request ended normally."""
    hung_up: bool = False
    """True if the client disconnected by itself."""
    broken: str = ""
    """How its connection ended before it was done."""
    first: float = 0.0
    """Time of the first token; 0: none came."""
    last: float = 0.0
    """Time of the last byte."""
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    """Times of the chunks with tokens."""

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in range(self.question.choices)]
        self._sse = SseDecoder()

    # ------------------------------------------------------------------ what comes

    def answered(self, status: int, headers: Mapping[str, str], now: float) -> None:
        """The head of the answer has come."""
        self.status = status
        self.headers = dict(headers)
        self.last = now

    def event_bytes(self, data: bytes, now: float) -> None:
        """A piece of a stream."""
        self.last = now
        for event in self._sse.feed(data):
            if event.done:
                self.done = self.error is None
            else:
                self._event(json.loads(event.data), now)

    def whole(self, body: bytes, now: float) -> None:
        """All of an answer that is no stream."""
        self.last = now
        content = json.loads(body)
        if "error" in content:
            self.error = content["error"]
            return
        self._token(now)
        self._take(content, "message")
        self.done = True

    def _event(self, content: dict[str, Any], now: float) -> None:
        if "error" in content:
            self.error = content["error"]
            return
        if any(choice.get("token_ids") for choice in content["choices"]):
            self._token(now)
        self._take(content, "delta")

    def _token(self, now: float) -> None:
        self.first = self.first or now
        self.times.append(now)

    def _take(self, content: dict[str, Any], part: str) -> None:
        self.usage = content.get("usage") or self.usage
        self.prompt = content.get("prompt_token_ids") or self.prompt
        for one in content["choices"]:
            choice = self.choices[one["index"]]
            self.prompt = one.get("prompt_token_ids") or self.prompt
            text = one.get(part, {}).get("content") if self.question.chat else one.get("text")
            choice.texts.append(text or "")
            choice.tokens += one.get("token_ids") or ()
            choice.logprobs += _entries(one.get("logprobs"))
            if one.get("finish_reason"):
                choice.finish, choice.stop = one["finish_reason"], one.get("stop_reason")
                choice.ends += 1

    # ------------------------------------------------------------------ telling

    @property
    def taken(self) -> bool:
        """Known to its client to have been taken in: its answer has begun, or an error names the
        worker that had it."""
        return self.status == 200 or bool(self.times) or "x-pdserve-worker" in self.headers

    @property
    def chunks(self) -> int:
        """With tokens."""
        return len(self.times)

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(beginning, length) of the times between two chunks."""
        return [(before, now - before) for before, now in itertools.pairwise(self.times)]

    @property
    def code(self) -> str:
        """The code of the error that ended it."""
        return "" if self.error is None else str(self.error.get("code"))

    @property
    def workers(self) -> set[str]:
        """Workers that are known to have had it."""
        own = self.usage.get("pdserve") or {}
        names = {self.headers.get("x-pdserve-worker", ""), own.get("worker") or ""}
        return {name for one in names for name in one.split(",") if name}

    @property
    def migrations(self) -> int:
        """Number of migrations in its usage."""
        return int((self.usage.get("pdserve") or {}).get("migrations") or 0)

    def story(self, zero: float = 0.0) -> str:
        """All there is to know, in a few lines; times from `zero` on."""
        own = {k: v for k, v in self.headers.items() if k.startswith("x-")}
        counts = [(len(choice.tokens), choice.finish) for choice in self.choices]
        long = [(at - zero, length) for at, length in self.gaps if length >= LONG_GAP]
        gaps = [f"{length:.2f} s from {at:.2f}" for at, length in long]
        return (
            f"request {self.number}, question {self.question.number} ({self.question.path}, "
            f"n={self.question.choices}), {'streamed' if self.streamed else 'whole'} from "
            f"{self.frontend}\n"
            f"  asked {self.asked - zero:.2f}, first token {max(0, self.first - zero):.2f}, last "
            f"byte {max(0, self.last - zero):.2f}, ended {self.ended - zero:.2f}\n"
            f"  status {self.status}, done {self.done}, hung up {self.hung_up}, "
            f"broken {self.broken!r}, error {self.error}\n"
            f"  tokens and end of each choice: {counts}; long gaps: {gaps}\n"
            f"  headers {own}\n  usage {self.usage}"
        )


def _entries(logprobs: Any) -> int:
    if not logprobs:
        return 0
    entries = logprobs.get("content") or logprobs.get("tokens") or ()
    return len(entries)
