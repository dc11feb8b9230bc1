"""A name that others are to dial, and that does not resolve."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from pdserve.launch.cluster.advertise_check import watch_advertised_name
from pdserve.observe.degraded import Degradations
from pdserve.observe.metrics import Metrics

if TYPE_CHECKING:
    from pdserve.name_lookup import AddressInfo


async def test_a_name_that_does_not_resolve_is_a_degradation_until_it_does(monkeypatch) -> None:
    degradations = Degradations(Metrics())
    seen: list[str] = []

    async def resolve(host: str, port: int) -> list[AddressInfo]:
        seen.append(degradations.reasons().get("advertise_unresolved", ""))
        if len(seen) < 3:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr("pdserve.launch.cluster.advertise_check.resolve", resolve)
    monkeypatch.setattr("pdserve.launch.cluster.advertise_check._AGAIN", 0.0)
    await watch_advertised_name("typo.example:7700", degradations)
    assert seen[0] == ""
    assert "typo.example does not resolve" in seen[1]
    assert "IP address" in seen[2]
    assert not degradations.reasons()


async def test_numbers_are_names_that_resolve() -> None:
    degradations = Degradations(Metrics())
    for address in ("127.0.0.1:7700", "[::1]:7700", "127.0.0.1"):
        await watch_advertised_name(address, degradations)
    assert not degradations.reasons()
