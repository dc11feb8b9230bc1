"""The fault proxy does what the tests that use it believe."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from tests.chaos.cluster import eventually
from tests.chaos.proxy import Proxy


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=30)


@pytest.fixture
def echo():
    """A proxy in front of something that says everything again."""
    with Proxy(delay=0.001) as proxy:
        host, _, port = proxy.target.rpartition(":")
        server = socket.create_server((host, int(port)))

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = server.accept()
                    with one:
                        while data := one.recv(65536):
                            one.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield proxy
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(30)


def test_it_hands_on_and_remembers_the_first(echo):
    with connect(echo.address) as one:
        one.sendall(b"hello")
        assert one.recv(100) == b"hello"
        assert bytes(echo.heard) == b"hello"
        eventually(lambda: echo.carried == 10, "both ways are counted")


def test_a_stall_holds_and_a_resume_lets_go(echo):
    with connect(echo.address) as one:
        one.sendall(b"a")
        assert one.recv(100) == b"a"
        echo.stall()
        one.sendall(b"b")
        one.settimeout(0.2)
        with pytest.raises(TimeoutError):
            one.recv(100)
        echo.resume()
        one.settimeout(30)
        assert one.recv(100) == b"b"


def test_a_cut_ends_in_the_middle(echo):
    with connect(echo.address) as one:
        one.sendall(b"x" * 10)
        assert one.recv(100) == b"x" * 10
        echo.cut()
        eventually(lambda: echo._doomed, "the cut is ordered")
        one.sendall(b"y" * 10)
        received = b""
        with contextlib.suppress(ConnectionError):
            while data := one.recv(100):
                received += data
        assert b"y" * 10 not in received
        assert echo.cuts == 1


def test_nobody_behind_it_is_an_end_at_once():
    with Proxy() as proxy, connect(proxy.address) as one, contextlib.suppress(ConnectionError):
        assert one.recv(100) == b""
