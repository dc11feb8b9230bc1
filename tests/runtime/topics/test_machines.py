"""A publisher and three readers under random loss: nothing is lost silently, and all agree at last.

Messages are dropped and repeated, streams cut, the publisher restarted, views changed behind their
readers' backs. At any time a live reader's state is the publisher's as it was at that number.
"""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.runtime.topics.wires import SMALL, Publishing, Reading, digest_of

READERS = st.integers(0, 2)
KEYS = st.integers(0, 9).map(lambda number: b"key%d" % number)
VALUES = st.sampled_from((b"", b"a", b"b", b"long" * 60))


CHANGES = st.tuples(KEYS, st.one_of(st.none(), VALUES))
FATES = st.sampled_from(("taken", "taken", "lost", "twice", "answer lost"))


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.epochs = 1
        self.publishing = Publishing(1)
        self.readers = [Reading(self.publishing) for _ in range(3)]
        self.planted: set[int] = set()

    # ------------------------------------------------------------------ the publisher

    @rule(changes=st.lists(CHANGES, min_size=1, max_size=6), flush=st.booleans())
    def change(self, changes: list[tuple[bytes, bytes | None]], flush: bool) -> None:
        for key, value in changes:
            if value is None:
                self.publishing.set.drop(key)
            else:
                self.publishing.set.put(key, value)
        if flush:
            self.publishing.set.flush()

    @rule()
    def clear(self) -> None:
        self.publishing.set.clear()

    @rule(count=st.sampled_from((2, 3, 5, 9, 40)), key=KEYS)
    def burst(self, count: int, key: bytes) -> None:
        for number in range(count):
            self.publishing.set.put(key, b"%d" % number)
            self.publishing.set.flush()

    @rule(really=st.sampled_from((False, False, True)))
    def restart(self, really: bool) -> None:
        if not really:
            return
        self.epochs += 1
        self.publishing = Publishing(self.epochs)
        for reading in self.readers:
            reading.publishing = self.publishing
            reading.open(self.now)

    # ------------------------------------------------------------------ the streams

    @rule(first=READERS)
    def flow(self, first: int) -> None:
        """All is well for a while, for some."""
        for reading in self.readers[first:]:
            reading.pump(self.now, 20)
            reading.deliver(20, self.now)

    @rule(which=READERS, fates=st.lists(FATES, min_size=1, max_size=10))
    def flow_badly(self, which: int, fates: list[str]) -> None:
        reading = self.readers[which]
        reading.pump(self.now, len(fates))
        for fate in fates:
            if not reading.down:
                return
            if fate == "lost":
                reading.down.popleft()
            elif fate == "answer lost":
                reading.reader.hear(reading.down.popleft())
            else:
                if fate == "twice":
                    reading.down.appendleft(reading.down[0])
                    reading.deliver(1, self.now)
                reading.deliver(1, self.now)
            self.states_are_the_publishers()

    @rule(which=READERS, credit=st.integers(1, 12))
    def pump(self, which: int, credit: int) -> None:
        self.readers[which].pump(self.now, credit)

    @rule(which=READERS)
    def reset(self, which: int) -> None:
        self.readers[which].reset(self.now)

    @rule(seconds=st.sampled_from((0.05, 0.5, 1.0, 5.0, 40.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(which=READERS, key=KEYS)
    def meddle(self, which: int, key: bytes) -> None:
        """A fault in the reader's own memory."""
        reading = self.readers[which]
        if which not in self.planted:
            reading.plant(key, b"planted")
            self.planted.add(which)

    # ------------------------------------------------------------------ what holds

    @invariant()
    def states_are_the_publishers(self) -> None:
        for which, reading in enumerate(self.readers):
            if which not in self.planted:
                reading.check()

    @invariant()
    def bounds_hold(self) -> None:
        log = self.publishing.log
        assert len(log.pins) <= SMALL.snapshots
        assert log.head - log.oldest <= SMALL.ring_events * SMALL.pinned
        assert log.bytes <= SMALL.ring_bytes * SMALL.pinned
        assert self.publishing.set.digest() == digest_of(self.publishing.set.items)

    def teardown(self) -> None:
        if not hasattr(self, "publishing"):
            return
        self.publishing.set.flush()
        for which, reading in enumerate(self.readers):
            if which in self.planted:  # once more, when the reader has everything: it must be found
                self.now = reading.settle(self.now)
                found = reading.reader.divergences
                reading.plant(b"meddled", b"planted")
                self.now = reading.settle(self.now)
                assert reading.reader.divergences == found + 1
            self.now = reading.settle(self.now)
            assert reading.view.items == self.publishing.set.items
            reading.check()
            reading.feed.close()
        assert not self.publishing.log.pins


TestMachines = pytest.mark.timeout(1800)(Machine.TestCase)
TestMachines.settings = settings(stateful_step_count=80)
