"""Records what another worker needs to continue a request, and which workers are excluded.

Also counts the workers that may have died of the request. Plain records and decisions;
`dispatched_request` acts on them. Tokens are kept as workers sent them, including those that a stop
string or an incomplete character still holds back from the client.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from msgspec.structs import replace

from pdserve.errors import (
    Draining,
    EngineDied,
    EngineStalled,
    LinkError,
    NotReady,
    StepFailed,
    WorkerLost,
)
from pdserve.messages.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.errors import PdserveError
    from pdserve.ids import Epoch, NodeId, NodeLife, Seconds
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.worker_stream import MigrationHintReason

__all__ = [
    "Exclusions",
    "LifeStatus",
    "MigrationOutcome",
    "MigrationReason",
    "PoisonTracker",
    "ReceivedTokens",
    "WorkerDeath",
    "migration_reason",
    "prewarm_request",
]

MigrationReason = Literal[
    "worker_lost",
    "engine_died",
    "engine_stalled",
    "step_failed",
    "not_ready",
    "drain",
    "queue",
    "itl",
    "kv",
]
"""Why a request had to go on elsewhere. The first five: what it had there is lost."""
MigrationOutcome = Literal["completed", "stayed", "poison", "no_worker", "failed", "cancelled"]
"""Of one migration. `completed`: the next worker gave a token; `stayed`: nobody had room, and it
went on where it was."""

LifeStatus = Literal["here", "doubtful", "died", "gone"]
"""Of a worker's life, as this node knows it. `gone`: over, and not by dying."""

_KINDS: Final[tuple[tuple[type[PdserveError], MigrationReason], ...]] = (
    (EngineStalled, "engine_stalled"),
    (EngineDied, "engine_died"),
    (StepFailed, "step_failed"),
    (Draining, "drain"),
    (NotReady, "not_ready"),
    (WorkerLost, "worker_lost"),
    (LinkError, "worker_lost"),
)
_DEADLY: Final = ("engine_died", "engine_stalled", "step_failed")
_UNKNOWN: Final[Seconds] = 5.0
"""So long after a worker was lost it may be held for alive although it is dead."""
_TAIL: Final = 256
"""Tokens that are kept as Python's integers, which take nine times the room."""


def migration_reason(error: PdserveError) -> MigrationReason | None:
    """Why what ended with `error` can go on elsewhere; None: it would end there as well."""
    return next((reason for kind, reason in _KINDS if isinstance(error, kind)), None)


class ReceivedTokens:
    """All that has come of one request, by choice."""

    __slots__ = ("_packed", "ended", "scored", "tails")

    def __init__(self, request: GenerateRequest) -> None:
        self.tails: list[list[int]] = [[] for _ in range(request.n)]
        """The latest tokens; whoever adds to one calls `pack` when it is `full`."""
        self._packed = [array("I") for _ in range(request.n)]
        self.ended: set[int] = set(request.ended)
        self.scored: set[int] = set()
        """Choices whose logprobs of the prompt have come."""
        for choice, tokens in enumerate(request.output):
            self._packed[choice].extend(tokens)

    def take(self, choice: int, tokens: list[int]) -> None:
        """The same as callers in a hurry do by `tails`."""
        tail = self.tails[choice]
        tail += tokens
        if len(tail) >= _TAIL:
            self.pack(choice)

    def pack(self, choice: int) -> None:
        """Keep the tail in little room."""
        tail = self.tails[choice]
        self._packed[choice].extend(tail)
        tail.clear()

    def scored_once(self, delta: TokenDelta) -> TokenDelta:
        """Without logprobs of the prompt that an earlier worker has told."""
        if delta.choice in self.scored:
            return replace(delta, prompt_logprobs=None)
        self.scored.add(delta.choice)
        return delta

    def tokens(self, choice: int) -> list[int]:
        return self._packed[choice].tolist() + self.tails[choice]

    def count(self, choice: int) -> int:
        return len(self._packed[choice]) + len(self.tails[choice])

    @property
    def any(self) -> bool:
        """A token has come."""
        return any(self.tails) or any(self._packed)

    @property
    def live(self) -> list[int]:
        """Choices that have not ended."""
        return [choice for choice in range(len(self.tails)) if choice not in self.ended]

    @property
    def longest(self) -> int:
        """Tokens of the longest choice that goes on."""
        return max(map(self.count, self.live), default=0)

    @property
    def shortest(self) -> int:
        return min(map(self.count, self.live), default=0)

    def continuation(self, request: GenerateRequest) -> GenerateRequest:
        """`request` as another worker is to go on with it."""
        if not (self.any or self.ended):
            return request
        sampling = request.sampling
        if sampling.prompt_logprobs is not None and self.scored.issuperset(self.live):
            sampling = replace(sampling, prompt_logprobs=None)
        return replace(
            request,
            sampling=sampling,
            output=[self.tokens(choice) for choice in range(request.n)],
            ended=tuple(sorted(self.ended)),
        )


def prewarm_request(
    request: GenerateRequest, output: list[int], source: NodeLife | None, deadline: Seconds
) -> GenerateRequest:
    """What makes a worker have the KV of a choice that has come to `output`: a request for one
    token, which nobody wants. `source`: who has the KV."""
    node, epoch = ("", 0) if source is None else source
    return replace(
        request,
        sampling=SamplingParams(max_tokens=len(output) + 1, temperature=0.0, ignore_eos=True),
        n=1,
        output=[output] if output else [],
        ended=(),
        deadline=deadline,
        source=node,
        source_epoch=epoch,
    )


class Exclusions:
    """Workers that a request is not to be given to, by their lives."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until: dict[NodeLife, Seconds | None] = {}

    def add(self, life: NodeLife, until: Seconds | None) -> None:
        """`until` None: for as long as it lives."""
        self._until[life] = until

    def at(self, now: Seconds, epoch_of: Callable[[NodeId], Epoch | None]) -> tuple[NodeId, ...]:
        """By name, in order. One that has begun another life is no longer meant; one that is not
        in the cluster still is: a router may not have heard."""
        return tuple(
            node
            for (node, epoch), until in self._until.items()
            if epoch_of(node) in (None, epoch) and (until is None or until > now)
        )

    def next_end(self, now: Seconds) -> Seconds | None:
        """When the next one is over."""
        ends = [until for until in self._until.values() if until is not None and until > now]
        return min(ends, default=None)

    def relax(self, until: Seconds) -> None:
        """Those without an end get one."""
        for life, end in self._until.items():
            if end is None:
                self._until[life] = until

    def __bool__(self) -> bool:
        return bool(self._until)


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """Of a worker that had the request, or of its engine, as far as is known."""

    life: NodeLife
    reason: MigrationReason
    at: Seconds
    alone: bool
    """No other request was there that might have been the cause; see `poison_isolation`."""


class PoisonTracker:
    """Workers that ended while they had the request, since its last token.

    Whoever happens to be where another request kills the engine looks as guilty as that one. So
    those that one death more would condemn are `suspect` and tried apart from each other, and only
    what happens then condemns.
    """

    __slots__ = ("_all", "_limit")

    def __init__(self, limit: int) -> None:
        """So many are too many; 0: none are."""
        self._all: list[WorkerDeath] = []
        self._limit = limit

    def add(self, death: WorkerDeath) -> None:
        """Those that were only out of reach, or left, are told apart by and by."""
        if death.reason in _DEADLY or death.reason == "worker_lost":
            self._all.append(death)

    def clear(self) -> None:
        """A token: whatever it is that they died of, it was not simply this request."""
        self._all.clear()

    def condemn(self, standing: Callable[[NodeLife], LifeStatus]) -> list[NodeId]:
        """Those that died, or whose engine did, if they are too many; else nobody."""
        return self._too_many(self._of(standing, ("died",)))

    def may_condemn(self, standing: Callable[[NodeLife], LifeStatus]) -> bool:
        """The same, if those died of whom nobody knows yet."""
        return bool(self._too_many(self._of(standing, ("died", "doubtful"))))

    def suspect(self, now: Seconds, standing: Callable[[NodeLife], LifeStatus]) -> bool:
        """One more would be too many. Who was lost a moment ago may be dead, whatever is known."""
        if self._limit < 2 or len(self._all) < self._limit - 1:
            return False
        recent = [death for death in self._all if now - death.at < _UNKNOWN]
        sure = self._of(standing, ("died", "doubtful"))
        return len({id(death) for death in (*recent, *sure)}) >= self._limit - 1

    def _of(
        self, standing: Callable[[NodeLife], LifeStatus], kinds: tuple[str, ...]
    ) -> list[WorkerDeath]:
        return [d for d in self._all if d.reason in _DEADLY or standing(d.life) in kinds]

    def _too_many(self, deaths: list[WorkerDeath]) -> list[NodeId]:
        limit = self._limit
        if not limit or len(deaths) < limit or not (limit < 2 or any(d.alone for d in deaths)):
            return []
        return [death.life.node for death in deaths]


def outweighs(reason: MigrationHintReason, other: MigrationHintReason) -> bool:
    """Whether a worker that said `other` and now says `reason` has said something new."""
    return reason == "drain" != other
