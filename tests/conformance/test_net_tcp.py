"""TCP keeps the promises of every network: on uvloop, on the standard loop, under TLS."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from pdserve.net.settings import NetSettings
from pdserve.net.transport.tcp import TcpNetwork
from tests.net.certificates import tls_of
from tests.support.net_conformance import ByteConformance, LinkConformance

if TYPE_CHECKING:
    from pdserve.net.base import ByteNetwork


class _Tcp:
    def network(self, host: str) -> ByteNetwork:
        return TcpNetwork(NetSettings())

    def address(self, host: str) -> str:
        return "127.0.0.1:0"


class _Tls(_Tcp):
    def network(self, host: str) -> ByteNetwork:
        return TcpNetwork(NetSettings(), tls_of(host))


class TestBytes(_Tcp, ByteConformance):
    pass


class TestLinks(_Tcp, LinkConformance):
    pass


class TestLinksOverTls(_Tls, LinkConformance):
    pass


@pytest.mark.parametrize("case", [n for n in dir(TestLinks) if n.startswith("test_")])
def test_links_conform_on_the_standard_loop(case) -> None:
    asyncio.run(getattr(TestLinks(), case)())


@pytest.mark.parametrize("case", [n for n in dir(TestBytes) if n.startswith("test_")])
def test_bytes_conform_on_the_standard_loop(case) -> None:
    asyncio.run(getattr(TestBytes(), case)())
