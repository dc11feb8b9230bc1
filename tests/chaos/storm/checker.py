"""What became of a request, in a few words, and whether that may be. Pure.

Every request ends in exactly one of the allowed outcomes; whatever came of an answer, also of one
that did not end well, is the beginning of the only right one.

A patient request that was taken completes. Only its client, or a frontend that was killed or away,
may end it otherwise. One that was not taken may be refused: early, and for a cause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.chaos.storm.client_request import ClientRequest
    from tests.chaos.storm.storm_requests import Expected

COMPLETED = "completed"
CANCELLED = "cancelled by its client"
REJECTED = "rejected early"
DEADLINE = "deadline"
"""A request with a near deadline reached it."""
CUT = "connection lost with its frontend"
AWAY = "given up by a frontend that was away"
ALLOWED = (COMPLETED, CANCELLED, REJECTED, DEADLINE, CUT, AWAY)

LOST = "tokens lost"
REPEATED = "tokens repeated"
WRONG = "wrong answer"
FAILED = "failed"
"""The request ended with an error of no other kind."""
GIVEN_UP = "taken, then refused"
REFUSED_LATE = "refused late"
UNCAUSED = "refused without a cause"
OUT_OF_TIME = "out of time"
"""A patient request ended by a deadline, or a hurried one by a deadline that was not its own."""
POISONED = "poisoned"
NO_WORKER = "no worker"
HUNG = "hung"
BROKEN = "connection broken"
"""Though its frontend lives."""
FORBIDDEN = (
    *(LOST, REPEATED, WRONG, FAILED, GIVEN_UP, REFUSED_LATE, UNCAUSED, OUT_OF_TIME),
    *(POISONED, NO_WORKER, HUNG, BROKEN),
)

LEAVES = {"draining", "not_ready"}
NOBODY = {"no_worker", "model_not_found"}
REFUSALS = LEAVES | NOBODY | {"overloaded", "no_router"}
"""Codes that may end a request which was not taken; no client of a storm has a rate limit."""
EARLY = 15.0
"""Seconds until a refusal: 5 for a router to come, 5 each for two workers that do not answer."""
CLOCK = 0.5
"""Seconds by which a frontend's deadline may differ from what its client measures."""


@dataclass(frozen=True)
class Verdict:
    """On one life."""

    outcome: str
    why: str = ""
    tokens_lost: int = 0
    tokens_repeated: int = 0

    @property
    def allowed(self) -> bool:
        return self.outcome in ALLOWED


@dataclass(frozen=True)
class Absence:
    """A time in which a node was not itself, or was finding its cluster again."""

    since: float
    until: float
    leaving: bool = False
    """True if the node was told to leave: it takes nothing new, and must answer what it has
    accepted."""


@dataclass
class Circumstances:
    """What the storm has done that excuses an end. Times are the monotonic clock's."""

    deaths: dict[str, list[float]] = field(default_factory=dict)
    """Times at which each frontend was killed."""
    away: dict[str, list[Absence]] = field(default_factory=dict)
    """Absences of every node."""
    parts: dict[str, str] = field(default_factory=dict)
    """Router, worker, prefill or frontend, by node."""
    patience: float = 85.0
    """Seconds: nothing lasts longer than this."""
    hurry: float = 3.0
    """Seconds that a hurried request has; a patient one has more than `patience`."""
    late: float = 10.0
    """Seconds beyond that: a busy machine."""

    def died_under(self, life: ClientRequest) -> bool:
        """Its frontend was killed while it was being answered."""
        return any(
            life.asked - 1.0 <= death <= life.ended + 1.0
            for death in self.deaths.get(life.frontend, ())
        )

    def was_away(self, life: ClientRequest, node: str = "") -> bool:
        """A node, its frontend if none is named, was away during this life."""
        return any(_meet(life, absence) for absence in self.away.get(node or life.frontend, ()))

    def was_lame(self, life: ClientRequest) -> bool:
        """Its frontend was away, and not because it was asked to go."""
        absences = self.away.get(life.frontend, ())
        return any(_meet(life, absence) and not absence.leaving for absence in absences)

    def somebody_away(self, life: ClientRequest, part: str) -> bool:
        """True if a node of this role was away."""
        return any(of == part and self.was_away(life, node) for node, of in self.parts.items())


def _meet(life: ClientRequest, absence: Absence) -> bool:
    return life.asked <= absence.until and life.ended >= absence.since


def judge(life: ClientRequest, expected: Expected, circumstances: Circumstances) -> Verdict:
    """The one outcome."""
    if life.ended - life.asked >= circumstances.patience:
        return Verdict(HUNG, f"for {life.ended - life.asked:.0f} s")
    if (wrong := _beginnings(life, expected)) is not None:
        return wrong
    if life.done:
        return _completed(life, expected)
    if life.error is not None:
        return _error(life, circumstances)
    if life.hung_up:
        return Verdict(CANCELLED)
    if circumstances.died_under(life):
        return Verdict(CUT)
    return Verdict(BROKEN, life.broken or "the stream ended without its end")


def _beginnings(life: ClientRequest, expected: Expected) -> Verdict | None:
    """None if all that came is the beginning of what had to come."""
    for index, choice in enumerate(life.choices):
        tokens, right = choice.tokens, list(expected.tokens[index])
        if tokens != right[: len(tokens)]:
            return differs(tokens, right, f"choice {index}")
        if not expected.texts[index].startswith(choice.text):
            why = f"choice {index} has the text {choice.text!r}, not {expected.texts[index]!r}"
            return Verdict(WRONG, why)
        if choice.ends > 1:
            return Verdict(REPEATED, f"choice {index} ended {choice.ends} times")
    return None


def differs(tokens: Sequence[int], right: Sequence[int], where: str) -> Verdict:
    """Why tokens are not the beginning of the right ones: some are missing before where it goes on
    right, or come again, or neither."""
    at = next(
        (i for i, (a, b) in enumerate(zip(tokens, right, strict=False)) if a != b), len(right)
    )
    rest, probe = list(right), list(tokens[at : at + 4])
    why = f"{where} from token {at} of {len(right)} on"
    for missing in range(1, len(rest) - at):
        if rest[at + missing : at + missing + len(probe)] == probe:
            return Verdict(LOST, f"{why}: {missing} missing", tokens_lost=missing)
    for again in range(1, at + 1):
        if rest[at - again : at - again + len(probe)] == probe:
            return Verdict(REPEATED, f"{why}: {again} come again", tokens_repeated=again)
    return Verdict(WRONG, f"{why}: {list(tokens[at : at + 8])}, not {rest[at : at + 8]}")


def _completed(life: ClientRequest, expected: Expected) -> Verdict:
    for index, choice in enumerate(life.choices):
        missing = len(expected.tokens[index]) - len(choice.tokens)
        if missing:
            return Verdict(LOST, f"choice {index} lacks {missing}", tokens_lost=missing)
        if choice.text != expected.texts[index]:
            return Verdict(LOST, f"text of choice {index} ends early: {choice.text[-40:]!r}")
        if (choice.finish, choice.stop) != expected.ends[index]:
            why = f"choice {index} ended by {(choice.finish, choice.stop)}"
            return Verdict(WRONG, f"{why}, not {expected.ends[index]}")
        if choice.logprobs != expected.logprobs[index]:
            why = f"choice {index} has {choice.logprobs} logprobs, not {expected.logprobs[index]}"
            return Verdict(WRONG, why)
    usage = (life.usage.get("prompt_tokens"), life.usage.get("completion_tokens"))
    if usage != expected.usage:
        return Verdict(WRONG, f"usage says {usage}, not {expected.usage}")
    if tuple(life.prompt) != expected.prompt:
        return Verdict(WRONG, "the prompt's tokens are others")
    return Verdict(COMPLETED)


def _error(life: ClientRequest, circumstances: Circumstances) -> Verdict:
    message = (life.error or {}).get("message")
    why = f"{life.status} {life.code}: {message}"
    if not message:
        return Verdict(FAILED, f"no reason: {why}")
    if life.code == "poisoned_request":
        return Verdict(POISONED, why)
    if life.code == "deadline_exceeded":
        return _deadline(life, circumstances, why)
    if life.code not in REFUSALS:
        return Verdict(FAILED, why)
    if life.taken:
        return _given_up(life, circumstances, why)
    return _refusal(life, circumstances, why)


def _deadline(life: ClientRequest, circumstances: Circumstances, why: str) -> Verdict:
    """A hurried request has one; the storm gives up a patient one before its own has passed."""
    lasted = life.ended - life.asked
    why = f"after {lasted:.1f} s: {why}"
    if not life.hurried:
        return Verdict(OUT_OF_TIME, why)
    own = circumstances.hurry
    in_time = own - CLOCK <= lasted <= own + circumstances.late
    return Verdict(DEADLINE) if in_time else Verdict(OUT_OF_TIME, why)


def _given_up(life: ClientRequest, circumstances: Circumstances, why: str) -> Verdict:
    if circumstances.was_lame(life):
        return Verdict(AWAY)
    return Verdict(NO_WORKER if life.code in NOBODY else GIVEN_UP, why)


def _refusal(life: ClientRequest, circumstances: Circumstances, why: str) -> Verdict:
    if "retry-after" not in life.headers:
        return Verdict(FAILED, f"no Retry-After: {why}")
    if not _has_cause(life, circumstances):
        return Verdict(NO_WORKER if life.code in NOBODY else UNCAUSED, why)
    lasted = life.ended - life.asked
    if lasted > EARLY and not circumstances.was_away(life):
        return Verdict(REFUSED_LATE, f"after {lasted:.1f} s: {why}")
    return Verdict(REJECTED)


def _has_cause(life: ClientRequest, circumstances: Circumstances) -> bool:
    """True if a refusal before acceptance has a cause. Its frontend was away or leaving; for a lack
    of routers, a router was away; for a lack of room, a worker was away, or there was no time to
    wait for it."""
    if circumstances.was_away(life):
        return True
    if life.code == "no_router":
        return circumstances.somebody_away(life, "router")
    if life.code == "overloaded":
        return life.hurried or circumstances.somebody_away(life, "worker")
    return False


# ---------------------------------------------------------------------- of all together

COMPLETE = {"patient": 0.8, "hurried": 0.05}
"""The least share of requests that must complete, of those that were neither cancelled by their
clients nor cut off with their frontend. Hurried ones: few answers are shorter than their time."""


def too_few(completed: int, of: int, clients: str) -> str:
    """Why the share is too small, in words; empty: it is not."""
    least = COMPLETE[clients]
    if completed >= least * of:
        return ""
    return f"{completed:,} of {of:,} {clients} requests completed, less than {least:.0%}"


# ---------------------------------------------------------------------- after quiet

HELD = (
    "pdserve_kv_blocks_used",
    "pdserve_kv_blocks_quarantined",
    "pdserve_num_requests_running",
    "pdserve_num_requests_waiting",
    "pdserve_handoffs",
    "pdserve_http_requests_in_flight",
    "pdserve_router_bookings",
    "pdserve_router_held",
    "pdserve_prefill_queue_items",
    "pdserve_prefill_queue_claims",
    "pdserve_node_suspects",
    "pdserve_node_unreachable",
)
"""Gauges that are 0 in every node while no request runs."""


def held(page: str) -> dict[str, float]:
    """These gauges that are not 0 on a page of `/metrics`."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in HELD and float(value):
            found[name] = float(value)
    return found


def most_grown(now: Mapping[str, int], before: Mapping[str, int]) -> int:
    """The growth of the node that has grown most; 0: none has."""
    return max([0, *(count - before[name] for name, count in now.items() if name in before)])


def grown(now: Mapping[str, int], before: Mapping[str, int], slack: int, of: str) -> list[str]:
    """Counts that are larger than at the beginning by more than `slack`."""
    return [
        f"{name} has {count} {of}, {before[name]} at the beginning"
        for name, count in now.items()
        if name in before and count > before[name] + slack
    ]
