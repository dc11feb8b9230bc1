"""A conversation has one home."""

from __future__ import annotations

from random import Random

from pdserve.router.policies.session import choose
from tests.router.policies.support import ask, snapshot, worker


def test_a_session_stays_whatever_the_load():
    for session in map(str, range(20)):
        request = ask(session_id=session)
        idle = snapshot([worker("a"), worker("b"), worker("c")])
        home = choose(request, idle, Random(1)).node
        busy = snapshot([worker(node, 8 * (node == home)) for node in "abc"])
        assert choose(request, busy, Random(2)).node == home


def test_sessions_have_different_homes():
    state = snapshot([worker("a"), worker("b"), worker("c")])
    homes = {choose(ask(session_id=str(i)), state, Random()).node for i in range(30)}
    assert homes == {"a", "b", "c"}


def test_without_a_session_the_least_busy_is_chosen():
    state = snapshot([worker("a", 3), worker("b", 1), worker("c", 2)])
    assert choose(ask(), state, Random()).node == "b"
