"""Addresses: one form, and a clear word for everything else."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError
from pdserve.net.address import advertised, is_loopback, join, split, without_port


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("localhost:7000", ("localhost", 7000)),
        ("10.0.0.1:0", ("10.0.0.1", 0)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_an_address_is_a_host_and_a_port(address, parts) -> None:
    assert split(address) == parts
    assert join(*parts) == address


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":7000", "host:port", "host:-1", "host:65536", "::1:7000", "host:٣"],
)
def test_anything_else_is_refused_by_name(address) -> None:
    with pytest.raises(ConfigError, match=r"HOST:PORT|brackets"):
        split(address)


def test_a_url_is_no_address() -> None:
    with pytest.raises(ConfigError, match="is a URL"):
        split("http://10.0.0.1:7700")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *(("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("LocalHost", True)),
        *(("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("node-1", False)),
        *(("localhost.example.org", False), ("169.254.1.1", False)),
    ],
)
def test_loopback_is_what_nobody_else_reaches(host, local) -> None:
    assert is_loopback(host) is local


def test_what_is_advertised():
    assert advertised("", "10.0.0.1:7000") == "10.0.0.1:7000"
    assert advertised("host", "0.0.0.0:7000") == "host:7000"
    assert advertised("host:0", "0.0.0.0:7001") == "host:7001"
    assert advertised("host:9", "0.0.0.0:7001") == "host:9"
    assert advertised("[::1]", "[::]:7001") == "[::1]:7001"
    assert advertised("[::1]:8", "[::]:7001") == "[::1]:8"
    assert [without_port(a) for a in ("a:1", "a", "[::1]", "[::1]:5")] == [
        "a",
        "a",
        "[::1]",
        "[::1]",
    ]
