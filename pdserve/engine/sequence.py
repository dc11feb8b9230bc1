"""One sequence on one engine: the tokens of a choice, how many have KV, and where that KV is.

The scheduler owns and changes it; an executor only reads. `num_computed` chases `num_tokens`:
that is the whole scheduling rule.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.ids import Seconds, SequenceKey
    from pdserve.messages.request import GenerateRequest, SamplingParams


class Status(enum.Enum):
    """Life of a sequence."""

    WAITING = "waiting"
    """Has no blocks; also what a preempted sequence returns to."""
    READY = "ready"
    """A peer has filled its blocks; it waits for a place among those that run."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable state of one choice of one submission."""

    handle: int
    choice: int
    request: GenerateRequest
    tokens: list[int]
    """Prompt, then output."""
    prompt_len: int
    arrival: Seconds
    status: Status = Status.WAITING
    num_computed: int = 0
    """Leading tokens whose KV is in `blocks`."""
    blocks: list[int] = field(default_factory=list)
    """Block ids in token order; the last may be partly filled. Read it anew in every step: a block
    that turns out to have a twin in the pool is replaced by it between steps."""
    hashes: list[bytes] = field(default_factory=list)
    """Block hashes of the full blocks known so far; may run behind `tokens`."""
    num_committed: int = 0
    """Leading blocks whose hash the pool already knows."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at first admission."""
    received_tokens: int = 0
    """Tokens whose KV a peer has computed: of the prompt, and of output that was given."""
    preemptions: int = 0
    first_step: Seconds | None = None
    first_token: Seconds | None = None
    work: Seconds = 0.0
    """Its share of the steps up to the first token: each step's time, by its part of the tokens."""
    order: tuple[int, int, int] = (0, 0, 0)
    """(-priority, arrival number, choice): smaller goes first and is preempted last."""
    root: bytes = b""
    """Parent hash of the first block."""
    max_len: int = 0
    """Tokens, prompt included, after which the choice ends with `length`."""
    min_len: int = 0
    """Tokens, prompt included, up to which no stop id counts."""
    stop_ids: frozenset[int] = frozenset()
    """Ids that end the choice, end-of-sequence ids included unless they are ignored."""
    pools: bool = False
    """It ends with its prompt, in a vector; no token is sampled."""
    commit_at: int = 0
    """`num_computed` at which the next block is full and gets its hash."""
    forks: list[Sequence] = field(default_factory=list)
    """Other choices that wait for this one, the stem, to compute the prompt."""
    copy_from: int | None = None
    """Block of which the one that holds the prompt's last token is to be a copy, as long as that
    copy is not yet part of a plan."""

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
        return self.tokens[self.prompt_len :]
