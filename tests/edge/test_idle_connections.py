"""Who ends for a newcomer: the oldest of the busiest host, and nobody else."""

import pytest

from pdserve.edge.idle_connections import IdleConnections, host_of


def test_the_busiest_host_loses_its_oldest():
    idle: IdleConnections[str] = IdleConnections()
    for key, host in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("b2", "b"), ("a3", "a")):
        idle.add(key, host)
    assert [idle.evict("c1") for _ in range(3)] == ["a1", "a2", "b1"]
    assert len(idle) == 2


def test_a_newcomer_ends_no_more_than_others():
    idle: IdleConnections[str] = IdleConnections()
    idle.add("new", "a")
    assert idle.evict("new") is None
    idle.add("other", "b")
    assert idle.evict("new") == "other"


def test_a_flood_from_one_host_ends_only_its_own():
    idle: IdleConnections[int] = IdleConnections()
    idle.add(-1, "good")
    for number in range(100):
        idle.add(number, "bad")
        if len(idle) > 10:
            assert idle.evict(number) == number - 9
    idle.remove(-1, "good")
    assert len(idle) == 9


def test_who_works_is_not_there():
    idle: IdleConnections[str] = IdleConnections()
    idle.add("a1", "a")
    idle.add("a2", "a")
    idle.remove("a1", "a")
    idle.remove("a1", "a")
    idle.remove("x", "nowhere")
    assert idle.evict("new") == "a2"


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        (("10.0.0.1", 5), "10.0.0.1"),
        (("::ffff:10.0.0.1", 5, 0, 0), "10.0.0.1"),
        (("2001:db8:1:2:3:4:5:6", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        ("/a/unix/socket", ""),
        (None, ""),
        ((), ""),
    ],
)
def test_one_machine_is_one_host(peer, host):
    assert host_of(peer) == host
