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
    from collections.abc import Callable, Iterable

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
"""Why a request moves to another worker. With the first five, the first worker has lost it."""
MigrationOutcome = Literal["completed", "stayed", "poison", "no_worker", "failed", "cancelled"]
"""How one migration ended. `completed`: the next worker sent a token. `stayed`: no worker had room,
and the request stayed at its worker."""

LifeStatus = Literal["here", "doubtful", "died", "gone"]
"""Status of a worker's life, as this node knows it. `gone`: ended, but did not die."""

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
"""Seconds after its loss during which a dead worker may still be considered alive."""
_TAIL: Final = 256
"""Number of tokens kept as Python integers, which take nine times the memory of packed ones."""


def migration_reason(error: PdserveError) -> MigrationReason | None:
    """The reason for which a request that ended with `error` may continue on another worker; None
    if it would fail there too."""
    return next((reason for kind, reason in _KINDS if isinstance(error, kind)), None)


class ReceivedTokens:
    """All tokens received for one request, by choice."""

    __slots__ = ("_packed", "ended", "scored", "tails")

    def __init__(self, request: GenerateRequest) -> None:
        self.tails: list[list[int]] = [[] for _ in range(request.n)]
        """The newest tokens by choice. Callers that append themselves must call `pack` when a list
        is full."""
        self._packed = [array("I") for _ in range(request.n)]
        self.ended: set[int] = set(request.ended)
        self.scored: set[int] = set()
        """Choices whose prompt logprobs have come."""
        for choice, tokens in enumerate(request.output):
            self._packed[choice].extend(tokens)

    def take(self, choice: int, tokens: list[int]) -> None:
        """Appends tokens of a choice. Hot paths append to `tails` instead."""
        tail = self.tails[choice]
        tail += tokens
        if len(tail) >= _TAIL:
            self.pack(choice)

    def pack(self, choice: int) -> None:
        """Packs the newest tokens of a choice into less memory."""
        tail = self.tails[choice]
        self._packed[choice].extend(tail)
        tail.clear()

    def scored_once(self, delta: TokenDelta) -> TokenDelta:
        """The delta without prompt logprobs if an earlier worker has sent them."""
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
        """True once a token has come."""
        return any(self.tails) or any(self._packed)

    @property
    def live(self) -> list[int]:
        """Choices that have not ended."""
        return [choice for choice in range(len(self.tails)) if choice not in self.ended]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest choice that has not ended."""
        return max(map(self.count, self.live), default=0)

    @property
    def shortest(self) -> int:
        return min(map(self.count, self.live), default=0)

    def continuation(self, request: GenerateRequest) -> GenerateRequest:
        """The request as the next worker continues it."""
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
    """A request that makes a worker hold the KV of a choice with these output tokens: it asks for
    one more token, which is discarded. `source`: the worker that has the KV."""
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
    """Workers, by node life, that must not get the request."""

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until: dict[NodeLife, Seconds | None] = {}

    def add(self, life: NodeLife, until: Seconds | None) -> None:
        """Excludes a worker until a time; None: as long as this life lasts."""
        self._until[life] = until

    def remove(self, lives: Iterable[NodeLife]) -> None:
        """Excludes these workers no longer."""
        for life in lives:
            self._until.pop(life, None)

    def at(self, now: Seconds, epoch_of: Callable[[NodeId], Epoch | None]) -> tuple[NodeId, ...]:
        """Names of excluded workers, in order. A worker that has begun a new life is no longer
        excluded. One that is not a member still is, because a router may not know that it is
        gone."""
        return tuple(
            node
            for (node, epoch), until in self._until.items()
            if epoch_of(node) in (None, epoch) and (until is None or until > now)
        )

    def next_end(self, now: Seconds) -> Seconds | None:
        """The next time at which an exclusion ends."""
        ends = [until for until in self._until.values() if until is not None and until > now]
        return min(ends, default=None)

    def relax(self, until: Seconds) -> None:
        """Limits exclusions without an end to this time."""
        for life, end in self._until.items():
            if end is None:
                self._until[life] = until

    def __bool__(self) -> bool:
        return bool(self._until)


@dataclass(frozen=True, slots=True)
class WorkerDeath:
    """The loss of a worker that had the request, or of its engine."""

    life: NodeLife
    reason: MigrationReason
    at: Seconds
    alone: bool
    """True if the request was tried alone there, so no other can be the cause; see
    `poison_isolation`."""


class PoisonTracker:
    """Workers that were lost while they had the request, since its last token.

    A request that happens to be at a worker when another one kills the engine looks equally guilty.
    So a request that one more death would make poison is `suspect` and is tried apart from other
    suspects, and only such a trial decides.
    """

    __slots__ = ("_all", "_limit")

    def __init__(self, limit: int) -> None:
        """`limit`: deaths that make a request poison; 0: never."""
        self._all: list[WorkerDeath] = []
        self._limit = limit

    def add(self, death: WorkerDeath) -> None:
        """Adds a loss. Membership tells later if the lost worker died or was only
        unreachable."""
        if death.reason in _DEADLY or death.reason == "worker_lost":
            self._all.append(death)

    def clear(self) -> None:
        """Clears all losses after a token: the request alone cannot have caused them."""
        self._all.clear()

    def condemn(self, standing: Callable[[NodeLife], LifeStatus]) -> list[NodeId]:
        """Workers that died of the request, if they are too many; else an empty list."""
        return self._too_many(self._of(standing, ("died",)))

    def may_condemn(self, standing: Callable[[NodeLife], LifeStatus]) -> bool:
        """True if the dead would be too many once lost workers of unknown status count as dead."""
        return bool(self._too_many(self._of(standing, ("died", "doubtful"))))

    def suspect(self, now: Seconds, standing: Callable[[NodeLife], LifeStatus]) -> bool:
        """True if one more death would be too many. Workers lost a moment ago count as dead,
        whatever is known of them."""
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
    """True if `reason` adds something to `other`, an earlier reason of the same worker: only a
    drain does."""
    return reason == "drain" != other
