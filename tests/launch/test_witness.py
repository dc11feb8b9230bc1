import dataclasses
import logging

import pytest

from pdserve.ids import NodeId
from pdserve.launch.witness import note_member
from pdserve.runtime.registry import Appeared, Changed, Gone, Member

MEMBER = Member(NodeId("a"), 7, "127.0.0.1:7001", "worker")
SUSPECT = dataclasses.replace(MEMBER, suspect=True)


@pytest.mark.parametrize(
    ("event", "level", "line"),
    [
        (Appeared(MEMBER), "INFO", "worker a joined, life 7 at 127.0.0.1:7001"),
        (Changed(SUSPECT, MEMBER), "INFO", "worker a does not answer, some say, life 7"),
        (Changed(MEMBER, SUSPECT), "INFO", "worker a answers again, life 7"),
        (Gone(MEMBER, "died"), "WARNING", "worker a died, life 7"),
        (Gone(MEMBER, "left"), "INFO", "worker a left, life 7"),
    ],
)
def test_each_change_is_one_line(caplog, event, level, line):
    with caplog.at_level(logging.INFO, "pdserve"):
        note_member(event)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [(level, line)]


@pytest.mark.parametrize(
    "event",
    [
        Gone(MEMBER, "closed"),
        Gone(MEMBER, "own rejoin"),
        Changed(dataclasses.replace(MEMBER, reachable=False), MEMBER),
    ],
)
def test_what_is_no_news_of_the_member_is_not_logged(caplog, event):
    with caplog.at_level(logging.INFO, "pdserve"):
        note_member(event)
    assert not caplog.records
