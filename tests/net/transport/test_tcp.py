"""What only real sockets can show: options, names, ports in use, too many open files."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError, DialFailed
from pdserve.net.settings import NetSettings
from pdserve.net.transport import sockets
from pdserve.net.transport.tcp import TcpNetwork
from tests.net.certificates import tls_of
from tests.support.net_support import ECHO, Echo, RecordingHandler, node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.name_lookup import AddressInfo


def two_addresses(monkeypatch, *hosts: str) -> None:
    """`both.example` has these."""

    async def resolve(host: str, port: int, *, passive: bool = False) -> list[AddressInfo]:
        return [found for one in hosts for found in sockets.resolve_now(one, port)]

    monkeypatch.setattr("pdserve.net.transport.sockets.resolve", resolve)
    monkeypatch.setattr("pdserve.net.transport.tcp.resolve", resolve)


@contextmanager
def swallowing(host: str, port: int) -> Iterator[None]:
    """An address at which nothing is answered: its queue is full."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind((host, port))
        listening.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex((host, port))
        yield


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


async def test_a_name_is_listened_on_at_all_its_addresses_and_one_port(monkeypatch) -> None:
    two_addresses(monkeypatch, "127.0.0.1", "127.0.0.2")
    listener = await TcpNetwork(NetSettings()).listen("both.example:0", asyncio.Protocol)
    port = int(listener.address.rpartition(":")[2])
    for host in ("127.0.0.1", "127.0.0.2"):
        (await asyncio.open_connection(host, port))[1].close()
    await listener.close()


async def test_a_dead_first_address_of_a_name_does_not_hide_the_others(monkeypatch) -> None:
    """It swallows packets, as a firewall does."""
    monkeypatch.setattr("pdserve.net.transport.sockets._STAGGER", 0.01)
    b = node("b", TcpNetwork(NetSettings()), RecordingHandler())
    port = int((await b.listen("127.0.0.1:0")).rpartition(":")[2])
    a = node("a", TcpNetwork(NetSettings()), RecordingHandler())
    with swallowing("127.0.0.2", port):
        two_addresses(monkeypatch, "127.0.0.2", "127.0.0.1")
        link = await a.dial(f"both.example:{port}")
    assert (await link.request(ECHO, Echo(b"x"), timeout=5.0)).payload == b"x"
    await a.close()
    await b.close()


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
async def test_a_name_that_cannot_be_is_a_failed_dial(host) -> None:
    with pytest.raises(DialFailed, match="cannot be a host's name"):
        await TcpNetwork(NetSettings()).connect(f"{host}:7700", asyncio.Protocol, timeout=5.0)
    with pytest.raises(ConfigError, match="cannot be a host's name"):
        await TcpNetwork(NetSettings()).listen(f"{host}:7700", asyncio.Protocol)


async def test_a_descriptor_that_the_loop_still_uses_is_a_failed_dial(monkeypatch) -> None:
    async def refuse(*args: object, **options: object) -> socket.socket:
        raise RuntimeError("File descriptor 9 is used by transport")

    monkeypatch.setattr(sockets, "start_connection", refuse)
    with pytest.raises(DialFailed, match="is used by transport"):
        await TcpNetwork(NetSettings()).connect("127.0.0.1:1", asyncio.Protocol, timeout=5.0)


async def test_an_address_that_this_machine_lacks_is_left_out(monkeypatch) -> None:
    two_addresses(monkeypatch, "192.0.2.1", "127.0.0.1")
    listener = await TcpNetwork(NetSettings()).listen("both.example:0", asyncio.Protocol)
    assert listener.address.startswith("127.0.0.1:")
    await listener.close()
