import dataclasses
import logging

import pytest

from pdserve.ids import NodeId
from pdserve.launch.cluster.membership_log import log_member_event
from pdserve.runtime.registry import Member, MemberAppeared, MemberChanged, MemberGone

MEMBER = Member(NodeId("a"), 7, "127.0.0.1:7001", "worker")
SUSPECT = dataclasses.replace(MEMBER, suspect=True)


@pytest.mark.parametrize(
    ("event", "level", "line"),
    [
        (MemberAppeared(MEMBER), "INFO", "worker a joined, life 7 at 127.0.0.1:7001"),
        (MemberChanged(SUSPECT, MEMBER), "INFO", "worker a does not answer, some say, life 7"),
        (MemberChanged(MEMBER, SUSPECT), "INFO", "worker a answers again, life 7"),
        (MemberGone(MEMBER, "died"), "WARNING", "worker a died, life 7"),
        (MemberGone(MEMBER, "left"), "INFO", "worker a left, life 7"),
    ],
)
def test_each_change_is_one_line(caplog, event, level, line):
    with caplog.at_level(logging.INFO, "pdserve"):
        log_member_event(event)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [(level, line)]


@pytest.mark.parametrize(
    "event",
    [
        MemberGone(MEMBER, "closed"),
        MemberGone(MEMBER, "own rejoin"),
        MemberChanged(dataclasses.replace(MEMBER, reachable=False), MEMBER),
    ],
)
def test_what_is_no_news_of_the_member_is_not_logged(caplog, event):
    with caplog.at_level(logging.INFO, "pdserve"):
        log_member_event(event)
    assert not caplog.records
