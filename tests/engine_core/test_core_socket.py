"""The core's end of the socket: order, bounds, ends."""

from __future__ import annotations

import socket

import msgspec
import pytest

from pdserve.engine_core.core_socket import CoreSocket, CoreSocketClosed
from pdserve.errors import ProtocolError
from pdserve.messages.engine import Abort, Command, Event, LoadProgress, QueryStats, StepOutput
from pdserve.messages.request import TokenDelta, TokenLogprob
from pdserve.wire.length_prefixed import FrameDecoder, encode_frame, encode_frames

EVENTS = msgspec.msgpack.Decoder(Event)


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    link = CoreSocket(theirs, high_water=10_000)
    with ours:
        yield ours, link
        link.close()


def read(sock: socket.socket, count: int) -> list[Event]:
    decoder, events = FrameDecoder(), list[Event]()
    while len(events) < count:
        events += [EVENTS.decode(body) for body in decoder.feed(sock.recv(65536))]
    return events


def test_commands_arrive_in_order_and_never_block(ends):
    sock, link = ends
    assert link.receive() == []
    commands = [Abort(handle=n) for n in range(10_000)]
    sock.setblocking(False)
    data = encode_frames(map(msgspec.msgpack.encode, commands))
    seen: list[Command] = []
    while len(seen) < len(commands):
        if data:
            data = data[sock.send(data[:50_000]) :]
        seen += link.receive()
    assert seen == commands


def test_events_wait_until_they_are_read_and_none_is_lost(ends):
    sock, link = ends
    events = [LoadProgress(stage=f"{n:0>2000}") for n in range(1000)]
    for event in events:
        link.send([event])
    assert link.congested
    assert link.unsent > 10_000
    seen: list[Event] = []
    decoder = FrameDecoder()
    while len(seen) < len(events):
        link.flush()
        seen += [EVENTS.decode(body) for body in decoder.feed(sock.recv(65536))]
    assert seen == events
    link.flush()
    assert not link.congested
    assert link.unsent == 0


def test_a_step_too_large_for_one_frame_becomes_several(monkeypatch):
    ours, theirs = socket.socketpair()
    monkeypatch.setattr("pdserve.engine_core.core_socket.LARGE", 1000)
    long = [TokenLogprob(1, -1.0, 1, [(2, -2.0)] * 20)]
    deltas = [TokenDelta(handle, 0, [1], logprobs=long) for handle in range(10)]
    events: list[Event] = [
        LoadProgress(stage="before"),
        StepOutput(deltas=deltas),
        LoadProgress(stage="after"),
    ]
    link = CoreSocket(theirs)
    with ours:
        link.send(events)
        link.close()
        bodies = FrameDecoder().feed(ours.recv(1 << 20))
    assert max(map(len, bodies)) < 1000
    first, *steps, last = map(EVENTS.decode, bodies)
    assert [first, last] == [events[0], events[-1]]
    assert [
        delta for step in steps if isinstance(step, StepOutput) for delta in step.deltas
    ] == deltas


def test_queued_events_wait_for_a_flush_and_keep_their_order(ends):
    sock, link = ends
    events: list[Event] = [LoadProgress(stage=f"{n}") for n in range(3)]
    link.queue(events[:1])
    assert link.unsent
    sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        sock.recv(1)
    link.send(events[1:2])
    link.queue(events[2:])
    link.flush()
    assert read(sock, 3) == events
    assert link.unsent == 0


def test_queued_events_count_as_congestion(ends):
    sock, link = ends
    link.queue([LoadProgress(stage="x" * 20_000)])
    assert link.congested
    link.flush()
    assert not link.congested
    assert read(sock, 1) == [LoadProgress(stage="x" * 20_000)]


def test_congestion_ends_only_when_everything_was_read(ends):
    sock, link = ends
    link.send([LoadProgress(stage="x" * 3_000_000)])
    sock.recv(100_000)
    link.flush()
    assert link.congested


def test_waiting_ends_with_a_command_a_reader_or_the_time(ends):
    sock, link = ends
    link.wait(0.01)
    sock.sendall(encode_frame(msgspec.msgpack.encode(QueryStats())))
    link.wait(5)
    assert link.receive() == [QueryStats()]
    while not link.unsent:
        link.send([LoadProgress(stage="x" * 100_000)])
    while not sock.recv(1 << 20).endswith(b"x"):
        pass
    link.wait(5)
    link.flush()


def test_the_end_of_the_other_side_is_an_exception(ends):
    sock, link = ends
    sock.close()
    with pytest.raises(CoreSocketClosed):
        link.receive()
    with pytest.raises(CoreSocketClosed):
        link.send([LoadProgress(stage="nobody listens")])


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode([99, 1])])
def test_what_is_no_command_is_a_protocol_error(ends, body: bytes):
    sock, link = ends
    sock.sendall(encode_frame(body))
    with pytest.raises(ProtocolError, match="cannot be read"):
        link.receive()


def test_descriptors_beyond_the_limit_of_select_work_too(ends, monkeypatch):
    sock, link = ends
    monkeypatch.setattr("pdserve.engine_core.core_socket._SELECT_LIMIT", 0)
    link.wait(0.01)
    sock.sendall(encode_frame(msgspec.msgpack.encode(QueryStats())))
    link.wait(None)
    assert link.receive() == [QueryStats()]


def test_descriptors_come_with_the_first_commands_and_are_not_inherited(ends):
    sock, link = ends
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(
            sock, [encode_frame(msgspec.msgpack.encode(QueryStats()))], [theirs.fileno()]
        )
        commands, (fd,) = link.receive_first()
        assert commands == [QueryStats()]
        with socket.socket(fileno=fd) as passed:
            assert not passed.get_inheritable()


def test_descriptors_that_come_with_garbage_are_closed(ends):
    sock, link = ends
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            socket.send_fds(sock, [encode_frame(b"\xc1")], [theirs.fileno()])
        with pytest.raises(ProtocolError):
            link.receive_first()
        ours.settimeout(5)
        assert ours.recv(1) == b"", "nobody holds the other end"
