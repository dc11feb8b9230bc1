"""Fuzz target: what a publisher says of a log, as it may arrive.

    python -m tests.fuzz topics -max_total_time=60

A publisher's honest messages are lost, repeated, reordered, cut, changed, come from another of its
lives or from nobody. The reader applies them, asks to resume, or refuses them with an error, upon
which its owner opens another stream; then everything arrives once more, and it has the publisher's
state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.errors import ProtocolError
from pdserve.runtime.topics.messages import (
    Begin,
    CatchUpMode,
    Lagged,
    SnapshotChunk,
    SnapshotEnd,
    Watermark,
)
from pdserve.wire.codec import encode
from tests.fuzz.input import Input
from tests.runtime.topics.wires import Publishing, Reading

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["fuzz", "seeds"]

_REFUSALS = (ProtocolError, msgspec.MsgspecError, ValueError)
"""What `LogReader.hear` and a `SetView` raise for what they cannot take."""


class _World:
    """A publisher that changes, and one reader."""

    def __init__(self) -> None:
        self.now = 0.0
        self.epoch = 1
        self.publishing = Publishing(1)
        self.reading = Reading(self.publishing)

    def change(self, number: int) -> None:
        key = b"key%d" % (number % 40)
        if number % 3:
            self.publishing.set.put(key, b"%d" % number * (number % 90))
        else:
            self.publishing.set.drop(key)
        self.publishing.set.flush()

    def restart(self) -> None:
        """Another life, with another content; what is under way is of the old one."""
        self.epoch += 1
        self.publishing = self.reading.publishing = Publishing(self.epoch)
        late = tuple(self.reading.down)
        self.reading.open(self.now)
        self.reading.down.extend(late)

    def hear(self, body: bytes) -> None:
        reading = self.reading
        try:
            answer = reading.reader.hear(body)
        except _REFUSALS:
            reading.reset(self.now)
            return
        if answer is not None:
            reading.up.append(answer)
        while reading.up:
            reading.feed.hear(reading.up.popleft(), self.now)


def fuzz(data: bytes) -> None:
    """One input: a script of what happens."""
    source, world = Input(data), _World()
    while source:
        what, reading = source.number(), world.reading
        number, down = source.number(), reading.down
        match what & 15:
            case 0 | 1 | 2:
                world.change(number)
            case 3 | 4:
                reading.pump(world.now, 1 + number % 20)
            case 5 | 6 | 7 if down:
                world.hear(down.popleft())
            case 8 if down:  # lost
                del down[number % len(down)]
            case 9 if down:  # twice, or late
                down.append(down[number % len(down)])
            case 10 if down:  # out of order
                down.rotate(number)
            case 11 if down:  # cut or changed
                world.hear(_changed(down[0], number, source))
            case 12:
                world.hear(_ODD[number % len(_ODD)](source.number(), world.epoch))
            case 13:
                world.hear(source.bytes(number))
            case 14 if number < 64:
                world.restart()
            case _:
                world.now += number / 16
    _settle(world)


def _changed(body: bytes, number: int, source: Input) -> bytes:
    if number & 1:
        return body[: number * len(body) // 256]
    changed = bytearray(body)
    changed[number * len(body) // 256] ^= 1 << (source.number() & 7)
    return bytes(changed)


_ODD: tuple[Callable[[int, int], bytes], ...] = (
    lambda number, epoch: encode(Begin(number, (1, epoch), CatchUpMode(number % 3), number)),
    lambda number, epoch: encode(Begin(number, (1, epoch + 1), CatchUpMode(number % 3), 0)),
    lambda number, epoch: encode(SnapshotChunk(number, b"\x90" * number)),
    lambda number, epoch: encode(SnapshotEnd(number, number)),
    lambda number, epoch: encode(Watermark((1, epoch), number, number)),
    lambda number, epoch: encode(Watermark((2, epoch), number, 0)),
    lambda number, epoch: encode(Lagged(number)),
)


def _settle(world: _World) -> None:
    """A new stream on which nothing goes wrong: the reader has what the publisher has."""
    reading = world.reading
    reading.reset(world.now)
    try:
        world.now = reading.settle(world.now)
    except _REFUSALS:  # it believed a forged position: its owner opens another stream
        reading.reader.forget()
        reading.reset(world.now)
        world.now = reading.settle(world.now)
    assert reading.view.items == world.publishing.set.items
    assert reading.changed == reading.view.items


def seeds() -> list[bytes]:
    """All is well; a restart; each kind of harm in a stream of changes."""
    flow = bytes([0, 7, 1, 8, 2, 200, 3, 9, 5, 0, 5, 0, 5, 0, 5, 0])
    harms = [bytes([what, number, 3]) for what in range(8, 16) for number in (0, 5, 40, 130, 255)]
    return [flow, flow * 4, *(flow + harm + flow for harm in harms)]
