"""Network namespaces as hosts: one bridge, one address each, and nftables between them.

The bridge is in the namespace of the test, which reaches every host. Nothing here needs netem: what
is lost is dropped by rules in the host's own namespace. It needs root, `ip` and `nft`; where they
do not work `network` skips the test and says why, or fails it if PDSERVE_REQUIRE_NFT is set.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn

_NET = "198.18"
"""Kept for measurements by RFC 2544: no real network is hidden by it."""


def _do(*command: str, text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


class Host:
    """One namespace."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.prefix = ("ip", "netns", "exec", name)
        """What runs a command there."""

    def rules(self, *lines: str) -> None:
        """Replace the rules of what comes in, such as `ip saddr 198.18.1.2 drop`."""
        rules = "\n".join(f"add rule inet chaos in {line}" for line in lines)
        text = (
            "add table inet chaos\nflush table inet chaos\n"
            "add chain inet chaos in { type filter hook input priority 0; }\n"
            "add chain inet chaos out { type filter hook output priority 0; }\n"
            f"{rules}\n"
        )
        _do(*self.prefix, "nft", "-f", "-", text=text)

    def silent(self) -> None:
        """As a host that has lost its power: nothing comes in, nothing goes out."""
        self.rules('iifname != "lo" drop')
        _do(*self.prefix, "nft", "add rule inet chaos out oifname != lo drop")

    def deaf_to(self, *others: Host) -> None:
        """What those send does not arrive."""
        self.rules(*(f"ip saddr {other.address} drop" for other in others))

    def losing(self, percent: int) -> None:
        """Of what comes in, one by one and at random, but for what the test itself says."""
        mine = f"{self.address.rpartition('.')[0]}.1"
        self.rules(f"ip saddr != {mine} numgen random mod 100 < {percent} drop")

    def heal(self) -> None:
        """As if nothing had been."""
        self.rules()


class Network:
    """Hosts on one bridge."""

    def __init__(self) -> None:
        self._tag = f"pd{os.getpid() % 10000}{random.randrange(10, 100)}"
        self._third = random.randrange(1, 250)
        self._hosts: list[Host] = []
        self._links: list[str] = []
        self.bridge = f"{self._tag}b"

    def begin(self) -> None:
        """Raises `OSError`."""
        _do("ip", "link", "add", self.bridge, "type", "bridge")
        _do("ip", "addr", "add", f"{_NET}.{self._third}.1/24", "dev", self.bridge)
        _do("ip", "link", "set", self.bridge, "up")

    def host(self) -> Host:
        """One more. Raises `OSError`."""
        number = len(self._hosts) + 2
        host = Host(f"{self._tag}-{number}", f"{_NET}.{self._third}.{number}")
        self._hosts.append(host)
        here, there = f"{self._tag}h{number}", f"{self._tag}n{number}"
        _do("ip", "netns", "add", host.name)
        _do("ip", "link", "add", here, "type", "veth", "peer", "name", there)
        self._links.append(here)
        _do("ip", "link", "set", there, "netns", host.name)
        _do("ip", "link", "set", here, "master", self.bridge)
        _do("ip", "link", "set", here, "up")
        _do(*host.prefix, "ip", "addr", "add", f"{host.address}/24", "dev", there)
        _do(*host.prefix, "ip", "link", "set", there, "up")
        _do(*host.prefix, "ip", "link", "set", "lo", "up")
        return host

    def heal(self) -> None:
        """Of all hosts."""
        for host in self._hosts:
            host.heal()

    def end(self) -> None:
        """Leave nothing behind."""
        for link in self._links:  # a namespace lives on while orphaned sockets in it say goodbye
            with contextlib.suppress(OSError):
                _do("ip", "link", "del", link)
        for host in self._hosts:
            with contextlib.suppress(OSError):
                _do("ip", "netns", "del", host.name)
        with contextlib.suppress(OSError):
            _do("ip", "link", "del", self.bridge)


def _unable(why: str) -> NoReturn:
    if os.environ.get("PDSERVE_REQUIRE_NFT", "") not in ("", "0"):
        pytest.fail(f"PDSERVE_REQUIRE_NFT is set, and {why}", pytrace=False)
    pytest.skip(why)


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network without hosts yet; skips where there can be none."""
    if os.geteuid() != 0:
        _unable("network namespaces need root")
    for tool in ("ip", "nft"):
        if shutil.which(tool) is None:
            _unable(f"the command {tool} is not installed (iproute2, nftables)")
    net = Network()
    try:
        try:
            net.begin()
            net.host().silent()  # the first one shows whether all of it works
        except OSError as error:
            _unable(f"no network namespaces or no nftables here: {error}")
        yield net
    finally:
        net.end()
