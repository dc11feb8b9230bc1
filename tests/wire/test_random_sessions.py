"""Two connections under random use: nothing is mixed up, nothing is lost, nothing is left.

Each step starts, answers, cancels or ends something on either side, or carries some bytes, cut
anywhere.
A plain model beside them knows what was asked and sent.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.errors import Cancelled, NoWorker, Overloaded
from pdserve.wire import events as ev
from pdserve.wire.codec import encode
from pdserve.wire.flow import StreamState, cost_of
from pdserve.wire.limits import LARGE, Limits
from pdserve.wire.protocol import ConnectionState
from tests.wire.support import pair

SIDES = st.sampled_from((0, 1))
SIZES = st.sampled_from((0, 5, 300, LARGE + 10))


class Side:
    """One connection, and what the model knows of it."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.wire = bytearray()  # on its way to the other side
        self.asked: dict[int, bytes] = {}  # requests of the peer's we owe an answer
        self.waiting: dict[int, bytes] = {}  # ours: id -> body
        self.ended: Counter[bytes] = Counter()
        self.streams: dict[bytes, StreamState] = {}  # by the body of their OPEN, which names them
        self.sent: dict[bytes, list[bytes]] = {}
        self.got: dict[bytes, list[bytes]] = {}
        self.held: list[tuple[StreamState, int]] = []  # received, not consumed
        self.over: set[bytes] = set()  # streams we were told the end of, or gave up


class Machine(RuleBasedStateMachine):
    @initialize()
    def connect(self) -> None:
        limits = Limits(budget=4000, window=2000, least_window=500, pending=8, streams=4)
        d, a = pair(limits)
        self.sides = [Side(d), Side(a)]
        self.serial = 0

    def name(self) -> bytes:
        """A body that tells its request or stream from all others."""
        self.serial += 1
        return encode(self.serial)

    # ------------------------------------------------------------------ requests

    @rule(side=SIDES)
    def ask(self, side: int) -> None:
        us = self.sides[side]
        body = self.name()
        try:
            call = us.connection.send_request(1, body, 1000, body)
        except Overloaded:
            assert len(us.connection.calls) == 8
            return
        assert call not in us.waiting
        us.waiting[call] = body

    @rule(side=SIDES, choice=st.integers(0, 7), fail=st.booleans())
    def answer(self, side: int, choice: int, fail: bool) -> None:
        us = self.sides[side]
        if us.asked:
            call = sorted(us.asked)[choice % len(us.asked)]
            body = us.asked.pop(call)
            if fail:
                us.connection.fail(call, NoWorker(body.hex()))
            else:
                us.connection.respond(call, body)

    @rule(side=SIDES, choice=st.integers(0, 7))
    def cancel(self, side: int, choice: int) -> None:
        us = self.sides[side]
        if us.waiting:
            call = sorted(us.waiting)[choice % len(us.waiting)]
            us.connection.cancel(call)
            us.ended[us.waiting.pop(call)] += 1

    # ------------------------------------------------------------------ streams

    @rule(side=SIDES, window=st.sampled_from((0, 500, 2000)), last=st.booleans())
    def open(self, side: int, window: int, last: bool) -> None:
        us = self.sides[side]
        name = self.name()
        try:
            stream = us.connection.open_stream(2, name, window=window, context=name, last=last)
        except Overloaded:
            return
        us.streams[name] = stream
        us.sent[name], us.got[name] = [], []

    @rule(side=SIDES, choice=st.integers(0, 9), size=SIZES, last=st.booleans())
    def send(self, side: int, choice: int, size: int, last: bool) -> None:
        us = self.sides[side]
        name, stream = self.pick(us, choice)
        if stream is None or not stream.sending:
            return
        item = self.name() + bytes(size)
        if us.connection.send_data(stream, item, last=last):
            us.sent[name].append(item)

    @rule(side=SIDES, choice=st.integers(0, 9))
    def end(self, side: int, choice: int) -> None:
        us = self.sides[side]
        _, stream = self.pick(us, choice)
        if stream is not None:
            us.connection.end(stream)

    @rule(side=SIDES, choice=st.integers(0, 9))
    def abort(self, side: int, choice: int) -> None:
        us = self.sides[side]
        name, stream = self.pick(us, choice)
        if stream is not None:
            us.connection.abort(stream, Cancelled("model"))
            us.over.add(name)
            us.held = [(held, cost) for held, cost in us.held if held is not stream]

    @rule(side=SIDES, count=st.integers(1, 5))
    def consume(self, side: int, count: int) -> None:
        us = self.sides[side]
        for _ in range(min(count, len(us.held))):
            stream, cost = us.held.pop(0)
            us.connection.consumed(stream, cost)

    def pick(self, us: Side, choice: int) -> tuple[bytes, StreamState | None]:
        if not us.streams:
            return b"", None
        name = sorted(us.streams)[choice % len(us.streams)]
        return name, us.streams[name]

    # ------------------------------------------------------------------ the wire

    @rule(side=SIDES, share=st.floats(0, 1))
    def carry(self, side: int, share: float) -> None:
        """Some of what one side has written arrives at the other."""
        us, them = self.sides[side], self.sides[1 - side]
        us.wire += b"".join(us.connection.data_to_send())
        size = round(share * len(us.wire))
        data = bytes(us.wire[:size])
        del us.wire[:size]
        self.arrive(us, them, them.connection.receive_data(data))

    def arrive(self, us: Side, them: Side, events: list[Any]) -> None:
        """What the receiving side reports, against what the model knows."""
        for event in events:
            if isinstance(event, ev.RequestsReceived):
                for call, _, _, body in event.requests:
                    assert call not in them.asked
                    them.asked[call] = bytes(body)
            elif isinstance(event, ev.AnswersReceived):
                for context, body in event.answers:
                    self.finish(them, context, bytes(body))
            elif isinstance(event, ev.RequestFailed):
                self.finish(them, event.context, bytes.fromhex(event.error.message))
            elif isinstance(event, ev.RequestCancelled):
                them.asked.pop(event.stream)
            elif isinstance(event, ev.StreamOpened):
                name = bytes(event.body)
                event.stream.context = name
                them.streams[name] = event.stream
                them.sent[name], them.got[name] = [], []
                them.connection.grant(event.stream, 1000)
            elif isinstance(event, ev.DataReceived):
                assert event.cost == sum(cost_of(len(item)) for item in event.items)
                for item in event.items:
                    self.item(us, them, event.stream, bytes(item))
            elif isinstance(event, ev.StreamEnded):
                assert event.stream.context not in them.over
            elif isinstance(event, ev.StreamReset):
                ended = event.stream.context
                assert isinstance(ended, bytes)
                assert ended not in them.over
                them.over.add(ended)
            else:
                assert isinstance(event, ev.StreamUnblocked), event

    def finish(self, side: Side, context: object, body: bytes) -> None:
        """An answer: it belongs to a request that waits, and carries that one's body."""
        (call,) = [call for call, asked in side.waiting.items() if asked == context]
        assert side.waiting.pop(call) == body
        side.ended[body] += 1

    def item(self, us: Side, them: Side, stream: StreamState, item: bytes) -> None:
        name = stream.context
        assert isinstance(name, bytes)
        assert name not in them.over
        them.got[name].append(item)
        assert us.sent[name][: len(them.got[name])] == them.got[name], "in order, none missing"
        them.held.append((stream, cost_of(len(item))))

    # ------------------------------------------------------------------ always

    @invariant()
    def books_balance(self) -> None:
        for side in getattr(self, "sides", ()):
            connection = side.connection
            assert connection.state is ConnectionState.OPEN
            assert 0 <= connection.budget.granted <= connection.budget.total
            assert all(count == 1 for count in side.ended.values())
            assert connection.taken <= connection.queued

    @precondition(lambda self: hasattr(self, "sides"))
    @rule()
    def come_to_rest(self) -> None:
        """Answer, end and consume everything: then nothing at all is left."""
        for _ in range(6):
            for number, side in enumerate(self.sides):
                for call in list(side.asked):
                    side.connection.respond(call, side.asked.pop(call))
                for name, stream in side.streams.items():
                    if not stream.over:
                        side.connection.abort(stream, Cancelled("rest"))
                        side.over.add(name)
                for stream, cost in side.held:
                    side.connection.consumed(stream, cost)
                side.held.clear()
                self.carry(number, 1.0)
        for side in self.sides:
            assert side.connection.busy == 0
            assert side.connection.budget.granted == 0
            assert not side.waiting
            assert not side.wire


Machine.TestCase.settings = settings(
    Machine.TestCase.settings, stateful_step_count=60, max_examples=60
)
TestMachine = Machine.TestCase
