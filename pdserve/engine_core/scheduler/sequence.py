"""Defines a sequence: one choice's tokens, how many of them have KV, and in which blocks.

The scheduler owns and changes it; an executor only reads it. In every step the scheduler lets
`num_computed` catch up with `num_tokens`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from pdserve.messages.request import MAX_WORKER_PHASES, WorkerPhase

if TYPE_CHECKING:
    from pdserve.engine_core.tiers.onboarder import BlockFetch
    from pdserve.ids import Seconds, SequenceKey
    from pdserve.messages.request import GenerateRequest, SamplingParams
    from pdserve.messages.tiers import CachedSource
    from pdserve.token_ids import TokenIds


_OWN: Final = 8
"""A block of a request's own is worth the room of so many borrowed ones."""


class SequenceStatus(enum.Enum):
    """State of a sequence in the scheduler."""

    WAITING = "waiting"
    """The sequence is in the queue, without blocks; a preempted sequence returns to this state."""
    ONBOARDING = "onboarding"
    """It left the queue for a moment: leading blocks of it come from a lower tier or from another
    worker. It holds none of them."""
    READY = "ready"
    """A peer has filled its blocks; it waits for a place in the running batch."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one choice (`n`) of one submission."""

    handle: int
    choice: int
    request: GenerateRequest
    tokens: TokenIds
    """Prompt tokens, then output tokens: an array of its own."""
    prompt_len: int
    arrival: Seconds
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed: int = 0
    """Leading tokens whose KV is in `blocks`."""
    blocks: list[int] = field(default_factory=list)
    """Block ids in token order; the last may be partly filled. Read it anew in every step: a block
    whose content the pool has already is replaced between steps."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the leading full blocks, as far as they have been computed."""
    num_committed: int = 0
    """Number of leading blocks that are committed to the prefix cache."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    received_tokens: int = 0
    """Number of tokens whose KV a peer has computed (prompt, and output given with the request)."""
    preemptions: int = 0
    first_step: Seconds | None = None
    first_token: Seconds | None = None
    work: Seconds = 0.0
    """Compute seconds up to the first token: of each step, this sequence's share by tokens."""
    order: tuple[int, int, int] = (0, 0, 0)
    """(-priority, arrival number, choice): the smallest runs first and is preempted last."""
    root: bytes = b""
    """Parent hash of the first block."""
    max_len: int = 0
    """Number of tokens, with the prompt, at which the choice ends with reason `length`."""
    min_len: int = 0
    """Number of tokens, with the prompt, up to which stop ids are ignored."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the choice, end-of-sequence ids included unless they are ignored."""
    pools: bool = False
    """Whether this is an embedding request: it ends with its prompt and samples no token."""
    commit_at: int = 0
    """`num_computed` at which the next block is full and gets its hash."""
    forks: list[Sequence] = field(default_factory=list)
    """Other choices that wait until this one, the stem, has computed the prompt."""
    copy_from: int | None = None
    """Source of the copy-on-write copy for the block with the prompt's last token; None once the
    copy is planned."""
    phases: list[WorkerPhase] = field(default_factory=list)
    """Phases that are not reported yet, of a request that asks for them."""
    preempted_at: Seconds | None = None
    """When it lost its blocks, until it has blocks again."""
    fetched: bool = False
    """Whether it was considered for a fetch since it last lost its blocks."""
    early: BlockFetch | None = None
    """The fetch whose blocks it uses before their last layers have come."""
    sources: tuple[CachedSource, ...] = ()
    """Where leading tokens came from that were not on the device."""
    borrowed: range = range(0)
    """Leading blocks that were fetched, and of which enough other workers have a copy."""

    def note(self, name: str, start: Seconds, end: Seconds, tokens: int = 0) -> None:
        """Records a phase to be reported; later ones than can be reported are left out."""
        if len(self.phases) < MAX_WORKER_PHASES:
            since = max(0.0, start - self.arrival)
            self.phases.append(WorkerPhase(name, since, max(since, end - self.arrival), tokens))

    def take_phases(self) -> tuple[WorkerPhase, ...]:
        """The phases since the last call."""
        phases, self.phases = tuple(self.phases), []
        return phases

    @property
    def kept_blocks(self) -> int:
        """Leading blocks that are worth keeping after the request: all, unless nearly all of the
        others are borrowed. A conversation's own part is found only where the part before it is."""
        own = self.num_committed - self.borrowed.stop
        if not self.borrowed or own * _OWN > len(self.borrowed):
            return len(self.blocks)
        return self.borrowed.start

    @property
    def key(self) -> SequenceKey:
        return (self.handle, self.choice)

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output(self) -> list[int]:
        """The output tokens (a copy)."""
        return self.tokens[self.prompt_len :].tolist()
