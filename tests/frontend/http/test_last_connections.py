import socket

import pytest

from pdserve.frontend.http import last_connections
from pdserve.frontend.http.last_connections import end_backlog

FAMILIES = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]


def listening(family: socket.AddressFamily, host: str) -> socket.socket:
    listener = socket.socket(family)
    try:
        listener.bind((host, 0))
    except OSError:
        listener.close()
        pytest.skip(f"no {host} here")
    listener.listen(8)
    return listener


def connects(listener: socket.socket) -> bool:
    """Whether a new connection is there within a moment."""
    try:
        socket.create_connection(listener.getsockname()[:2], timeout=0.2).close()
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(("family", "host"), FAMILIES)
def test_what_waits_is_accepted_whole_and_what_comes_later_does_not_get_in(family, host):
    with listening(family, host) as listener:
        assert connects(listener)
        with socket.create_connection(listener.getsockname()[:2], timeout=5.0) as early:
            early.sendall(b"asked")
            end_backlog(listener)
            assert not connects(listener)
            listener.accept()[0].close()
            with listener.accept()[0] as peer:
                listener.close()
                peer.settimeout(5.0)
                assert peer.recv(16) == b"asked"
                peer.sendall(b"answered")
                assert early.recv(16) == b"answered"


def test_where_there_are_no_filters_the_backlog_shrinks(monkeypatch):
    monkeypatch.setattr(last_connections, "_SO_ATTACH_FILTER", 0x7FFF)  # no such option
    with listening(*FAMILIES[0]) as listener:
        end_backlog(listener)
        held = [socket.create_connection(listener.getsockname(), timeout=5.0)]
        assert not connects(listener)
        held[0].close()
