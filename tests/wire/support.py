"""Two connections that talk to each other without a network."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pdserve.ids import NodeId
from pdserve.wire.handshake import AcceptorHandshake, DialerHandshake, Identity, Versions
from pdserve.wire.limits import Limits
from pdserve.wire.protocol import Connection, ConnectionState

if TYPE_CHECKING:
    import random
    from collections.abc import Iterable

    from pdserve.wire import events as ev
    from pdserve.wire.flow import BodyBudget

KEY = b"k" * 32
OTHER_KEY = b"o" * 32
NONCES = b"d" * 32, b"a" * 32

E = TypeVar("E")


def identity(name: str, cluster: str = "test") -> Identity:
    return Identity(cluster, NodeId(name), 1000, f"{name}:7000")


def dialler(
    keys: tuple[bytes, ...] = (KEY,),
    *,
    nonce: bytes = NONCES[0],
    versions: Versions | None = None,
    limits: Limits | None = None,
    binding: bytes = b"",
    name: str = "d",
    cluster: str = "test",
    epoch: int = 1000,
) -> Connection:
    claim = replace(identity(name, cluster), epoch=epoch).claim()
    handshake = DialerHandshake(
        claim, keys, nonce, versions=versions or Versions(), binding=binding
    )
    return Connection(handshake, limits or Limits())


def acceptor(
    keys: tuple[bytes, ...] = (KEY,),
    *,
    nonce: bytes = NONCES[1],
    versions: Versions | None = None,
    limits: Limits | None = None,
    binding: bytes = b"",
    name: str = "a",
    cluster: str = "test",
    bodies: BodyBudget | None = None,
) -> Connection:
    handshake = AcceptorHandshake(
        identity(name, cluster), keys, nonce, versions=versions or Versions(), binding=binding
    )
    return Connection(handshake, limits or Limits(), bodies)


def taken(connection: Connection) -> bytes:
    """Everything it wants to send."""
    return b"".join(connection.data_to_send())


def shake(d: Connection, a: Connection) -> tuple[list[Any], list[Any]]:
    """Run the handshake as far as it goes; returns what each side reported."""
    at_d: list[Any] = []
    at_a: list[Any] = []
    for _ in range(3):
        at_a += a.receive_data(taken(d))
        if a.state is ConnectionState.JUDGING:
            a.accept(b"s" * 16)
        at_d += d.receive_data(taken(a))
    return at_d, at_a


def pair(limits: Limits | None = None, acceptors: Limits | None = None) -> tuple[Any, Any]:
    """Two open connections: the dialler's and the acceptor's."""
    d, a = dialler(limits=limits), acceptor(limits=acceptors or limits)
    shake(d, a)
    assert d.state is a.state is ConnectionState.OPEN
    return d, a


def move(source: Connection, target: Connection) -> list[Any]:
    """Carry what `source` has to say; returns what `target` reports."""
    return target.receive_data(taken(source))


def only(events: Iterable[object], kind: type[E]) -> E:
    """The one event there is, which is of that kind."""
    (event,) = events
    assert isinstance(event, kind), event
    return event


def asked(event: ev.RequestsReceived) -> tuple[int, int, int, bytes]:
    """The one request of an `Asked`."""
    ((call, method, milliseconds, body),) = event.requests
    return call, method, milliseconds, bytes(body)


def splits(data: bytes, numbers: random.Random) -> list[bytes]:
    """`data` in random pieces, many of them tiny."""
    pieces = []
    position = 0
    while position < len(data):
        size = numbers.choice((1, 2, 3, 15, 16, 17, 100, 5000, 20_000))
        pieces.append(data[position : position + size])
        position += size
    return pieces
