"""Requests to frontends, and how each ended: streams on threads of their own, or one at a time."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdserve.protocols.sse import SseDecoder
from tests.chaos.cluster import eventually
from tests.e2e.server import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from tests.chaos.cluster import Node

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Answer:
    """To a request that was not streamed."""

    status: int
    headers: Mapping[str, str]
    body: Any
    took: float
    """Seconds."""

    @property
    def code(self) -> str | None:
        """Of the error."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return error["code"] if error else None


def ask(frontend: Node, *, worker: str = "", **fields: Any) -> Answer:
    """One short request; `worker`: to this one and no other."""
    began = time.monotonic()
    connection = _connection(frontend)
    with contextlib.closing(connection):
        connection.request("POST", CHAT, _body(fields), _headers(worker))
        with connection.getresponse() as response:
            body = json.loads(response.read())
            headers = {k.lower(): v for k, v in response.getheaders()}
            return Answer(response.status, headers, body, time.monotonic() - began)


def wait_served(frontend: Node, **fields: Any) -> Answer:
    """The first answer with 200; until then 503 is all that may come."""

    def served() -> Answer | None:
        answer = ask(frontend, **fields)
        assert answer.status in (200, 503), answer
        return answer if answer.status == 200 else None

    found: Answer = eventually(served, lambda: (ask(frontend, **fields), frontend.lines))
    return found


class Stream:
    """One streamed request, received by a thread until it ends."""

    def __init__(self, frontend: Node, *, tokens: int, worker: str = "", **fields: Any) -> None:
        """`worker`: to this one and no other."""
        self._frontend = frontend
        self._worker = worker
        self._fields = {"max_tokens": tokens, "ignore_eos": True, "stream": True} | fields
        self._changed = threading.Condition()
        self.status = 0
        self.texts: list[str] = []
        self.error: dict[str, Any] | None = None
        """As the frontend told it."""
        self.broken: Exception | None = None
        """A connection that ended in between."""
        self.usage: dict[str, Any] = {}
        """If it was asked for."""
        self.done = False
        """It ended as streams should."""
        self.ended_at = 0.0
        """Unix time."""
        self._over = False
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="stream")
        self._thread.start()

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def code(self) -> str | None:
        """Of the error it ended with."""
        return None if self.error is None else self.error.get("code")

    @property
    def running(self) -> bool:
        return not self._over

    def wait_tokens(self, count: int) -> None:
        """Until so many more have come, or it is over."""
        with self._changed:
            wanted = len(self.texts) + count
            reached = self._changed.wait_for(
                lambda: len(self.texts) >= wanted or self._over, PATIENCE
            )
        assert reached, f"a stream stands still: {self}"

    def wait(self) -> Stream:
        """Until it is over."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), f"a stream does not end: {self}"
        return self

    def hang_up(self) -> None:
        """As a client that has lost interest; the stream must be running."""
        assert self._socket is not None
        self._socket.shutdown(socket.SHUT_RDWR)
        self.wait()

    def __repr__(self) -> str:
        end = "done" if self.done else self.error or self.broken or "running"
        return f"<Stream {self.status} {len(self.texts)} texts, {end}>"

    # ------------------------------------------------------------------ on its thread

    def _run(self) -> None:
        try:
            with contextlib.closing(_connection(self._frontend)) as connection:
                headers = _headers(self._worker)
                connection.request("POST", CHAT, _body(self._fields), headers)
                self._socket = connection.sock  # the response takes it over
                with connection.getresponse() as response:
                    self.status = response.status
                    self._receive(response)
        except (OSError, http.client.HTTPException) as error:
            self.broken = error
        with self._changed:
            self.ended_at = time.time()
            self._over = True
            self._changed.notify_all()

    def _receive(self, response: http.client.HTTPResponse) -> None:
        if response.status != 200:
            self.error = json.loads(response.read())["error"]
            return
        decoder = SseDecoder()
        while data := response.read1():
            for event in decoder.feed(data):
                with self._changed:
                    self._take(event.data)
                    self._changed.notify_all()

    def _take(self, data: str) -> None:
        if data == "[DONE]":
            self.done = self.error is None
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        self.usage = event.get("usage") or self.usage
        for choice in event["choices"]:
            if text := choice["delta"].get("content"):
                self.texts.append(text)


@contextlib.contextmanager
def streams(
    frontends: Sequence[Node], count: int, *, tokens: int, **fields: Any
) -> Iterator[list[Stream]]:
    """`count` streams, in turn at these frontends, all running; waited for at the end."""
    begun = [Stream(frontends[i % len(frontends)], tokens=tokens, **fields) for i in range(count)]
    try:
        for stream in begun:
            stream.wait_tokens(1)
        yield begun
    finally:
        for stream in begun:
            stream.wait()


def warm_up(frontend: Node, workers: Sequence[Node], **fields: object) -> None:
    """Until requests have reached each worker."""

    def reached() -> bool:
        for _ in workers:
            wait_served(frontend, max_tokens=2, **fields)
        return all(worker.count("pdserve_generation_tokens_total") > 0 for worker in workers)

    eventually(reached, lambda: [worker.lines for worker in workers])


def running_on(workers: Sequence[Node], count: int) -> list[int]:
    """How many requests each worker has, once all `count` are seen."""

    def seen() -> list[int] | None:
        found = [int(worker.count("pdserve_num_requests_running")) for worker in workers]
        return found if sum(found) == count else None

    found: list[int] = eventually(
        seen, lambda: [worker.count("pdserve_num_requests_running") for worker in workers]
    )
    return found


_QUESTION: dict[str, object] = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 4,
}


def _connection(frontend: Node) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(frontend.host, frontend.port, timeout=PATIENCE)


def _headers(worker: str) -> dict[str, str]:
    plain = {"Content-Type": "application/json", "Connection": "close"}
    return plain | ({"x-pdserve-worker": worker} if worker else {})


def _body(fields: Mapping[str, object]) -> str:
    return json.dumps({**_QUESTION, **fields})
