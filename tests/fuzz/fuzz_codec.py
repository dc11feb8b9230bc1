"""Fuzz target: every typed decoder of the wire.

    python -m tests.fuzz codec -max_total_time=60

A body decodes or is a `ProtocolError`; what decodes encodes to something that
decodes to the same, also with the plain `msgpack` package.
"""

from __future__ import annotations

import msgpack

from pdserve.errors import ProtocolError
from pdserve.wire.codec import decoder, encode
from pdserve.wire.error_codec import Failure
from pdserve.wire.handshake import Auth, Challenge, Hello, IdentityClaim, Refuse
from pdserve.wire.header import HEADER_BYTES
from pdserve.wire.protocol import GoAway
from tests.wire.test_golden import golden

DECODERS = [
    decoder(kind) for kind in (Failure, Hello, Challenge, Auth, IdentityClaim, Refuse, GoAway)
]


def fuzz(data: bytes) -> None:
    """One input: a decoder, and what it is to decode."""
    if not data:
        return
    decode = DECODERS[data[0] % len(DECODERS)]
    try:
        body = decode(data[1:])
    except ProtocolError:
        return
    again = encode(body)
    assert encode(decode(again)) == again  # by bytes: a NaN is not equal to itself
    assert isinstance(msgpack.unpackb(again), list)


def seeds() -> list[bytes]:
    """The body of every recorded frame, for every decoder."""
    bodies = sorted({data[HEADER_BYTES:] for _, _, data in golden()})
    return [bytes([number]) + body for number in range(len(DECODERS)) for body in bodies]
