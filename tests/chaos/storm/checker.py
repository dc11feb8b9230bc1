"""What became of a request, in one word, and whether that may be. Pure.

Every request ends in exactly one of the allowed outcomes; whatever came of an answer, also of one
that did not end well, is the beginning of the only right one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.chaos.storm.life import Life
    from tests.chaos.storm.questions import Expected

COMPLETED = "completed"
CANCELLED = "cancelled by its client"
REJECTED = "rejected early"
DEADLINE = "deadline"
CUT = "connection lost with its frontend"
ALLOWED = (COMPLETED, CANCELLED, REJECTED, DEADLINE, CUT)

LOST = "tokens lost"
REPEATED = "tokens repeated"
WRONG = "wrong answer"
FAILED = "failed"
"""An accepted request ended with an error that is none of the above."""
POISONED = "poisoned"
NO_WORKER = "no worker"
HUNG = "hung"
BROKEN = "connection broken"
"""Though its frontend lives."""
FORBIDDEN = (LOST, REPEATED, WRONG, FAILED, POISONED, NO_WORKER, HUNG, BROKEN)

REJECTIONS = {"overloaded", "rate_limit_exceeded", "draining", "not_ready", "no_router"}


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


@dataclass
class Circumstances:
    """What the storm has done that excuses an end."""

    deaths: dict[str, list[float]] = field(default_factory=dict)
    """When each frontend was killed; the monotonic clock's."""
    away: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """From when to when each frontend was not itself, or was finding its cluster again."""
    patience: float = 90.0
    """Nothing lasts longer than this."""

    def died_under(self, life: Life) -> bool:
        """Its frontend was killed while it was being answered."""
        return any(
            life.asked - 1.0 <= death <= life.ended + 1.0
            for death in self.deaths.get(life.frontend, ())
        )

    def was_away(self, life: Life) -> bool:
        """Its frontend did not know its cluster when it was asked."""
        return any(
            life.asked <= until and life.ended >= since
            for since, until in self.away.get(life.frontend, ())
        )


def judge(life: Life, expected: Expected, circumstances: Circumstances) -> Verdict:
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


def _beginnings(life: Life, expected: Expected) -> Verdict | None:
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


def _completed(life: Life, expected: Expected) -> Verdict:
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


def _error(life: Life, circumstances: Circumstances) -> Verdict:
    message = (life.error or {}).get("message")
    why = f"{life.status} {life.code}: {message}"
    begun = bool(life.chunks) or life.status == 200
    if life.code == "poisoned_request":
        return Verdict(POISONED, why)
    if life.code == "deadline_exceeded":
        return Verdict(DEADLINE) if message else Verdict(FAILED, f"no reason: {why}")
    no_worker = life.code in ("no_worker", "model_not_found")
    if no_worker and (begun or not circumstances.was_away(life)):
        return Verdict(NO_WORKER, why)
    if (no_worker or life.code in REJECTIONS) and not begun:
        if "retry-after" not in life.headers:
            return Verdict(FAILED, f"no Retry-After: {why}")
        return Verdict(REJECTED)
    return Verdict(FAILED, why)


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
"""Gauges that are 0 in every node when nobody asks for anything."""


def held(page: str) -> dict[str, float]:
    """Of those the ones that are not, on one page of `/metrics`."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name.partition("{")[0] in HELD and float(value):
            found[name] = float(value)
    return found


def grown(now: Mapping[str, int], before: Mapping[str, int], slack: int, of: str) -> list[str]:
    """Counts that are larger than at the beginning by more than `slack`."""
    return [
        f"{name} has {count} {of}, {before[name]} at the beginning"
        for name, count in now.items()
        if name in before and count > before[name] + slack
    ]
