"""Defines the messages for prefilling a prompt on one worker and decoding it on another.

    decode worker D        prefill queue (of a router)          prefill worker P
    EnqueueItem ─────────▶ ItemQueued
                           ◀────────────────────── CreditOffer  credits
                           ItemClaimed ────────────────▶
    ◀───────────────────────────────────────────── OpenAttempt
    AttemptOpened ───────────────────────────────────────────▶  request and ticket
    ◀───────────────────────────────────────────── RenewLeases  once a second
    ◀══════════════════════ KV, by pdserve.transfer ══════════
    ◀─────────────────────────────────────────── NotifyHandoff  the handoff
                           ◀─────────────────────── ClaimEnded  of the claim

A *claim* is P's right to an item of the queue. A *lease* is P's right to write to blocks of D; it
ends unless renewed. D alone decides the outcome of its request: it numbers the attempts, has at
most one open, and accepts a handoff only of that one. So a request has one outcome, even if
messages are lost, repeated or late. No block ids travel before an attempt is open.

A sequence that already runs on a worker S moves the same way without the queue: its next worker
sends `KvFetch` to S, which treats that as a claim and takes the role of P.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.ids import NodeId
from pdserve.messages.request import Deadline, FirstTokenStats, GenerateRequest, TokenLogprob
from pdserve.messages.transfer import TransferControl, TransferTicket

PREFILL_QUEUE: Final = 0x0305
"""The stream that decode and prefill workers open to the router that owns a model's queue."""
PREFILL_TOPIC: Final = "prefill"
"""Topic of a router, a value: `QueueReport`."""

LEASE_SECONDS: Final = 6.0
"""Seconds after which an attempt is given up unless its lease was renewed."""
RENEW_INTERVAL: Final = 1.0
"""Seconds between two renewals."""

WorkerMode = Literal["aggregated", "prefill", "decode"]
Disagg = Literal["rule", "predict", "always", "never"]
"""How a decode worker decides where a prompt is prefilled."""
ClaimOutcome = Literal["done", "refused", "failed", "cancelled", "returned"]
"""How a claim ends. `returned`: it was not begun and goes back into the queue. `refused`: the
decode worker did not open an attempt, and the item is dropped. `failed`: the decode worker has been
told if it could be reached, and the item is dropped.
"""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0)]
Reason = Annotated[str, Meta(max_length=2000)]


# ---------------------------------------------------------------- decode worker and queue


class PrefillItem(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One request in the prefill queue: how much work it is and where its prefix may be cached. No
    prompt.
    """

    request: Number
    """The decode worker's handle."""
    round: Count
    """How often the decode worker has queued it; a later round replaces an earlier one."""
    model: str
    """The name on the workers' cards."""
    compat_hash: str = ""
    """The compatibility hash that a worker must have to take the item."""
    prompt_tokens: Count
    """Tokens that must be in KV, including the output of earlier attempts."""
    cached_tokens: Count = 0
    """Leading tokens that the decode worker has already; they need not be sent."""
    names: bytes = b""
    """Short block hashes (`blocks.hashing.short_hashes`) of the prompt's full blocks."""
    names_id: bytes = b""
    block_size: Count = 0
    priority: int = 0
    """Higher is sooner."""
    deadline: Deadline | None = None
    """Seconds remaining at the moment of sending; None: no deadline."""
    excluded: tuple[NodeId, ...] = ()
    """Workers that have failed at it."""
    waited: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    """Seconds since it was first queued, at any router, at the moment of sending."""
    generation: Count = 0
    """The decode worker's mode generation when it queued the item; 0: not said."""


class EnqueueItem(msgspec.Struct, frozen=True, array_like=True, tag=1):
    item: PrefillItem


class CancelItem(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Removes an item that no longer needs a prefill; not answered."""

    request: Number
    round: Count


class CreditOffer(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=3):
    """Tells a router, on every change, how many more items a prefill worker would take."""

    model: str
    compat_hash: str = ""
    credits: Count
    uncomputed_tokens: Count = 0
    """Prompt tokens it has claimed and not computed."""
    claims: Count = 0
    """Claims of the model received on this stream when the offer was sent; claims still on their
    way count against the credits.
    """
    generation: Count = 0
    """The prefill worker's mode generation; 0: not said."""


class ClaimEnded(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A prefill worker has ended a claim."""

    claim: Number
    outcome: ClaimOutcome


ToQueue = EnqueueItem | CancelItem | CreditOffer | ClaimEnded


class ItemQueued(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """To a decode worker: the item is in the queue."""

    request: Number
    round: Count


class ItemRefused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Tells a decode worker that the item is not in the queue (any more). Prefill locally, or ask
    again.
    """

    request: Number
    round: Count
    reason: Reason


class ItemClaimed(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag=3):
    """Gives an item to a prefill worker."""

    claim: Number
    """Claim number of this router, never reused in its life."""
    decode: NodeId
    decode_epoch: Number
    item: PrefillItem
    generation: Count = 0
    """That of the offer it was given for. A worker returns a claim of an earlier generation."""


class ClaimCancelled(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """To a prefill worker: the item was cancelled; stop working on it. Answered by `ClaimEnded`."""

    claim: Number


FromQueue = ItemQueued | ItemRefused | ItemClaimed | ClaimCancelled


class QueueState(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """State of one model's prefill queue."""

    waiting: Count = 0
    """Items that no worker has claimed."""
    waiting_tokens: Count = 0
    """Their tokens, less what the best worker for each has cached."""
    claimed: Count = 0
    workers: Count = 0
    """Prefill workers connected."""
    uncomputed_tokens: Count = 0
    """Tokens claimed and not computed, over all workers."""
    credits: Count = 0
    """Items that would be taken at once."""


class QueueReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """State of the prefill queues that a router owns."""

    queues: dict[str, QueueState] = {}
    """Queue state by model name."""


# ---------------------------------------------------------------- from a worker to its successor


class KvFetch(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Asks the worker that has a sequence's KV to request blocks here and fill them."""

    item: PrefillItem
    epoch: Number
    """The life of that worker that is meant; claims are valid in that life only."""


class KvFetchReply(msgspec.Struct, frozen=True, array_like=True):
    """The worker will send the KV, unless `refused` says why not."""

    refused: Reason = ""
    """One word, as `pdserve_prefill_decisions_total` shows it."""


# ---------------------------------------------------------------- prefill worker and decode worker


class OpenAttempt(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A prefill worker holds a claim and asks for the blocks to fill."""

    request: Number
    round: Count
    owner: NodeId
    """The router that gave the claim. A claim of another router than the request was queued with
    last, or of another life of that router, is void: the fencing epoch.
    """
    owner_epoch: Number
    cached_tokens: Count = 0
    """Leading tokens that the prefill worker has cached."""
    model: str = ""
    compat_hash: str = ""
    claim: Number = 0
    """Claim number. A repeated call with the same claim is the same attempt; another claim is other
    work.
    """
    generation: Count = 0
    """That of the item. A decode worker of another generation refuses; 0: not said."""


class AttemptOpened(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The opened blocks, and all that is needed to compute their content."""

    attempt: Count
    ticket: TransferTicket
    request: GenerateRequest
    """The request; its deadline is what remains at the moment of sending."""


class HeldAttempt(msgspec.Struct, frozen=True, array_like=True):
    """An attempt of a decode worker that a prefill worker works on."""

    request: Number
    attempt: Count


class RenewLeases(msgspec.Struct, frozen=True, array_like=True):
    """A prefill worker still works on these attempts of the decode worker."""

    held: tuple[HeldAttempt, ...]
    progress: tuple[Count, ...] = ()
    """For each attempt a number that changes whenever work on it, or on work before it, advances.
    Empty from releases that do not send it: then only the age of an attempt counts.
    """


class LeasesRenewed(msgspec.Struct, frozen=True, array_like=True):
    """Attempts among them that are over for the decode worker; the prefill worker
    withdraws them."""

    over: tuple[HeldAttempt, ...] = ()


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """The first token of one choice."""

    token: int
    logprob: TokenLogprob | None = None


class Handoff(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a prefilled request needs besides its blocks to continue on another worker."""

    tokens: Count
    """Tokens in KV: the prompt, and the output of earlier attempts."""
    parts: Count
    """Number of parts delivered under the ticket."""
    first: tuple[FirstToken, ...]
    """One for each choice that has not ended before, in order."""
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: Count = 0
    """Tokens that the prefill worker did not have to compute."""
    started: FirstTokenStats
    """Statistics of its first token on the prefill worker."""
    checksums: tuple[tuple[int, int], ...] = ()
    """(index into the ticket's blocks, CRC-32 of the block's valid bytes at the source): a sample,
    or all."""
    opaque: Annotated[bytes, Meta(max_length=1 << 20)] = b""
    """From engines that move KV by themselves, such as TensorRT-LLM: a record of the engine, which
    the same engine at the decode worker reads. Then there are no parts. Empty: pdserve moves the
    KV."""


class NotifyHandoff(msgspec.Struct, frozen=True, array_like=True):
    """The attempt's KV is complete or on its way; the handoff carries the rest."""

    request: Number
    attempt: Count
    handoff: Handoff


class AttemptFailed(msgspec.Struct, frozen=True, array_like=True):
    """A prefill worker gives up an attempt. `kind` names a class of `pdserve.errors`."""

    request: Number
    attempt: Count
    kind: str
    message: Reason


class WithdrawAttempt(msgspec.Struct, frozen=True, array_like=True):
    """Tells a prefill worker to compute and send nothing more for this attempt."""

    request: Number
    attempt: Count
    reason: Reason = ""


class AttemptAck(msgspec.Struct, frozen=True, array_like=True):
    """Acknowledges a message. False: the attempt was not open any more, so the message had no
    effect.
    """

    current: bool = True


class SetDisagg(msgspec.Struct, frozen=True, array_like=True):
    """An operator sets how a decode worker decides, until it restarts."""

    disagg: Disagg


class DisaggSet(msgspec.Struct, frozen=True, array_like=True):
    before: Disagg


class TransportCall(msgspec.Struct, frozen=True, array_like=True):
    """A control call from one transport to its peer's transport."""

    epoch: Number
    """The receiver's life that is meant."""
    backend: str
    control: TransferControl


class TransportReply(msgspec.Struct, frozen=True, array_like=True):
    control: TransferControl
