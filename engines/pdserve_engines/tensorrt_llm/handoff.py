"""TensorRT-LLM's own hand-over of a prompt: what travels in `Handoff.opaque`, and what is safe.

The prefill worker runs a context-only request. Its result holds a first token and opaque state:
where its transceiver listens, and how its cache is laid out. The decode worker gives these to a
generation-only request of the same prompt, whose transceiver fetches the KV. pdserve moves no
bytes; it carries the record, and keeps attempts, leases and deadlines as for every other engine.

Both requests carry one id, which must be unique in the cluster: `attempt_id` derives it from the
ticket, so that both ends know it. Pure: knows no engine and no worker.
"""

from __future__ import annotations

import hashlib
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from pdserve.errors import TransferRefused
from pdserve.messages.transfer import TransferTicket

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.ids import TokenId

__all__ = [
    "BACKEND",
    "CancelAnswer",
    "ContextState",
    "attempt_id",
    "cancel_answer",
    "context_arguments",
    "context_state",
    "generation_arguments",
    "make_ticket",
    "read_state",
]

BACKEND = "tensorrt_llm"
"""Name of the way KV moves, as in `EngineCapabilities.transfers`."""

_FIRST_GLOBAL = 1 << 62
"""Ids from here on are ours. TensorRT-LLM numbers its own requests below 1 << 40 and takes ids of
up to 63 bits."""


class ContextState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What the decode worker's engine needs, as it travels in `Handoff.opaque`."""

    request: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """Id of the attempt."""
    first: Annotated[tuple[int, ...], Meta(min_length=1, max_length=1)]
    """The first token."""
    state: Annotated[bytes, Meta(max_length=1 << 19)] = b""
    """The transceiver's endpoints and cache layout."""
    context_request: int | None = None
    """The request's number at the prefill worker's engine."""
    draft: Annotated[tuple[int, ...], Meta(max_length=1 << 10)] = ()
    rank: int | None = None
    """Attention data-parallel rank that has the KV."""
    endpoint: Annotated[str, Meta(max_length=4096)] = ""
    """Where the Python transceiver is asked for it."""


_FIELDS = {
    "disagg_request_id": "request",
    "first_gen_tokens": "first",
    "opaque_state": "state",
    "ctx_request_id": "context_request",
    "draft_tokens": "draft",
    "ctx_dp_rank": "rank",
    "ctx_info_endpoint": "endpoint",
}
"""Field of `DisaggregatedParams` -> ours."""


class CancelAnswer(Enum):
    """What TensorRT-LLM's transceiver answers when a transfer is cancelled. The known releases keep
    the answer inside: `abort` of a result returns None."""

    NOT_FOUND = "NotFound"
    ALREADY_COMPLETE = "AlreadyComplete"
    CANCELLED_BEFORE_ADVERTISE = "CancelledBeforeAdvertise"
    CANCEL_REQUESTED_IN_FLIGHT = "CancelRequestedInFlight"
    BACKEND_UNHEALTHY = "BackendUnhealthy"
    NOT_CANCELLABLE = "NotCancellable"

    @property
    def safe(self) -> bool:
        """True if the blocks may be freed: no transfer reads or writes them any more."""
        return self in (
            CancelAnswer.NOT_FOUND,
            CancelAnswer.ALREADY_COMPLETE,
            CancelAnswer.CANCELLED_BEFORE_ADVERTISE,
        )

    @property
    def restart(self) -> bool:
        """The engine must be started anew; it will not become safe by waiting."""
        return self is CancelAnswer.BACKEND_UNHEALTHY


def cancel_answer(said: object) -> CancelAnswer | None:
    """Read what `abort` has returned: None, an enum's member, or its name. What is not known counts
    as not safe."""
    if said is None:
        return None
    name = str(getattr(said, "name", said)).removeprefix("k")
    known = {answer.value: answer for answer in CancelAnswer}
    return known.get(name, CancelAnswer.NOT_CANCELLABLE)


def make_ticket(handle: int, attempt: int, life: int, epoch: int, tokens: int) -> TransferTicket:
    """The ticket of an attempt. It names no blocks: the engine has none that pdserve sees.

    `life`: a random number of the decode worker's engine.
    """
    return TransferTicket(
        transfer=f"{handle}",
        attempt=attempt,
        epoch=epoch,
        slot=0,
        generation=handle & 0xFFFF_FFFF,
        first_token=0,
        tokens=tokens,
        blocks=(),
        backend=BACKEND,
        life=life,
    )


def attempt_id(ticket: TransferTicket) -> int:
    """The attempt's id for both engines, of 63 bits. Raises `TransferRefused` for a ticket of an
    engine of another kind."""
    if ticket.backend != BACKEND:
        raise TransferRefused(
            f"the decode worker expects KV by {ticket.backend or 'pdserve'}; TensorRT-LLM sends it "
            "only to TensorRT-LLM"
        )
    text = f"{ticket.life} {ticket.epoch} {ticket.generation} {ticket.attempt}".encode()
    digest = hashlib.blake2b(text, digest_size=8, person=b"pdserve trt").digest()
    return _FIRST_GLOBAL | int.from_bytes(digest, "little") >> 2


def context_arguments(request: int, fields: Collection[str]) -> dict[str, Any]:
    """Arguments of `DisaggregatedParams` at the prefill worker; `fields`: those that it has."""
    arguments: dict[str, Any] = {"request_type": "context_only"}
    if "disagg_request_id" in fields:
        arguments["disagg_request_id"] = request
    return arguments


def context_state(request: int, token: TokenId, params: Any) -> bytes:
    """The record for `Handoff.opaque`. `params`: the result's `DisaggregatedParams`, or None if the
    engine gave none, since the first token ended the request."""
    found = {
        ours: getattr(params, theirs, None) for theirs, ours in _FIELDS.items() if ours != "request"
    }
    return msgspec.msgpack.encode(
        ContextState(
            request=request,
            first=(token,),
            state=found["state"] or b"",
            context_request=found["context_request"],
            draft=tuple(found["draft"] or ()),
            rank=found["rank"],
            endpoint=found["endpoint"] or "",
        )
    )


def read_state(opaque: bytes) -> ContextState:
    """Decode a record. Raises `TransferRefused` if it is none of TensorRT-LLM's."""
    try:
        return msgspec.msgpack.decode(opaque, type=ContextState)
    except msgspec.DecodeError as error:
        raise TransferRefused(f"the handoff is not one of TensorRT-LLM: {error}") from error


def generation_arguments(state: ContextState, fields: Collection[str]) -> dict[str, Any]:
    """Arguments of `DisaggregatedParams` at the decode worker.

    Raises `TransferRefused` if its release lacks a field that the record fills.
    """
    arguments: dict[str, Any] = {"request_type": "generation_only"}
    for theirs, ours in _FIELDS.items():
        value = getattr(state, ours)
        if value is None or value in ((), "", b""):
            continue
        if theirs in fields:
            arguments[theirs] = list(value) if isinstance(value, tuple) else value
        elif theirs != "disagg_request_id":
            raise TransferRefused(
                f"this release of TensorRT-LLM has no {theirs}, which the prefill worker sent"
            )
    return arguments
