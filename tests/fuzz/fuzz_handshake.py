"""Fuzz target: everything a stranger can send, to either side of a handshake.

    python -m tests.fuzz.fuzz_handshake -max_total_time=60 corpus/

See `fuzz_frames.py`. Nobody gets in without the key, whatever the bytes; what is kept of them is
bounded; what is answered is short.
"""

from __future__ import annotations

from pdserve.wire import events as ev
from pdserve.wire.handshake import NONCE_BYTES
from pdserve.wire.limits import HANDSHAKE_BYTES
from pdserve.wire.protocol import State
from tests.fuzz.engine import run
from tests.wire.support import acceptor, dialler, taken


def fuzz(data: bytes) -> None:
    """One input: its first byte says to whom, and how it is cut into reads."""
    if not data:
        return
    # Not the nonces of the recorded session: replayed, it must be worth nothing.
    nonce = b"f" * NONCE_BYTES
    connection = dialler(nonce=nonce) if data[0] & 1 else acceptor(nonce=nonce)
    read, data = 1 + (data[0] >> 1) * 11, data[1:]
    answered = len(taken(connection))
    for position in range(0, len(data), read):
        for event in connection.receive_data(data[position : position + read]):
            assert isinstance(event, ev.Violated), event
            assert connection.state is State.ENDED
        assert connection._parser.pending <= HANDSHAKE_BYTES + read
        answered += len(taken(connection))
    assert connection.state in (State.GREETING, State.PROVING, State.ENDED)
    assert answered < 1024


if __name__ == "__main__":
    run(fuzz)
