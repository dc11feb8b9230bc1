"""Measures what the wire's own code costs per frame, without sockets, futures or handlers.

    python bench/micro/wire.py

Two connections in one process send each other bursts of 64 frames of 128 bytes. The parts of the
work take turns in the same rounds; the result is their best round. "parse" only cuts the bytes into
frames: a native parser could replace that part. Writes bench/results/wire.md.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.machine import facts
from pdserve.ids import NodeId
from pdserve.wire import events as ev
from pdserve.wire.handshake import AcceptorHandshake, DialerHandshake, Identity, Versions
from pdserve.wire.limits import Limits
from pdserve.wire.parser import FrameParser
from pdserve.wire.protocol import Connection

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

BURST = 64
ROUNDS = 400
BODY = bytes(131)
RESULT = Path(__file__).parent.parent / "results" / "wire.md"


def connected() -> tuple[Connection, Connection]:
    """Returns the dialler's and the acceptor's connection, both open."""
    keys = (bytes(32),)
    claim = Identity("bench", NodeId("d"), 1).claim()
    d = Connection(DialerHandshake(claim, keys, bytes(32), versions=Versions()), Limits())
    identity = Identity("bench", NodeId("a"), 1)
    a = Connection(AcceptorHandshake(identity, keys, bytes(32), versions=Versions()), Limits())
    a.receive_data(sent(d))
    d.receive_data(sent(a))
    a.receive_data(sent(d))
    a.accept()
    d.receive_data(sent(a))
    return d, a


def sent(connection: Connection) -> bytes:
    return b"".join(connection.data_to_send())


class Clock:
    """Keeps the best time of each part."""

    def __init__(self) -> None:
        self.best: dict[str, float] = {}

    def time(self, part: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        elapsed = time.perf_counter() - started
        self.best[part] = min(elapsed, self.best.get(part, elapsed))
        return result


def one_round(clock: Clock, d: Connection, a: Connection, stream: Any, parser: FrameParser) -> None:
    burst = range(BURST)
    clock.time("request: send", lambda: [d.send_request(7, BODY, 9, d) for _ in burst])
    data = sent(d)
    clock.time("parse", lambda: parser.feed(data))
    (asked,) = clock.time("request: receive", lambda: a.receive_data(data))
    calls = [call for call, _, _, _ in asked.requests]
    clock.time("response: send", lambda: [a.respond(call, BODY) for call in calls])
    data = sent(a)
    clock.time("response: receive", lambda: d.receive_data(data))
    clock.time("item: send", lambda: [d.send_data(stream, BODY) for _ in burst])
    data = sent(d)
    (items,) = clock.time("item: receive", lambda: a.receive_data(data))
    a.consumed(items.stream, items.cost)
    d.receive_data(sent(a))


def main() -> None:
    d, a = connected()
    stream = d.open_stream(1, b"", window=0, context=None)
    (opened,) = a.receive_data(sent(d))
    assert isinstance(opened, ev.StreamOpened)
    a.grant(opened.stream, 1 << 20)
    d.receive_data(sent(a))
    clock, parser = Clock(), FrameParser(Limits().table())
    for _ in range(ROUNDS):
        one_round(clock, d, a, stream, parser)
    lines = ["# The wire's code per frame", "", "Best of 400 bursts of 64 frames of 128 bytes."]
    lines += ["Repeat with `python bench/micro/wire.py`.", ""]
    lines += [*(f"- {fact}" for fact in facts()), "", "| part | ns per frame |", "|---|---:|"]
    lines += [f"| {part} | {best / BURST * 1e9:.0f} |" for part, best in clock.best.items()]
    text = "\n".join([*lines, ""])
    RESULT.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
