"""A prompt that is prefilled elsewhere, as the decode side keeps its books. Pure: no blocks move.

    a submission of SubmitRemote        waits for room, then for a peer; has at most one attempt
    an attempt                          lacks blocks ─▶ has them ─▶ is open ─▶ is filled
                                          └───────────┴────────────┴─▶ given up

An attempt is *filled* once its handoff and all parts that the handoff counts are here, in whatever
order they came. Only then, and only if nothing is wrong with it, its blocks become a sequence's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.engine_core.kv_transfer.connector import AttemptKey
    from pdserve.ids import Bytes, NodeLife, Seconds
    from pdserve.messages.handoff import Handoff
    from pdserve.messages.request import GenerateRequest

__all__ = ["FillAttempt", "RemotePrefillState", "handoff_fault"]


@dataclass(slots=True, eq=False)
class FillAttempt:
    """One try of a peer's at filling a sequence's blocks."""

    key: AttemptKey
    peer: NodeLife
    until: Seconds
    """When it is given up unless it has blocks by then."""
    shared: list[int] = field(default_factory=list)
    """Leading blocks, from the prefix cache; held, and never written to."""
    fresh: list[int] = field(default_factory=list)
    """Those that the peer fills; empty as long as there are none for it."""
    opened: bool = False
    arrived: dict[int, Bytes] = field(default_factory=dict)
    """Size of each part that is here."""
    handoff: Handoff | None = None

    @property
    def filled(self) -> bool:
        """Everything is here."""
        handoff = self.handoff
        return handoff is not None and len(self.arrived) >= handoff.parts

    def stage(self) -> str:
        """To follow "while"."""
        who = f"attempt {self.key.attempt} by {self.peer}"
        if not self.fresh:
            return f"{who} waits for KV blocks"
        if not self.opened:
            return f"a path for {who} is set up"
        return f"{who} fills its blocks, {len(self.arrived)} parts have arrived"


@dataclass(slots=True, eq=False)
class RemotePrefillState:
    """What a submission has besides, as long as its prompt is to come from elsewhere."""

    admitted: bool = False
    attempt: FillAttempt | None = None

    def phase(self) -> str:
        """In a word for metrics."""
        return "remote_filling" if self.attempt and self.attempt.fresh else "remote_queued"

    def stage(self) -> str:
        """To follow "while"."""
        if not self.admitted:
            return "waiting for room for a prompt that is prefilled elsewhere"
        if self.attempt is None:
            return "waiting for a worker to prefill the prompt"
        return self.attempt.stage()


def handoff_fault(
    attempt: FillAttempt, request: GenerateRequest, tokens: int, vocab_size: int
) -> str:
    """What is wrong with the handoff of a request of so many tokens; empty: nothing. Of the bytes
    it knows nothing."""
    handoff, sampling = attempt.handoff, request.sampling
    assert handoff is not None
    if handoff.tokens != tokens:
        return f"it has {handoff.tokens} tokens in KV, not {tokens}"
    if len(handoff.first) != len(request.live):
        return f"it has {len(handoff.first)} first tokens for {len(request.live)} choices"
    if any(not 0 <= first.token < vocab_size for first in handoff.first):
        return f"a first token is outside the vocabulary of {vocab_size}"
    if sampling.logprobs is not None and any(first.logprob is None for first in handoff.first):
        return "a first token lacks its logprobs"
    prompt = handoff.prompt_logprobs
    if sampling.prompt_logprobs is not None and len(prompt or ()) != len(request.prompt) - 1:
        return f"it has logprobs of {len(prompt or ())} prompt tokens"
    if any(not 0 <= place < len(attempt.fresh) for place, _ in handoff.checksums):
        return "it has a checksum of a block that is not in the ticket"
    if not handoff.parts or any(part >= handoff.parts for part in attempt.arrived):
        return f"it counts {handoff.parts} parts, others have arrived"
    return ""
