"""What a stranger provokes is logged once per interval, with a count of the rest."""

from __future__ import annotations

from pdserve.net.log_throttle import LogThrottle


def test_one_line_per_kind_and_interval() -> None:
    complaints = LogThrottle(interval=10.0)
    assert complaints.admit("key", 0.0) == 0
    assert complaints.admit("key", 1.0) is None
    assert complaints.admit("version", 1.0) == 0
    assert complaints.admit("key", 9.9) is None
    assert complaints.admit("key", 10.0) == 2
    assert complaints.admit("key", 20.0) == 0
