import pytest

from pdserve.cli.drain import DrainProgress, ending, members_named
from pdserve.cli.status_tables import render
from pdserve.errors import ConfigError
from pdserve.ids import NodeId
from pdserve.messages.status import DrainState, NodeReport
from tests.cli.test_status_tables import member, status


def progress_of(name, epoch, *, stay):
    return DrainProgress({NodeId(name): epoch}, stay)


def draining(name, **state):
    return member(name, "worker", NodeReport(drain=DrainState(**state)), draining=True)


def test_nodes_are_found_by_name_each_once():
    there = status(member("w1", "worker"), member("w2", "worker"))
    assert [m.node for m in members_named(there, ["w2", "w1", "w2"])] == ["w2", "w1"]
    with pytest.raises(ConfigError, match="no node 'w3' in the cluster; there are w1, w2"):
        members_named(there, ["w1", "w3"])
    with pytest.raises(ConfigError, match=r"no node 'worker-b' .*; did you mean worker-a"):
        members_named(status(member("worker-a", "worker")), ["worker-b"])


def test_what_is_left_is_told_when_it_changes_and_the_end_is_that_it_is_gone():
    progress = progress_of("w1", member("w1", "worker").epoch, stay=False)
    assert progress.look(status(draining("w1", left=2))) == [("w1", "2 requests left")]
    assert progress.look(status(draining("w1", left=2, remaining=3.0))) == []
    assert progress.look(status(draining("w1", left=1))) == [("w1", "1 request left")]
    assert progress.look(status(draining("w1", drained=True))) == [("w1", "drained: it is leaving")]
    assert progress.waiting
    assert progress.look(status()) == [("w1", "gone")]
    assert not progress.waiting


def test_the_node_that_is_asked_may_share_the_process_of_one_that_goes():
    router, frontend = member("r1", "router", pid=7), member("f1", "frontend", pid=7)
    away = member("w1", "worker", pid=8)
    there = status(router, frontend, away)
    assert ending(there, [router]) == {"r1", "f1"}
    assert ending(status(member("a", "router"), member("b", "router")), [router]) == {"r1"}
    asked = NodeId("f1")
    assert DrainProgress({router.node: 1}, False, asked, ending(there, [router])).asked_is_going
    assert not DrainProgress({router.node: 1}, True, asked, ending(there, [router])).asked_is_going


def test_another_life_of_its_name_is_not_the_one_that_drains():
    progress = progress_of("w1", 7, stay=False)
    assert progress.look(status(member("w1", "worker"))) == [("w1", "gone")]


def test_who_stays_is_done_when_it_is_drained():
    progress = progress_of("w1", member("w1", "worker").epoch, stay=True)
    progress.look(status(draining("w1", left=1, stays=True)))
    news = progress.look(status(draining("w1", drained=True, stays=True)))
    assert (news, progress.waiting) == ([("w1", "drained")], {})


def test_the_node_that_is_asked_may_be_the_one_that_goes():
    progress = progress_of("r1", 7, stay=False)
    assert not progress.asked_is_going  # nothing was seen yet
    router = member("r1", "router")
    progress = progress_of("r1", router.epoch, stay=False)
    progress.look(status(router))
    assert progress.asked_is_going
    assert progress.look(None) == [("r1", "gone, as far as can be seen")]
    assert not progress.waiting


def test_status_shows_who_drains_and_how_far_it_is():
    text = render(
        status(draining("w1", left=2, remaining=7.0), draining("w2", drained=True, stays=True))
    )
    (one,) = (line for line in text.splitlines() if line.startswith("w1"))
    (two,) = (line for line in text.splitlines() if line.startswith("w2"))
    assert one.split()[2] == "draining"
    assert one.endswith("draining: 2 requests left, for 7 s at most")
    assert two.split()[2] == "drained"
