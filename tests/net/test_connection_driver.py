"""One write per turn of the loop, large bodies neither copied nor joined."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.net.connection_driver import IGNORE, ConnectionDriver
from pdserve.net.settings import NetSettings
from pdserve.net.timers import Timers
from pdserve.wire import events as ev
from pdserve.wire.limits import LARGE, Limits
from tests.wire.support import pair

if TYPE_CHECKING:
    from pdserve.wire.protocol import Connection

SETTINGS = NetSettings()


class FakeTransport:
    """Takes up to `room` bytes at once, keeps the rest until `drain`, as a socket would."""

    def __init__(self, room: int = 1 << 40) -> None:
        self.room = room
        self.writes: list[list[Any]] = []
        self.buffered = 0
        self.limits = (0, 1 << 16)
        self.protocol: ConnectionDriver
        self.paused = False
        self.ended = ""
        self.encrypted = False

    def write(self, data: Any) -> None:
        self.writelines([data])

    def writelines(self, buffers: list[Any]) -> None:
        self.writes.append([bytes(b) if len(b) < LARGE else b for b in buffers])
        size = sum(map(len, buffers))
        taken = min(size, self.room)
        self.room -= taken
        self.buffered += size - taken
        self._check()

    def drain(self, count: int) -> None:
        """The socket takes `count` more bytes."""
        self.buffered = max(0, self.buffered - count)
        if self.paused and self.buffered <= self.limits[0]:
            self.paused = False
            self.protocol.resume_writing()

    def set_write_buffer_limits(self, high: int, low: int) -> None:
        self.limits = (low, high)
        self._check()

    def _check(self) -> None:
        if not self.paused and self.buffered > self.limits[1]:
            self.paused = True
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def get_extra_info(self, name: str) -> object:
        return object() if name == "ssl_object" and self.encrypted else None

    def abort(self) -> None:
        self.ended = "aborted"

    def close(self) -> None:
        self.ended = "closed"

    def is_closing(self) -> bool:
        return bool(self.ended)


class Owner:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.losses: list[object] = []

    def connected(self, shell: ConnectionDriver) -> Connection:
        return self.connection

    def lost(self, shell: ConnectionDriver, error: BaseException | None) -> None:
        self.losses.append(error)


def shell_over(
    transport: FakeTransport, limits: Limits | None = None
) -> tuple[ConnectionDriver, Any, Any]:
    """A shell whose connection is open, and the connection at the other end."""
    d, a = pair(limits)
    loop = asyncio.get_running_loop()
    scratch = memoryview(bytearray(SETTINGS.read_size))
    shell = ConnectionDriver(Owner(d), loop, Timers(loop), SETTINGS, scratch)
    transport.protocol = shell
    shell.connection_made(transport)  # type: ignore[arg-type]
    return shell, d, a


async def turn() -> None:
    """Let everything that is scheduled for this turn of the loop happen."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


# ---------------------------------------------------------------------- coalescing


async def test_all_that_is_sent_in_one_turn_is_one_write() -> None:
    transport = FakeTransport()
    shell, d, a = shell_over(transport)
    await turn()
    transport.writes.clear()
    for method in range(100):
        d.send_tell(method, b"x")
        shell.wake()
        shell.wake()
    assert transport.writes == []
    await turn()
    ((data,),) = transport.writes
    assert [event.method for event in a.receive_data(data)] == list(range(100))
    await turn()
    assert len(transport.writes) == 1, "nothing more is written when nothing more is sent"


async def test_answers_to_one_read_are_one_write() -> None:
    transport = FakeTransport()
    shell, d, a = shell_over(transport)

    def answer(event: ev.RequestsReceived) -> None:
        for call, _, _, body in event.requests:
            d.respond(call, body)

    shell.rules = {ev.RequestsReceived: answer}
    for number in range(50):
        a.send_request(1, bytes([number]), 1000, number)
    data = b"".join(a.data_to_send())
    buffer = shell.get_buffer(-1)
    buffer[: len(data)] = data
    shell.buffer_updated(len(data))
    await turn()
    ((written,),) = transport.writes
    (answered,) = a.receive_data(written)
    assert [context for context, _ in answered.answers] == list(range(50))


async def test_a_large_payload_is_written_from_where_it_lies() -> None:
    transport = FakeTransport()
    shell, d, _ = shell_over(transport)
    d.send_tell(1, b"before")
    payload = memoryview(bytearray(LARGE))
    d.send_tell(2, payload)
    d.send_tell(3, b"after")
    shell.wake()
    await turn()
    (buffers,) = transport.writes
    assert len(buffers) == 3
    assert buffers[1] is payload


async def test_much_at_once_is_handed_over_in_turns() -> None:
    transport = FakeTransport()
    shell, d, a = shell_over(transport)
    for number in range(5):
        d.send_tell(number, bytes(SETTINGS.high_water))
    shell.wake()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert 1 <= len(transport.writes) <= 2
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(transport.writes) == 5
    received = b"".join(bytes(b) for write in transport.writes for b in write)
    assert [event.method for event in a.receive_data(received)] == list(range(5))


# ---------------------------------------------------------------------- a full transport


async def test_a_full_transport_is_left_alone_until_it_asks_for_more() -> None:
    transport = FakeTransport(room=0)
    shell, d, _ = shell_over(transport)
    d.send_tell(1, bytes(SETTINGS.high_water + 1))
    shell.wake()
    await turn()
    assert shell.full
    written = len(transport.writes)
    taken = d.taken
    d.send_tell(2, b"waits here")
    shell.wake()
    await turn()
    assert len(transport.writes) == written
    assert d.taken == taken, "it has not left this process"
    transport.drain(1)
    assert shell.full
    transport.drain(SETTINGS.high_water)
    await turn()
    assert d.unsent == 0


async def test_nothing_is_written_to_a_transport_that_has_ended() -> None:
    """It may have ended by itself, and say so only in a later turn."""
    transport = FakeTransport()
    shell, d, _ = shell_over(transport)
    await turn()
    written = len(transport.writes)
    transport.ended = "by the peer"
    d.send_tell(1, b"too late")
    shell.wake()
    await turn()
    assert len(transport.writes) == written


async def test_a_transport_that_was_closed_without_a_word_is_noticed_by_a_write() -> None:
    """uvloop closes that of a dial which is cancelled at its end, and says nothing of it."""

    class Gone(FakeTransport):
        def writelines(self, buffers: list[Any]) -> None:
            raise RuntimeError("unable to perform operation: the handler is closed")

    shell, d, _ = shell_over(Gone())
    d.send_tell(1, b"too late")
    shell.flush()
    assert shell.closed
    shell.wake()
    await turn()


# ---------------------------------------------------------------------- reading


async def test_a_large_body_is_received_in_place() -> None:
    shell, _, a = shell_over(FakeTransport())
    told: list[ev.TellReceived] = []
    shell.rules = {ev.TellReceived: told.append}
    body = bytes(range(256)) * (LARGE // 64)
    a.send_tell(1, body)
    a.send_tell(2, b"next")
    data = b"".join(a.data_to_send())
    reads = []
    while data:
        buffer = shell.get_buffer(-1)
        size = min(len(buffer), len(data), 30_000)
        reads.append(len(buffer))
        buffer[:size] = data[:size]
        shell.buffer_updated(size)
        data = data[size:]
    assert [(event.method, event.body) for event in told] == [(1, body), (2, b"next")]
    assert reads[0] == SETTINGS.read_size
    assert reads[1] == len(body) - (30_000 - 16), "straight into the body"
    assert len(shell.get_buffer(-1)) == SETTINGS.read_size


async def test_a_read_that_came_to_nothing_leaves_no_trace() -> None:
    """Readiness may be spurious: a buffer is offered, nothing comes, and the connection ends."""
    shell, d, a = shell_over(FakeTransport())
    ended: list[ev.ProtocolViolated] = []
    shell.rules = {ev.ProtocolViolated: ended.append}
    a.send_tell(1, bytes(4 * LARGE))
    _read(shell, b"".join(a.data_to_send())[:1000])
    assert len(shell.get_buffer(-1)) == 4 * LARGE - (1000 - 16), "straight into the body"
    shell.dispatch(d.receive_eof())
    assert len(ended) == 1
    _read(shell, b"more")
    assert len(ended) == 1


def _read(shell: ConnectionDriver, data: bytes) -> None:
    """Bytes that come by one read."""
    shell.get_buffer(-1)[: len(data)] = data
    shell.buffer_updated(len(data))


# ---------------------------------------------------------------------- the end


async def test_close_sends_the_last_words_first() -> None:
    transport = FakeTransport()
    shell, d, _ = shell_over(transport)
    d.send_tell(1, b"last words")
    shell.close()
    assert transport.ended == ""
    await turn()
    assert transport.ended == "closed"
    assert b"last words" in transport.writes[-1][0]


async def test_a_peer_that_does_not_read_delays_the_end_only_so_long() -> None:
    settings = NetSettings(close_timeout=0.05)
    transport = FakeTransport(room=0)
    d, _ = pair()
    loop = asyncio.get_running_loop()
    shell = ConnectionDriver(Owner(d), loop, Timers(loop), settings, memoryview(bytearray(100)))
    transport.protocol = shell
    shell.connection_made(transport)  # type: ignore[arg-type]
    d.send_tell(1, bytes(4 << 20))
    shell.wake()
    await turn()
    d.send_tell(1, b"never")
    shell.close()
    await turn()
    assert transport.ended == ""
    await asyncio.sleep(0.1)
    assert transport.ended == "aborted"


@pytest.mark.parametrize("event", [ev.Pong(1), ev.TellReceived(1, b"")])
async def test_after_the_end_events_go_nowhere(event) -> None:
    shell, _, _ = shell_over(FakeTransport())
    shell.rules = IGNORE
    shell.dispatch([event])
