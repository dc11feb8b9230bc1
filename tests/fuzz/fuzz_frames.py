"""Fuzz target: everything an authenticated peer can send.

    python -m tests.fuzz.fuzz_frames -max_total_time=60 corpus/

runs coverage-guided if `atheris` is installed; `tests/wire/test_fuzz.py` runs the same function on
random and mutated input in every test run. The input is cut into reads by its own first bytes. Only
events come out, never an exception; a violation ends the connection for good; memory is bounded by
the largest frame.
"""

from __future__ import annotations

from pdserve.wire import events as ev
from pdserve.wire.limits import Limits
from pdserve.wire.protocol import State
from tests.fuzz.engine import run
from tests.wire.support import pair

LIMITS = Limits(body=1 << 16, incoming=64, pending=8, streams=4, budget=1 << 16, unsent=1 << 16)


def fuzz(data: bytes) -> None:
    """One input: bytes from the dialler, to an acceptor that has things under way itself."""
    if not data:
        return
    read, data = 1 + data[0] * 17, data[1:]
    _, a = pair(LIMITS)
    for number in range(4):
        a.send_request(number, b"", 1000, number)
    stream = a.open_stream(1, b"", window=8000, context="ours")
    ended = False
    for position in range(0, len(data), read):
        wanted = a.receive_buffer()
        piece = data[position : position + read]
        events: list[ev.Event] = []
        if wanted is not None:
            count = min(len(wanted), len(piece))
            wanted[:count] = piece[:count]
            events += a.received(count)
            piece = piece[count:]
        queue = [*events, *(() if _places(events) or not piece else a.receive_data(piece))]
        while queue:
            event = queue.pop(0)
            assert not ended, "an event after the end"
            if isinstance(event, ev.PayloadBegins):
                assert event.size <= LIMITS.body
                queue += a.place(memoryview(bytearray(event.size)))
            elif isinstance(event, ev.Violated):
                ended = True
                assert a.state is State.ENDED
            elif isinstance(event, ev.Asked):
                for call, _, _, body in event.requests[::2]:
                    a.respond(call, body)
            elif isinstance(event, ev.Opened):
                a.grant(event.stream, 4096)
            elif isinstance(event, ev.Data):
                a.consumed(event.stream, event.cost)
        assert a._parser.pending <= LIMITS.body + 16 + read
        assert a.busy <= 3 * LIMITS.incoming
        a.data_to_send()
    assert ended == (a.state is State.ENDED)
    if not ended:
        a.abort(stream, ValueError("the end of the input"))
        a.receive_eof()


def _places(events: list[ev.Event]) -> bool:
    """A payload waits for its place, so nothing else may be received before."""
    return bool(events) and isinstance(events[-1], ev.PayloadBegins)


if __name__ == "__main__":
    run(fuzz)
