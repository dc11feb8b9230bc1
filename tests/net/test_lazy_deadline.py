"""Every deadline in a table is acted on, though the table is looked at as rarely as possible."""

from __future__ import annotations

import asyncio
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from pdserve.net.lazy_deadline import LazyDeadline
from pdserve.net.timers import TICK, Timers
from pdserve.testing import virtual_time


class Table:
    """Deadlines by name, as a link keeps its requests."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time
        self.entries: dict[int, float] = {}
        self.expired: dict[int, float] = {}
        self.looks = 0
        self.deadlines = LazyDeadline(Timers(loop), self.look)

    def add(self, name: int, when: float) -> None:
        self.entries[name] = when
        if when < self.deadlines.due:
            self.deadlines.watch(when)

    def look(self, now: float) -> float:
        self.looks += 1
        for name in [name for name, when in self.entries.items() if when <= now]:
            self.expired[name] = now
            del self.entries[name]
        return min(self.entries.values(), default=inf)


@given(
    st.lists(
        st.tuples(st.floats(0, 0.1), st.floats(0.01, 2), st.booleans()), min_size=1, max_size=40
    )
)
def test_what_is_not_answered_expires_on_time(entries) -> None:
    async def main() -> None:
        table = Table()
        due = {}
        for number, (pause, timeout, answered) in enumerate(entries):
            await asyncio.sleep(pause)
            table.add(number, table.now() + timeout)
            if answered:
                del table.entries[number]
            else:
                due[number] = table.now() + timeout
        await asyncio.sleep(5.0)
        assert table.expired.keys() == due.keys()
        for number, when in due.items():
            assert when <= table.expired[number] + 1e-9 <= when + TICK + 1e-6

    virtual_time.run(main())


def test_a_thousand_answered_requests_cost_one_look() -> None:
    async def main() -> None:
        table = Table()
        for number in range(1000):
            table.add(number, table.now() + 1.0)
            await asyncio.sleep(0.0005)
            del table.entries[number]
        await asyncio.sleep(3.0)
        assert not table.expired
        assert table.looks == 1

    virtual_time.run(main())


def test_a_closed_table_is_left_alone() -> None:
    async def main() -> None:
        table = Table()
        table.add(1, 0.5)
        table.deadlines.close()
        await asyncio.sleep(1.0)
        assert table.looks == 0

    virtual_time.run(main())
