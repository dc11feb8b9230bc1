import resource

import pytest

from pdserve.frontend.http.fd_limit import RESERVED, usable_connections

INFINITE = resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch):
    """The process's limits, as (soft, hard); changes go here instead of to the process."""
    state = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: state["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: state.update(now=new))
    return state


def test_a_limit_that_suffices_is_left_alone(limits):
    assert usable_connections(500) == 500
    assert limits["now"] == (1024, 4096)


@pytest.mark.parametrize("hard", [4096, INFINITE])
def test_a_soft_limit_is_raised_as_far_as_needed(limits, hard):
    limits["now"] = (1024, hard)
    assert usable_connections(2000) == 2000
    assert limits["now"] == (2000 + RESERVED, hard)


def test_a_hard_limit_leaves_fewer_connections_and_a_warning(limits, caplog):
    assert usable_connections(9000) == 4096 - RESERVED
    assert "ulimit -n" in caplog.text


def test_no_limit_is_no_limit(limits):
    limits["now"] = (INFINITE, INFINITE)
    assert usable_connections(10**6) == 10**6
