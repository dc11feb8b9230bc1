"""Fuzz target: everything an authenticated peer can send, to either side.

    python -m tests.fuzz frames -max_total_time=60

Only events come out, never an exception; a violation ends the connection for good; memory is
bounded by the largest frame. An input is either plain bytes or a list of frames whose lengths are
right and whose ids are few, so that mutations meet what is under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.wire import events as ev
from pdserve.wire.header import HEADER, HEADER_BYTES, FrameFlag, FrameKind
from pdserve.wire.limits import Limits
from pdserve.wire.protocol import ConnectionState
from pdserve.wire.stream_ids import ACCEPTORS, GENERATION
from tests.fuzz.input import Input
from tests.wire.support import acceptor, dialler
from tests.wire.test_golden import golden

if TYPE_CHECKING:
    from pdserve.wire.protocol import Connection

LIMITS = Limits(body=1 << 16, incoming=64, pending=8, streams=4, budget=1 << 16, unsent=1 << 16)
KINDS = (*sorted(FrameKind), 99)
HANDSHAKE_FRAMES = 4


def fuzz(data: bytes) -> None:
    """One input: its first byte says to whom, of what kind it is, and how it is cut into reads."""
    source = Input(data)
    how = source.number()
    victim = (dialler if how & 1 else acceptor)(limits=LIMITS)
    victim._open()  # the handshake has a target of its own
    words = frames(source) if how & 2 else source.bytes(len(data))
    read = 1 + (how >> 2) * 67
    for number in range(4):
        victim.send_request(number, b"", 1000, number)
    stream = victim.open_stream(1, b"", window=8000, context="ours")
    ended = False
    for position in range(0, len(words), read):
        for event in received(victim, words[position : position + read]):
            assert not ended, "an event after the end"
            ended = react(victim, event)
        assert victim._parser.pending <= LIMITS.body + 16 + read
        assert victim.busy <= 3 * LIMITS.incoming
        assert 0 <= victim.budget.granted <= victim.budget.total
        victim.data_to_send()
    assert ended == (victim.state is ConnectionState.ENDED)
    if not ended:
        victim.abort(stream, ValueError("the end of the input"))
        victim.receive_eof()


def received(victim: Connection, piece: bytes) -> list[ev.Event]:
    """Give it one read, in place as far as it wants that."""
    events: list[ev.Event] = []
    wanted = victim.receive_buffer()
    if wanted is not None:
        count = min(len(wanted), len(piece))
        wanted[:count] = piece[:count]
        events += victim.received(count)
        piece = piece[count:]
    if piece:
        events += victim.receive_data(piece)
    return events


def react(victim: Connection, event: ev.Event) -> bool:
    """Do with an event what an owner would; True for the last one."""
    if isinstance(event, ev.RequestsReceived):
        for call, _, _, body in event.requests[::2]:
            victim.respond(call, body)
    elif isinstance(event, ev.StreamOpened):
        victim.grant(event.stream, 4096)
        if event.stream.sending and victim.state is ConnectionState.OPEN:
            victim.send_data(event.stream, b"item")
        if event.method % 3 == 0:
            victim.abort(event.stream, ValueError("not wanted"))
    elif isinstance(event, ev.DataReceived):
        victim.consumed(event.stream, event.cost)
    elif isinstance(event, ev.ProtocolViolated):
        assert victim.state is ConnectionState.ENDED
        return True
    return False


def frames(source: Input) -> bytes:
    """Each: kind, flags, tag, id, value, length of its body, the body."""
    words = b""
    while source:
        kind, flags = KINDS[source.number() % len(KINDS)], source.number()
        flags &= FrameFlag.RAW | FrameFlag.LAST | FrameFlag.IGNORABLE
        tag, stream = source.number(), source.number()
        value, body = source.number(2), source.bytes(source.number(2))
        words += HEADER.pack(len(body), kind, flags, tag, _id(stream), value) + body
    return words


def _id(number: int) -> int:
    """Who started it, its slot, and now and then a later generation."""
    later = GENERATION if number & 0x40 else 0
    return (ACCEPTORS if number & 0x80 else 0) | later | (1 + (number & 0x3F))


def seeds() -> list[bytes]:
    """The recorded session after its handshake: frame by frame, and as each side heard it."""
    recorded = [(side, data) for side, _, data in golden()[HANDSHAKE_FRAMES:]]
    found = []
    for to, side in ((1, "dialler"), (0, "acceptor")):
        heard = [data for speaker, data in recorded if speaker == side]
        for said in (*([data] for data in heard), heard):
            found.append(bytes([0xFC | to]) + b"".join(said))
            found.append(bytes([0xFE | to]) + b"".join(map(_structured, said)))
    return found


def _structured(frame: bytes) -> bytes:
    length, kind, flags, tag, stream, value = HEADER.unpack_from(frame)
    side = (stream >> 31) << 7
    numbers = bytes([KINDS.index(kind), flags, tag & 0xFF, side | (stream - 1) & 0x3F])
    body = frame[HEADER_BYTES:]
    return numbers + (value & 0xFFFF).to_bytes(2, "big") + length.to_bytes(2, "big") + body
