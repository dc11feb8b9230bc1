"""Fuzz target: everything a stranger can send, to either side of a handshake.

    python -m tests.fuzz handshake -max_total_time=60

Nobody gets in without the key, whatever the bytes; what is kept of them is bounded; what is
answered is short. An input is either plain bytes or a list of frames whose lengths are right, so
that mutations get beyond the header.
"""

from __future__ import annotations

from pdserve.wire import events as ev
from pdserve.wire.handshake import NONCE_BYTES
from pdserve.wire.header import HEADER, HEADER_BYTES
from pdserve.wire.limits import HANDSHAKE_BYTES
from pdserve.wire.protocol import ConnectionState
from tests.fuzz.input import Input
from tests.wire.support import acceptor, dialler, taken
from tests.wire.test_golden import golden

FRAMES = 4
"""Of the recorded session, before it is open."""


def fuzz(data: bytes) -> None:
    """One input: its first byte says to whom, of what kind it is, and how it is cut into reads."""
    source = Input(data)
    how = source.number()
    # Not the nonces of the recorded session: replayed, it must be worth nothing.
    nonce = b"f" * NONCE_BYTES
    connection = dialler(nonce=nonce) if how & 1 else acceptor(nonce=nonce)
    words = frames(source) if how & 2 else source.bytes(len(data))
    read = 1 + (how >> 2) * 23
    answered = len(taken(connection))
    for position in range(0, len(words), read):
        for event in connection.receive_data(words[position : position + read]):
            assert isinstance(event, ev.ProtocolViolated), event
            assert connection.state is ConnectionState.ENDED
        assert connection._parser.pending <= HANDSHAKE_BYTES + read
        answered += len(taken(connection))
    assert connection.state in (
        ConnectionState.GREETING,
        ConnectionState.PROVING,
        ConnectionState.ENDED,
    )
    assert answered < 1024


def frames(source: Input) -> bytes:
    """Each: its kind, the length of its body, the body."""
    words = b""
    while source:
        kind, length = source.number(), source.number(2) % 2048
        body = source.bytes(length)
        words += HEADER.pack(len(body), kind, 0, 0, 0, 0) + body
    return words


def seeds() -> list[bytes]:
    """The recorded handshake: its frames one by one, and what each side heard."""
    recorded = [(side, data) for side, _, data in golden()[:FRAMES]]
    found = []
    for to, side in ((0, "dialler"), (1, "acceptor")):
        heard = [data for speaker, data in recorded if speaker == side]
        for said in ([heard[0]], [heard[-1]], heard):
            found.append(bytes([0xFC | to]) + b"".join(said))
            found.append(bytes([0xFE | to]) + b"".join(map(_structured, said)))
    return found


def _structured(frame: bytes) -> bytes:
    body = frame[HEADER_BYTES:]
    return frame[4:5] + len(body).to_bytes(2, "big") + body
