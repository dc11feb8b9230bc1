"""Fuzz target: what frontends, routers and workers say to each other about requests.

    python -m tests.fuzz messages -max_total_time=60

A body decodes or is a `ProtocolError`; what decodes encodes to something that decodes to the same.
A request that decodes may be looked at as a worker does before it runs: it knows which choices are
still wanted, or is refused. Pieces are put together or refused, and never hold more than a message.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from pdserve.engine_core.kit import check_request
from pdserve.errors import PdserveError, ProtocolError
from pdserve.messages import handoff, hash_secret, node, routing
from pdserve.messages import worker_stream as messages
from pdserve.messages.engine import Rejected
from pdserve.messages.request import (
    Finish,
    FirstTokenStats,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
)
from pdserve.messages.routing import RouterMigrationHint
from pdserve.messages.worker_stream import (
    AbortRequest,
    Fragment,
    FragmentAssembler,
    OpenRequest,
    OutputBatch,
    WorkerMigrationHint,
)
from pdserve.token_ids import token_ids
from pdserve.wire.codec import decoder, encode

__all__ = ["DECODERS", "fuzz", "request", "seeds"]

_RECORDS: Final = sorted(
    {
        kind
        for module in (routing, handoff, hash_secret, node)
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == module.__name__
    },
    key=lambda kind: (kind.__module__, kind.__name__),
)
_UNIONS: Final = (OpenRequest | AbortRequest | Fragment, OutputBatch | Fragment)
DECODERS: Final = [decoder(cast("Any", kind)) for kind in (*_UNIONS, *_RECORDS)]
_VOCABULARY: Final = 1000


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
    if isinstance(body, OpenRequest):
        _look(body.request)
    elif isinstance(body, Fragment):
        _put_together(body)


def _look(wanted: GenerateRequest) -> None:
    try:
        check_request(wanted, max_model_len=4096, vocab_size=_VOCABULARY)
    except PdserveError:
        return
    assert set(wanted.live) <= set(range(wanted.n))
    assert wanted.live


def _put_together(piece: Fragment) -> None:
    assembler = FragmentAssembler()
    for _ in range(3):
        try:
            whole = assembler.take(piece)
        except ProtocolError:
            return
        assert whole is None or len(whole) <= messages.MAX_MESSAGE_BYTES


def request(**fields: Any) -> GenerateRequest:
    """A small one."""
    sampling = SamplingParams(max_tokens=8)
    return GenerateRequest(
        request_id="r", model="m", prompt=token_ids([1, 2]), sampling=sampling, **fields
    )


def seeds() -> list[bytes]:
    """Every message of a channel, a router's move, and little of all else."""
    moved = request(
        n=3, output=[[4], [5, 6], []], ended=[1], source="w1", source_epoch=7, suspect=True
    )
    start = FirstTokenStats(0, 0.1, 0.2, 0.3)
    deltas = [
        TokenDelta(handle=1, choice=0, tokens=[5], started=start),
        TokenDelta(handle=1, choice=0, tokens=[], finish=Finish(reason="stop")),
    ]
    said: list[tuple[int, Any]] = [
        (0, OpenRequest(1, 2, request())),
        (0, OpenRequest(1, 0, moved)),
        (0, AbortRequest(1)),
        (0, Fragment(b"xyz", last=False)),
        (1, Fragment(b"xyz", last=True)),
        (1, OutputBatch(deltas, [(1, 2)], [Rejected(1, "overloaded", "full")])),
        (1, OutputBatch(moving=[WorkerMigrationHint(1, "drain"), WorkerMigrationHint(2, "kv")])),
        (len(_UNIONS) + _RECORDS.index(RouterMigrationHint), RouterMigrationHint(9)),
    ]
    empty = [bytes([number, 0x90]) for number in range(len(DECODERS))]
    return [bytes([number]) + encode(body) for number, body in said] + empty
