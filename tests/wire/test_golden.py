"""The bytes of version 1 stay as they were released: every frame of a recorded session.

`golden/v1.txt` holds one frame per line: who sent it, a name, its bytes. A change that breaks this
test breaks clusters that run two versions; a new version gets a file of its own and this one stays.
"""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest

from pdserve.errors import Cancelled, Overloaded
from pdserve.wire import events as ev
from pdserve.wire.codec import encode
from pdserve.wire.handshake import Versions
from pdserve.wire.header import HEADER, HEADER_BYTES, FrameKind
from pdserve.wire.protocol import Connection, ConnectionState, GoAwayCode
from tests.wire.support import KEY, OTHER_KEY, acceptor, dialler, pair, taken

GOLDEN = Path(__file__).parent / "golden" / "v1.txt"

PLAIN = Versions(features=0)
"""What a node of the first release said."""

RAW = "data-raw"
"""A recorded frame that no release sent outside of tests. This version refuses it."""


class Recorder:
    """Carries bytes between two connections and names every frame that passes."""

    def __init__(self, d: Connection, a: Connection) -> None:
        self.sides = {"dialler": d, "acceptor": a}
        self.lines: list[tuple[str, str, bytes]] = []

    def send(self, side: str, *names: str) -> list:
        """What `side` has to say, one frame per name; returns the other side's events."""
        data = taken(self.sides[side])
        other = self.sides["acceptor" if side == "dialler" else "dialler"]
        events = other.receive_data(data)
        for name in names:
            end = HEADER_BYTES + HEADER.unpack_from(data)[0]
            self.lines.append((side, name, data[:end]))
            data = data[end:]
        assert not data, "a frame without a name"
        return events


def session() -> list[tuple[str, str, bytes]]:
    """One of every frame, by the verbs of this version."""
    d, a = dialler(versions=PLAIN), acceptor(versions=PLAIN)
    recorder = Recorder(d, a)
    recorder.send("dialler", "hello")
    recorder.send("acceptor", "challenge")
    recorder.send("dialler", "auth")
    a.accept(b"s" * 16)
    recorder.send("acceptor", "ready")

    d.send_ping(42)
    recorder.send("dialler", "ping")
    recorder.send("acceptor", "pong")
    a.send_bulk_wanted()
    a.send_tell(3, encode(["told"]))
    recorder.send("acceptor", "bulk", "tell")

    calls = [d.send_request(7, encode(["question", number]), 1500, number) for number in range(3)]
    recorder.send("dialler", "request-1", "request-2", "request-3")
    a.respond(calls[0], encode(["answer"]))
    a.fail(calls[1], Overloaded("too much", retry_after=0.5))
    recorder.send("acceptor", "response", "error")
    d.cancel(calls[2])
    recorder.send("dialler", "cancel")
    recorder.send("acceptor", "error-cancelled")

    stream = d.open_stream(9, encode(["stream"]), window=65536, context=None)
    (opened,) = recorder.send("dialler", "open")
    a.grant(opened.stream, 4096)
    recorder.send("acceptor", "credit")
    d.send_data(stream, encode(["item"]))
    d.send_data(stream, encode(["last"]), last=True)
    recorder.send("dialler", "data", "data-last")
    a.end(opened.stream)
    recorder.send("acceptor", "end")
    other = a.open_stream(9, encode([]), window=0, context=None, last=True)
    (opened,) = recorder.send("acceptor", "open-last")
    d.abort(opened.stream, Cancelled("no"))
    recorder.send("dialler", "reset")
    assert other.over

    d.send_goaway(GoAwayCode.SHUTDOWN, "bye")
    recorder.send("dialler", "goaway")
    recorder.send("acceptor", "goaway-answer")
    d, a = dialler((OTHER_KEY,), versions=PLAIN), acceptor((KEY,), versions=PLAIN)
    refused = Recorder(d, a)
    refused.send("dialler", "hello-other")
    refused.send("acceptor", "challenge-other")
    refused.send("dialler", "auth-other")
    refused.send("acceptor", "refuse")
    return recorder.lines + refused.lines


def golden(*, raw: bool = False) -> list[tuple[str, str, bytes]]:
    """The recorded frames; with `raw`, the one that is refused, too."""
    lines = []
    for line in GOLDEN.read_text().splitlines():
        if line and not line.startswith("#"):
            side, name, data = line.split()
            if raw or name != RAW:
                lines.append((side, name, bytes.fromhex(data)))
    return lines


def test_this_version_writes_the_recorded_bytes() -> None:
    assert session() == golden()


def test_this_version_reads_the_recorded_bytes() -> None:
    """Both sides of the recording are replayed against fresh connections."""
    d, a = dialler(versions=PLAIN), acceptor(versions=PLAIN)
    kinds: list[str] = []
    for side, name, data in golden():
        if name == "hello-other":
            break
        reader = a if side == "dialler" else d
        taken(a), taken(d)
        if name == "response":  # what the recorded peer answers must have been asked
            for _ in range(3):
                d.send_request(7, b"", 1500, "context")
        if name == "credit":
            d.open_stream(9, b"", window=65536, context=None)
        if name == "reset":
            a.open_stream(9, b"", window=0, context=None, last=True)
        events = reader.receive_data(data)
        kinds += [type(event).__name__ for event in events]
        assert not any(isinstance(event, ev.ProtocolViolated) for event in events), (name, events)
        if reader.state is ConnectionState.JUDGING:
            reader.accept(b"s" * 16)
        for event in events:
            if isinstance(event, ev.StreamOpened):
                reader.grant(event.stream, 4096)
        if name == "error-cancelled":
            assert d.pending == 0
    assert set(kinds) >= {
        *(
            "Authenticated",
            "ConnectionReady",
            "Pong",
            "BulkWanted",
            "TellReceived",
            "RequestsReceived",
            "AnswersReceived",
            "RequestFailed",
        ),
        *(
            "RequestCancelled",
            "StreamOpened",
            "StreamUnblocked",
            "DataReceived",
            "StreamEnded",
            "StreamReset",
            "GoingAway",
        ),
    }


def test_every_kind_of_frame_is_recorded() -> None:
    assert {data[4] for _, _, data in golden()} == set(FrameKind)


@pytest.mark.parametrize(
    ("name", "data"), [(name, data) for _, name, data in golden()] if GOLDEN.exists() else []
)
def test_recorded_bodies_decode_with_the_plain_package(name, data) -> None:
    length = HEADER.unpack_from(data)[0]
    body = data[HEADER_BYTES:]
    assert len(body) == length
    if body:
        assert isinstance(msgpack.unpackb(body), list)


def test_the_recorded_raw_payload_is_refused() -> None:
    """Its number stays taken: a later meaning of the flag would need a new version."""
    (data,) = [data for _, name, data in golden(raw=True) if name == RAW]
    d, a = pair()
    d.open_stream(9, b"", window=65536, context=None)
    (opened,) = a.receive_data(taken(d))
    a.grant(opened.stream, 4096)
    *_, last = a.receive_data(data)
    assert isinstance(last, ev.ProtocolViolated)
    assert "raw payload" in last.error.message


if __name__ == "__main__":  # python -m tests.wire.test_golden: record a new version's session
    lines = [f"{side:8} {name:16} {data.hex()}" for side, name, data in session()]
    about = ["# Frames of protocol version 1, as recorded; see test_golden.py. Never changed.", ""]
    GOLDEN.write_text("\n".join([*about, *lines, ""]))
