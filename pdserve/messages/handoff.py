"""What nodes say so that a prompt is prefilled on one worker and decoded on another.

    decode worker D        prefill queue (of a router)          prefill worker P
    Enqueue ─────────────▶ Queued
                           ◀──────────────────────────── Offer  credits
                           Claimed ────────────────────▶
    ◀───────────────────────────────────────────── OpenAttempt
    Opened ──────────────────────────────────────────────────▶  request and ticket
    ◀─────────────────────────────────────────────────── Renew  the lease, once a second
    ◀══════════════════════ KV, by pdserve.transfer ══════════
    ◀────────────────────────────────────────────────── Notify  the handoff
                           ◀─────────────────────────── Ended   of the claim

A *claim* is P's right to an item of the queue, a *lease* its right to write to blocks of D's, which
ends unless renewed. Both are soft: D alone says what becomes of its request. It numbers the
attempts, has at most one open, and takes a handoff only of that one; so whatever is lost, repeated
or late, a request has one outcome. No block ids travel before an attempt is open.

A sequence that runs on a worker S already is moved the same way, but for the queue: its next worker
sends `HandOver` to S itself, which takes that as a claim of its own and is P from then on.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.ids import NodeId
from pdserve.messages.request import Deadline, GenerateRequest, Started, TokenLogprob
from pdserve.messages.transfer import Control, Ticket

PREFILL_QUEUE: Final = 0x0305
"""The stream that decode and prefill workers open to the router that owns a model's queue."""
PREFILL: Final = "prefill"
"""Topic of a router, a value: `QueueReport`."""

LEASE: Final = 6.0
"""Seconds after which an attempt is given up unless its lease was renewed."""
RENEWAL: Final = 1.0
"""Seconds between two renewals."""

Mode = Literal["aggregated", "prefill", "decode"]
Disagg = Literal["rule", "predict", "always", "never"]
"""How a decode worker decides where a prompt is prefilled."""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0)]
Reason = Annotated[str, Meta(max_length=2000)]


# ---------------------------------------------------------------- decode worker and queue


class PrefillItem(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One request as the queue knows it: how much work, where its prefix may be. No prompt."""

    request: Number
    """The decode worker's handle."""
    round: Count
    """How often the decode worker has queued it; a later one takes the place of an earlier one."""
    model: str
    """The name on the workers' cards."""
    compat_hash: str = ""
    """Only a worker with the same one may take it."""
    prompt_tokens: Count
    """All that must be in KV: the output of earlier attempts included."""
    cached_tokens: Count = 0
    """Leading ones that the decode worker has; they need not be sent."""
    names: bytes = b""
    """Short names (`blocks.hashing.short_names`) of the prompt's full blocks."""
    names_id: bytes = b""
    block_size: Count = 0
    priority: int = 0
    """Higher is sooner."""
    deadline: Deadline | None = None
    """Seconds that remain at the moment of sending; None: none."""
    excluded: tuple[NodeId, ...] = ()
    """Workers that have failed at it."""
    waited: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds since it was first queued, with whomever, at the moment of sending."""


class Enqueue(msgspec.Struct, frozen=True, array_like=True, tag=1):
    item: PrefillItem


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Nobody need prefill this any more; answered by nothing."""

    request: Number
    round: Count


class Offer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=3):
    """From a prefill worker, whenever it changes: it would take so many more items."""

    model: str
    compat_hash: str = ""
    credits: Count
    uncomputed_tokens: Count = 0
    """Prompt tokens it has taken and not computed."""
    claims: Count = 0
    """Claims of the model that had come on this stream when it said so: those that are still on
    their way count against the credits."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A prefill worker is done with a claim."""

    claim: Number
    outcome: Literal["done", "refused", "failed", "cancelled", "returned"]
    """`returned`: it was not begun and goes back into the queue.
    `refused`: the decode worker did not open an attempt; it knows why, the item is dropped.
    `failed`: so has the decode worker been told, if it could be; the item is dropped."""


ToQueue = Enqueue | Cancel | Offer | Ended


class Queued(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """To a decode worker: the item is in the queue."""

    request: Number
    round: Count


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """To a decode worker: it is not in the queue (any more), nobody will take it. Prefill locally,
    or ask again elsewhere."""

    request: Number
    round: Count
    reason: Reason


class Claimed(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=3):
    """To a prefill worker: this is yours."""

    claim: Number
    """Of this router, never reused in its life."""
    decode: NodeId
    decode_epoch: Number
    item: PrefillItem


class Unclaimed(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """To a prefill worker: the item was cancelled; stop working on it. Answered by `Ended`."""

    claim: Number


FromQueue = Queued | Refused | Claimed | Unclaimed


class QueueState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One model's queue."""

    waiting: Count = 0
    """Items that nobody has claimed."""
    waiting_tokens: Count = 0
    """Their tokens, less what the best worker for each has cached."""
    claimed: Count = 0
    workers: Count = 0
    """Prefill workers connected."""
    uncomputed_tokens: Count = 0
    """Claimed and not computed, over all workers."""
    credits: Count = 0
    """Items that would be taken at once."""


class QueueReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a router says of the queues it owns."""

    queues: dict[str, QueueState] = {}
    """By model."""


# ---------------------------------------------------------------- from a worker to its successor


class HandOver(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """To the worker that has the KV of a sequence: ask me for blocks, and fill them."""

    item: PrefillItem
    epoch: Number
    """The life of that worker that is meant; claims are good in that one only."""


class HandOverTaken(msgspec.Struct, frozen=True, array_like=True):
    """It will, unless it says why not."""

    refused: Reason = ""
    """One word, as `pdserve_prefill_decisions_total` shows it."""


# ---------------------------------------------------------------- prefill worker and decode worker


class OpenAttempt(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A prefill worker holds a claim and asks for the blocks to fill."""

    request: Number
    round: Count
    owner: NodeId
    """Whose claim it is. Of another router than the request was queued with last, or of another
    life of it, a claim is void: the fencing epoch."""
    owner_epoch: Number
    cached_tokens: Count = 0
    """That the prefill worker has."""
    model: str = ""
    compat_hash: str = ""
    claim: Number = 0
    """Asked twice under one claim is asked once; under another it is another's work."""


class Opened(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The blocks, and all that is needed to compute their content."""

    attempt: Count
    ticket: Ticket
    request: GenerateRequest
    """Its deadline is what remains at the moment of sending."""


class Held(msgspec.Struct, frozen=True, array_like=True):
    """An attempt of a decode worker's that a prefill worker works on."""

    request: Number
    attempt: Count


class Renew(msgspec.Struct, frozen=True, array_like=True):
    """A prefill worker still works on these attempts of the decode worker."""

    held: tuple[Held, ...]


class Renewed(msgspec.Struct, frozen=True, array_like=True):
    """Those among them that are over for the decode worker: withdraw them."""

    over: tuple[Held, ...] = ()


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """Of one choice."""

    token: int
    logprob: TokenLogprob | None = None


class Handoff(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a prefilled request needs besides its blocks to go on elsewhere."""

    tokens: Count
    """In KV: the prompt, and the output of earlier attempts."""
    parts: Count
    """Delivered under the ticket."""
    first: tuple[FirstToken, ...]
    """One for each choice that has not ended before, in order."""
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: Count = 0
    """That the prefill worker did not have to compute."""
    started: Started
    """How it came to its first token there."""
    checksums: tuple[tuple[int, int], ...] = ()
    """(index into the ticket's blocks, CRC-32 of the block's valid bytes at the source): a sample,
    or all."""


class Notify(msgspec.Struct, frozen=True, array_like=True):
    """The attempt's KV is complete or on its way: here is the rest."""

    request: Number
    attempt: Count
    handoff: Handoff


class AttemptFailed(msgspec.Struct, frozen=True, array_like=True):
    """A prefill worker gives up an attempt. `kind` names a class of `pdserve.errors`."""

    request: Number
    attempt: Count
    kind: str
    message: Reason


class Withdraw(msgspec.Struct, frozen=True, array_like=True):
    """From the decode worker: compute and send nothing more for this attempt."""

    request: Number
    attempt: Count
    reason: Reason = ""


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """It has been heard. False: the attempt was not open any more, and nothing came of it."""

    current: bool = True


class SetDisagg(msgspec.Struct, frozen=True, array_like=True):
    """From an operator to a decode worker: decide like this from now on, until it restarts."""

    disagg: Disagg


class DisaggSet(msgspec.Struct, frozen=True, array_like=True):
    before: Disagg


class TransferAsk(msgspec.Struct, frozen=True, array_like=True):
    """One transport to its counterpart."""

    epoch: Number
    """The receiver's life that is meant."""
    backend: str
    control: Control


class TransferAnswer(msgspec.Struct, frozen=True, array_like=True):
    control: Control
