"""Random work under random faults: every request ends once, and what it says of itself is true.

Three nodes in virtual time ask each other things, stream and send payloads, while connections are
delayed, cut, partitioned and processes stand still. A request that says it was not sent was never
seen by anyone; one that was answered was answered by its own answer; nothing is served twice. At
the end nothing is left, and the same seed takes the same course.

What a course contains is not left to chance where a short run asserts it: its kinds of fault are
given, and its opening lets each of them, and each outcome, happen once among the random work.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import (
    Cancelled,
    DeadlineExceeded,
    DialFailed,
    LinkError,
    LinkLost,
    Overloaded,
    PdserveError,
)
from pdserve.ids import NodeId
from pdserve.net.settings import NetSettings
from pdserve.net.transport.memory import MemoryWorld
from pdserve.testing import virtual_time
from pdserve.wire.codec import Method
from pdserve.wire.limits import Limits
from tests.support.net_support import Echo, RecordingHandler, RecordingStreamSink, node, send_item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.net.base import Link

WORK = Method(50, "work", Echo, Echo)
NAMES = ("a", "b", "c")
SETTINGS = NetSettings(
    limits=Limits(pending=20, streams=10, window=4000, least_window=1000, budget=20_000),
    bulk_limits=Limits(streams=10, window=100_000, budget=300_000),
    ping_after=0.5,
    silent_after=1.5,
    dial_timeout=1.0,
    retire_after=2.0,
    high_water=20_000,
    low_water=5_000,
)
SECONDS = 6.0
"""Of virtual time under random faults."""
FAULTS = {
    "delay": ("delay", "answered"),
    "split": ("", ""),
    "partition": ("silence", "DeadlineExceeded"),
    "one-way": ("silence", "DeadlineExceeded"),
    "reset": ("reset", "not-sent"),
    "cut": ("reset inside a stream", "LinkLost"),
    "pause": ("pause", "DeadlineExceeded"),
}
"""Each kind, what the world counts when it had an effect, and what a request comes to by it."""
KINDS = tuple(FAULTS)
PER_COURSE = 4
OUTCOMES = {
    *("answered", "cancelled", "not-sent", "LinkLost", "DeadlineExceeded", "dial-failed"),
    *("streamed", "aborted", "well"),
}


class Worker(RecordingHandler):
    """Answers after a while, and remembers what it was ever asked."""

    def __init__(self, world: Chaos) -> None:
        super().__init__()
        self.world = world
        self.seen: Counter[bytes] = Counter()

    def on_request(self, call) -> None:
        payload = call.read(WORK).payload
        self.seen[payload] += 1
        delay = self.world.random.choice((0.0, 0.0, 0.01, 0.3))
        answer = Echo(hashlib.sha256(payload).digest())
        if delay:
            handle = asyncio.get_running_loop().call_later(delay, call.reply, answer)
            call.on_cancel = handle.cancel
        else:
            call.reply(answer)


class Chaos:
    def __init__(self, seed: int, kinds: Sequence[str] = ()) -> None:
        """Without `kinds` the seed says which there are, and nothing is sure to happen."""
        self.random = random.Random(seed)
        self.opens = bool(kinds)
        self.kinds = kinds or self.random.sample(KINDS, PER_COURSE)
        self.net = MemoryWorld(random.Random(seed + 1))
        self.outcomes: Counter[str] = Counter()
        self.trace: list[str] = []
        self.serial = 0
        self.never_sent: set[bytes] = set()
        self.kept: dict[tuple[str, str], Link] = {}

    def note(self, what: str) -> None:
        now = asyncio.get_running_loop().time()
        self.trace.append(f"{now:.4f} {what}")
        self.outcomes[what.split()[0]] += 1

    async def run(self) -> None:
        self.handlers = {name: Worker(self) for name in NAMES}
        self.nodes = {
            name: node(name, self.net.network(name), self.handlers[name], settings=SETTINGS)
            for name in NAMES
        }
        for name in NAMES:
            await self.nodes[name].listen(f"{name}:7000")
        self.over = asyncio.Event()
        workers = [self.work(name) for name in NAMES for _ in range(4)]
        await asyncio.gather(self.faults(), *workers)
        self.mend()
        await self.all_well()
        await asyncio.gather(*(one.close(grace=1.0) for one in self.nodes.values()))
        await asyncio.sleep(5.0)
        self.check()

    # ------------------------------------------------------------------ work

    async def work(self, name: str) -> None:
        while not self.over.is_set():
            peer = self.random.choice([other for other in NAMES if other != name])
            deed = self.random.choice((self.ask, self.ask, self.ask, self.stream, self.bulk))
            try:
                link: Link = await self.nodes[name].dial(f"{peer}:7000", expect=NodeId(peer))
                if self.random.random() < 0.2:
                    link, self.kept[name, peer] = self.kept.get((name, peer), link), link
                await deed(link)  # now and then on a link from long ago, perhaps lost by now
            except DialFailed as error:
                self.note(f"dial-failed {error.cause}")
                await asyncio.sleep(self.random.uniform(0, 0.2))
            except (LinkLost, Overloaded, DeadlineExceeded, Cancelled) as error:
                self.note(f"{type(error).__name__} {deed.__name__}")
            await asyncio.sleep(self.random.uniform(0, 0.05))

    async def ask(self, link) -> None:
        size = self.random.choice((0, 100, 20_000))
        asking = self.asking(link, size, self.random.choice((0.02, 0.5, 3.0)))
        if self.random.random() < 0.1:
            asyncio.get_running_loop().call_later(self.random.uniform(0, 0.1), asking[1].cancel)
        await self.answer(*asking)

    def asking(self, link, size: int, timeout: float) -> tuple[bytes, asyncio.Task[Echo]]:
        """Begin to ask something that was never asked before."""
        self.serial += 1
        payload = b"%d" % self.serial + bytes(size)
        request = link.request(WORK, Echo(payload), timeout=timeout)
        return payload, asyncio.ensure_future(request)

    async def answer(self, payload: bytes, asking: asyncio.Task[Echo]) -> None:
        """Wait for the one end of a request, and note which it was."""
        await asyncio.wait([asking])
        if asking.cancelled():
            self.note("cancelled")
        elif (error := asking.exception()) is None:
            assert asking.result().payload == hashlib.sha256(payload).digest()
            self.note("answered")
        elif isinstance(error, LinkError) and not error.sent:
            self.never_sent.add(payload)
            self.note("not-sent")
        else:
            assert isinstance(error, LinkLost | DeadlineExceeded | Overloaded), error
            if isinstance(error, Overloaded):
                self.never_sent.add(payload)
            self.note(f"{type(error).__name__} ask")

    async def stream(self, link) -> None:
        await self.fill(link.open_stream(1, b"", RecordingStreamSink(), window=0))

    async def bulk(self, link) -> None:
        opened = await link.open_bulk_stream(1, b"", RecordingStreamSink(), timeout=1.0, window=0)
        await self.fill(opened)

    async def fill(self, stream) -> None:
        """Numbered items, some of them large."""
        for number in range(self.random.randint(1, 12)):
            size = 20_000 if self.random.random() < 0.4 else 1
            await send_item(stream, bytes([number]) * size, timeout=1.0)
        self.finish(stream, abort=self.random.random() < 0.3)

    def finish(self, stream, *, abort: bool) -> None:
        if abort:
            stream.abort(Cancelled("enough"))
            self.note("aborted")
        else:
            stream.end()
            self.note("streamed")

    # ------------------------------------------------------------------ faults

    async def faults(self) -> None:
        if "delay" in self.kinds:
            self.net.set_conditions(delay_max=self.random.choice((0.002, 0.05)))
        if "split" in self.kinds:
            self.net.set_conditions(split=True, capacity=8000)
        if self.opens:
            await self.opening()
        numbers, end = self.random, asyncio.get_running_loop().time() + SECONDS
        while asyncio.get_running_loop().time() < end:
            a, b = numbers.sample(NAMES, 2)
            self.inflict(numbers.choice(self.kinds), a, b)
            await asyncio.sleep(numbers.choice((0.05, 0.5, 2.0)))
            if numbers.random() < 0.7:
                self.mend()
            await asyncio.sleep(numbers.uniform(0, 0.3))
        self.over.set()

    def inflict(self, kind: str, a: str, b: str) -> None:
        """A fault between two nodes, or at the first; `delay` and `split` are always there."""
        match kind:
            case "partition":
                self.net.partition(a, b)
            case "one-way":
                self.net.partition(a, b, one_way=True)
            case "reset":
                self.net.reset(a, b)
            case "cut":
                self.net.reset_after(a, b, self.random.randint(1, 5000))
            case "pause":
                self.net.pause(a)

    def mend(self) -> None:
        self.net.heal()
        for name in NAMES:
            self.net.resume(name)

    # ------------------------------------------------------------------ what is sure to happen

    async def opening(self) -> None:
        """Every fault of this course has an effect, and work every outcome that it then has."""
        link: Link = await self.reach("a", "b")
        await self.answer(*self.asking(link, 100, 60.0))
        payload, asking = self.asking(link, 100, 60.0)
        await asyncio.sleep(0)  # it is sent, and no answer can be here
        asking.cancel()
        await self.answer(payload, asking)
        for abort in (False, True):
            self.finish(link.open_stream(1, b"", RecordingStreamSink(), window=0), abort=abort)
        for kind in self.kinds:
            if kind != "split":
                await self.provoke(kind)
        if {"partition", "one-way"} & {*self.kinds}:
            await self.dial_in_vain()

    async def provoke(self, kind: str) -> None:
        """Inflict a fault on a link in use; again if what else goes on there came before it."""
        fault, outcome = FAULTS[kind]
        before = self.net.faults[fault], self.outcomes[outcome]
        for _ in range(50):
            link = await self.reach("a", "b")
            self.inflict(kind, "a", "b")
            await self.answer(*self.asking(link, 20_000, 0.5))
            self.mend()
            if self.net.faults[fault] > before[0] and self.outcomes[outcome] > before[1]:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{kind} never had an effect")

    async def dial_in_vain(self) -> None:
        self.net.partition("a", "b")
        for name, peer in ("ab", "ba"):
            for link in [
                each for each in self.nodes[name].links.values() if each.peer.node == peer
            ]:
                link.abort("the test wants to dial")
        with pytest.raises(DialFailed) as caught:
            await self.nodes["a"].dial("b:7000", expect=NodeId("b"))
        self.note(f"dial-failed {caught.value.cause}")
        self.mend()

    async def reach(self, name: str, peer: str) -> Link:
        """A link, however often others on the way to it are lost to earlier faults."""
        for _ in range(20):
            try:
                return await self.nodes[name].dial(f"{peer}:7000", expect=NodeId(peer))
            except DialFailed:
                await asyncio.sleep(0.1)
        raise AssertionError(f"{name} does not reach {peer}")

    async def all_well(self) -> None:
        """Faults are over: soon everybody reaches everybody again."""
        await asyncio.sleep(3.0)
        for name in NAMES:
            for peer in NAMES:
                if peer != name:
                    link: Link = await self.nodes[name].dial(f"{peer}:7000", expect=NodeId(peer))
                    await link.request(WORK, Echo(b"well"), timeout=5.0)
        self.note("well")

    # ------------------------------------------------------------------ afterwards

    def check(self) -> None:
        seen: Counter[bytes] = Counter()
        for handler in self.handlers.values():
            seen.update(handler.seen)
        del seen[b"well"]
        assert max(seen.values()) == 1, "nothing is served twice"
        lies = sorted(payload.rstrip(b"\0") for payload in self.never_sent & seen.keys())
        assert not lies, "what was not sent was not seen"
        for handler in self.handlers.values():
            assert sorted(map(id, handler.ups)) == sorted(id(link) for link, _ in handler.downs)
            for _, sink in handler.streams:
                self.check_stream(sink)
        for one in self.nodes.values():
            assert one.connections == 0
            assert not one.links
        assert self.net.connections == 0

    def check_stream(self, sink: RecordingStreamSink) -> None:
        """In order, nothing missing, nothing mixed up."""
        numbers = [item[0] for item in sink.items]
        assert numbers == sorted(numbers)
        assert all(len(set(item)) == 1 for item in sink.items)
        assert len(sink.ends) == 1
        if sink.ends == [None]:
            assert numbers == list(range(len(numbers)))


def course(seed: int, kinds: Sequence[str] = ()) -> Chaos:
    world = Chaos(seed, kinds)
    try:
        virtual_time.run(world.run())
    except BaseException as error:
        error.add_note(f"course({seed}, {kinds})")
        raise
    return world


@pytest.mark.timeout(600)  # seconds of computing, on a machine that may have other things to do
def test_nothing_is_lost_doubled_or_left_behind(seed) -> None:
    """Every kind of fault is in four of seven courses, and surely fires there."""
    outcomes: Counter[str] = Counter()
    for number in range(len(KINDS)):
        kinds = [KINDS[(number + i) % len(KINDS)] for i in range(PER_COURSE)]
        world = course(seed + number, kinds)
        assert world.net.faults.keys() >= {FAULTS[kind][0] for kind in kinds} - {""}
        outcomes += world.outcomes
    assert outcomes.keys() >= OUTCOMES


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_random_courses_come_upon_everything_by_themselves(seed, long) -> None:
    """All 400 courses together have every outcome and fault; a slice of 40 keeps every rule."""
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for number in range(400 if long else 40):
        world = course(seed + number)
        outcomes += world.outcomes
        faults += world.net.faults
    if not long:
        return
    assert outcomes.keys() >= OUTCOMES
    assert faults.keys() >= {fault for fault, _ in FAULTS.values()} - {""}


@pytest.mark.parametrize("number", range(2))
def test_the_same_seed_takes_the_same_course(seed, number) -> None:
    assert course(seed + number).trace == course(seed + number).trace


def test_every_kind_of_error_is_one_of_ours() -> None:
    assert issubclass(LinkError, PdserveError)
