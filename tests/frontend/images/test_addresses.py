"""Only addresses that everybody can reach are fetched from."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.frontend.images.addresses import is_public


@pytest.mark.parametrize(
    "address",
    [
        *("93.184.216.34", "8.8.8.8", "1.1.1.1", "172.15.0.1", "172.32.0.1", "100.128.0.1"),
        *("2606:2800:220:1:248:1893:25c8:1946", "2a00:1450:4001::1", "::ffff:8.8.8.8"),
        *("64:ff9b::808:808", "2002:808:808::1"),
    ],
)
def test_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.255.255.254", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1"),
        *("172.31.255.255", "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.100.100.200"),
        *("192.0.0.1", "192.0.0.9", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1"),
        *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.88.99.1"),
        *("::", "::1", "::7f00:1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:a9fe:a9fe"),
        *("fe80::1", "fe80::1%eth0", "fc00::1", "fd12:3456::1", "fec0::1", "ff02::1"),
        *("64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::808:808", "2002:7f00:1::"),
        *("2002:a00:1::1", "2001::1", "2001:0:7f00:1::", "2001:db8::1", "3fff::1", "100::1"),
        *(
            "5f00::1",
            "",
            "localhost",
            "2130706433",
            "0x7f000001",
            "127.1",
            "8.8.8.8 ",
            "8.8.8.8:80",
        ),
    ],
)
def test_not_public(address: str) -> None:
    assert not is_public(address)


@given(st.ip_addresses(v=4))
def test_a_carried_address_is_judged_as_it_is(carried: ipaddress.IPv4Address) -> None:
    number, public = int(carried), is_public(str(carried))
    for address in (
        ipaddress.IPv6Address(0xFFFF << 32 | number),
        ipaddress.IPv6Address(int(ipaddress.IPv6Address("64:ff9b::")) | number),
        ipaddress.IPv6Address(int(ipaddress.IPv6Address("2002::")) | number << 80),
    ):
        assert is_public(str(address)) == public
    assert not is_public(str(ipaddress.IPv6Address(number))), "an old form that nobody routes"
