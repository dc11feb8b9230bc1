"""What a fault excuses: its time and its hosts, and no more."""

from __future__ import annotations

from tests.worlds.faults import Fault
from tests.worlds.oracle.fault_history import FaultHistory


def during(kind: str, since: float, until: float, a: str = "w0", b: str = "") -> FaultHistory:
    causes, fault = FaultHistory(), Fault(kind, since, until - since, a, b)
    causes.begins(fault, since)
    causes.ends(fault, until)
    return causes


def test_a_fault_excuses_what_was_there_while_it_lasted():
    causes = during("crash", 10.0, 12.0)
    assert causes.any_since(12.0)
    assert not causes.any_since(12.1)
    assert not causes.any_since(0.0, disturbing=True), "a crash holds no words up"
    assert during("pause", 10.0, 12.0).any_since(11.0, disturbing=True)


def test_a_fault_that_lasts_is_always_there():
    causes = FaultHistory()
    causes.begins(Fault("pause", 1.0, 500.0, "w0"), 1.0)
    assert causes.any_since(400.0)


def test_a_fault_concerns_its_hosts():
    causes = during("cut", 10.0, 12.0, "w0", "r0")
    assert causes.touched({"w0", "f0"}, 11.0)
    assert causes.touched({"r0"}, 11.0)
    assert not causes.touched({"f0", "w1"}, 11.0)
    assert during("partition", 10.0, 12.0, "w0", "r0").touched({"f0"}, 11.0)


def test_silences_that_follow_each_other_are_one():
    causes = during("pause", 10.0, 12.0)
    assert causes.longest_silence(0.0, 20.0) == 2.0
    second = Fault("isolate", 11.5, 2.0, "f0")
    causes.begins(second, 11.5)
    assert causes.longest_silence(0.0, 12.5) == 2.5
    causes.ends(second, 13.5)
    assert causes.longest_silence(0.0, 20.0) == 3.5
    assert causes.longest_silence(14.0, 20.0) == 0.0
    assert during("crash", 10.0, 12.0).longest_silence(0.0, 20.0) == 0.0
    assert during("delay", 10.0, 12.0).longest_silence(0.0, 20.0) == 0.0


def test_ends_are_counted():
    causes = FaultHistory()
    for at in (1.0, 2.0, 3.0):
        causes.request_ended(at)
    assert causes.ended_since(2.0) == 2
    causes.request_ended(100.0)
    assert causes.ended_since(0.0) == 1, "long ago"
