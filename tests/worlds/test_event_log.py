"""What a trace says, and when two are the same."""

from __future__ import annotations

from tests.worlds.event_log import EventLog


def test_a_trace_is_its_lines_in_order() -> None:
    one, other = EventLog(lambda: 1.5), EventLog(lambda: 1.5)
    assert one.digest == other.digest
    one.note("a", "begins", "x")
    one.note("b", "ends")
    assert one.lines == ["   1.500000 a        begins x", "   1.500000 b        ends"]
    assert one.counts == {"begins": 1, "ends": 1}
    other.note("b", "ends")
    other.note("a", "begins", "x")
    assert one.digest != other.digest
