"""What only real sockets can show: options, names, ports in use, too many open files."""

from __future__ import annotations

import asyncio
import errno
import socket

import pytest

from pdserve.errors import ConfigError, DialFailed
from pdserve.net.settings import NetSettings
from pdserve.net.tcp import TcpNetwork
from pdserve.testing.net_support import ECHO, Echo, RecordingHandler, node
from tests.net.certificates import tls_of


async def nodelay_on_both_ends() -> None:
    a = node("a", TcpNetwork(NetSettings()), RecordingHandler())
    b = node("b", TcpNetwork(NetSettings()), RecordingHandler())
    link = await a.dial(await b.listen("127.0.0.1:0"))
    await link.request(ECHO, Echo(), timeout=5.0)
    for endpoint in (a, b):
        (end,) = endpoint.links.values()
        own = end.shell.transport.get_extra_info("socket")
        assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    await a.close()
    await b.close()


async def test_small_frames_are_not_held_back() -> None:
    await nodelay_on_both_ends()


def test_small_frames_are_not_held_back_on_the_standard_loop_either() -> None:
    asyncio.run(nodelay_on_both_ends())


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
async def test_a_port_in_use_is_named(encrypted) -> None:
    network = TcpNetwork(NetSettings(), tls_of("a") if encrypted else None)
    listener = await network.listen("127.0.0.1:0", asyncio.Protocol)
    with pytest.raises(ConfigError, match=f"cannot listen on {listener.address}"):
        await network.listen(listener.address, asyncio.Protocol)
    await listener.close()
    again = await network.listen(listener.address, asyncio.Protocol)
    await again.close()


async def test_a_host_that_does_not_exist_is_a_failed_dial() -> None:
    with pytest.raises(DialFailed, match="no-such-host"):
        await TcpNetwork(NetSettings()).connect(
            "no-such-host.invalid:7000", asyncio.Protocol, timeout=10.0
        )


async def test_ipv6_addresses_work_where_there_is_ipv6() -> None:
    a = node("a", TcpNetwork(NetSettings()), RecordingHandler())
    b = node("b", TcpNetwork(NetSettings()), RecordingHandler())
    try:
        address = await b.listen("[::1]:0")
    except ConfigError:
        pytest.skip("no IPv6 here")
    finally:
        if not b._listeners:
            await b.close()
            await a.close()
    assert address.startswith("[::1]:")
    link = await a.dial(address)
    assert (await link.request(ECHO, Echo(b"x"), timeout=5.0)).payload == b"x"
    await a.close()
    await b.close()


class FullUp:
    """A listening socket in a process that may open no more files."""

    def accept(self) -> None:
        raise OSError(errno.EMFILE, "Too many open files")


async def test_a_tls_listener_without_files_pauses_instead_of_spinning(monkeypatch) -> None:
    monkeypatch.setattr("pdserve.net.tcp._ACCEPT_PAUSE", 0.05)
    settings = NetSettings()
    a = node("a", TcpNetwork(settings, tls_of("a")), RecordingHandler())
    b = node("b", TcpNetwork(settings, tls_of("b")), RecordingHandler())
    address = await b.listen("127.0.0.1:0")
    (listener,) = b._listeners
    listener._accept(FullUp())  # type: ignore[attr-defined]
    link = await a.dial(address)  # after the pause
    assert (await link.request(ECHO, Echo(b"x"), timeout=5.0)).payload == b"x"
    listener._accept(FullUp())  # type: ignore[attr-defined]
    await a.close()
    await b.close()
