"""State of a prompt that another worker prefills, on the decode side. Pure: no blocks move.

    a submission of SubmitRemote   waits for room, then for a peer; has at most one attempt
    an attempt                     lacks blocks ─▶ has blocks ─▶ is open ─▶ is filled
                                     └───────────────┴────────────┴─▶ is aborted

An attempt is *filled* once its handoff and all parts that the handoff counts have arrived, in any
order. Its blocks become a sequence's only then, and only if the handoff has no fault.
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
    """One attempt of a peer to fill a sequence's blocks."""

    key: AttemptKey
    peer: NodeLife
    until: Seconds
    """Time at which the attempt is aborted if it still has no blocks."""
    shared: list[int] = field(default_factory=list)
    """Leading blocks, from the prefix cache; held, and never written to."""
    fresh: list[int] = field(default_factory=list)
    """Blocks that the peer fills; empty while the attempt lacks blocks."""
    opened: bool = False
    arrived: dict[int, Bytes] = field(default_factory=dict)
    """Bytes of each part that has arrived, by part number."""
    handoff: Handoff | None = None

    @property
    def filled(self) -> bool:
        """Return whether the handoff and all its parts have arrived."""
        handoff = self.handoff
        return handoff is not None and len(self.arrived) >= handoff.parts

    def stage(self) -> str:
        """What the attempt waits for, as text that follows "while"."""
        who = f"attempt {self.key.attempt} by {self.peer}"
        if not self.fresh:
            return f"{who} waits for KV blocks"
        if not self.opened:
            return f"a path for {who} is set up"
        return f"{who} fills its blocks, {len(self.arrived)} parts have arrived"


@dataclass(slots=True, eq=False)
class RemotePrefillState:
    """Additional state of a submission while its prompt is to be prefilled by another worker."""

    admitted: bool = False
    attempt: FillAttempt | None = None

    def phase(self) -> str:
        """The phase as one word, for metrics."""
        return "remote_filling" if self.attempt and self.attempt.fresh else "remote_queued"

    def stage(self) -> str:
        """What the submission waits for, as text that follows "while"."""
        if not self.admitted:
            return "waiting for room for a prompt that is prefilled elsewhere"
        if self.attempt is None:
            return "waiting for a worker to prefill the prompt"
        return self.attempt.stage()


def handoff_fault(
    attempt: FillAttempt, request: GenerateRequest, tokens: int, vocab_size: int
) -> str:
    """Why the handoff does not fit a request of `tokens` tokens; empty if it fits. The KV itself is
    not checked here."""
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
