"""What a storm came to: sums, gaps, tables. Pure; `storm` gathers, this only tells."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.chaos.storm import checker, schedule, testbed
from tests.chaos.storm.client_request import LONG_GAP

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.chaos.storm.checker import Verdict
    from tests.chaos.storm.client_request import ClientRequest
    from tests.chaos.storm.faults import Done

WEATHERED = (
    "Weathered: every request of a patient client that a frontend took was answered in full,\n"
    "unless its client hung up or its frontend was killed or away. Every answer is right."
)
SHOWN = 5
"""Requests whose stories a failing report tells."""
EARLY = 0.3
"""Seconds: the last chunk before a gap may have been on its way when the fault came."""
MEMORY = 20_000
"""Gaps kept of each kind of fault, the longest."""


GROUPS = ("patient, taken", "patient, not taken", "hurried, taken", "hurried, not taken")


def group_of(life: ClientRequest) -> str:
    """The group of a request: its kind, and whether it is known to have been accepted."""
    clients = "hurried" if life.hurried else "patient"
    return f"{clients}, {'taken' if life.taken else 'not taken'}"


@dataclass
class Outcome:
    """One request that should not have ended so."""

    life: ClientRequest
    verdict: Verdict


@dataclass(frozen=True)
class _Gap:
    """A long time between two chunks of one stream."""

    at: float
    length: float
    frontend: str
    workers: set[str]
    moved: bool

    def holds(self, done: Done) -> bool:
        """True if a fault happened within the request and may have caused its end: a fault of its
        frontend, of a worker that had it or, once it has migrated, of any worker. Faults of disk,
        network and routers count for all requests."""
        if not self.at - EARLY <= done.began <= self.at + self.length:
            return False
        name = done.fault.target
        if self.frontend in (name, done.fault.peer):
            return True
        if "front" in name:
            return False
        anybody = self.moved or not self.workers or "router" in name or name == "disk"
        return anybody or name in self.workers


@dataclass
class Storm:
    """Everything that is known of one."""

    seed: str
    engine: str
    streams: int
    seconds: float
    zero: float
    """The beginning on the monotonic clock."""
    lasted: float = 0.0
    """Seconds until the last request had ended."""
    outcomes: Counter[str] = field(default_factory=Counter)
    split: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests by (outcome, group); see `group_of`."""
    by_frontend: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests by (outcome, frontend)."""
    refusals: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    """Seconds from sending to the refusal of requests that were not accepted, by (code,
    frontend)."""
    wrong: list[Outcome] = field(default_factory=list)
    tokens: int = 0
    tokens_lost: int = 0
    tokens_repeated: int = 0
    migrated: int = 0
    """Requests that had more than one worker, by their usage."""
    most_open: int = 0
    not_asked: int = 0
    worst_gap: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    """Seconds from asking."""
    gaps: dict[str, list[float]] = field(default_factory=dict)
    """Gaps in seconds, by kind of fault."""
    _long: list[_Gap] = field(default_factory=list)
    done: list[Done] = field(default_factory=list)
    growth: dict[str, int] = field(default_factory=dict)
    """Descriptors, threads and tasks that the worst node has more of than at the beginning."""
    left: list[str] = field(default_factory=list)
    """What was not let go of after quiet."""
    missing: list[str] = field(default_factory=list)
    """What this machine could not do."""
    last_words: list[str] = field(default_factory=list)
    """Last log lines of the nodes; only after a failure."""

    # ------------------------------------------------------------------ gathering

    def take(self, life: ClientRequest, verdict: Verdict) -> None:
        """One request has ended."""
        self.outcomes[verdict.outcome] += 1
        self.split[verdict.outcome, group_of(life)] += 1
        self.by_frontend[verdict.outcome, life.frontend] += 1
        if life.error is not None and not life.taken:
            lasted = life.ended - life.asked
            self.refusals.setdefault((life.code, life.frontend), []).append(lasted)
        self.tokens += sum(len(choice.tokens) for choice in life.choices)
        self.tokens_lost += verdict.tokens_lost
        self.tokens_repeated += verdict.tokens_repeated
        self.migrated += life.migrations > 0
        if life.first:
            self.first_tokens.append(life.first - life.asked)
        if life.streamed:
            for at, length in life.gaps:
                self.worst_gap = max(self.worst_gap, length)
                if length >= LONG_GAP:
                    moved = life.migrations > 0
                    self._long.append(_Gap(at, length, life.frontend, life.workers, moved))
        if not verdict.allowed:
            self.wrong.append(Outcome(life, verdict))

    def settle_gaps(self) -> None:
        """Say of each long gap which kinds of faults came within it and may have to do with it."""
        times = [done for done in self.done if not done.skipped]
        for gap in self._long:
            kinds = {done.fault.kind for done in times if gap.holds(done)}
            for kind in kinds or {"none"}:
                self.gaps.setdefault(kind, []).append(gap.length)
        self._long.clear()
        for kind, lengths in self.gaps.items():
            self.gaps[kind] = sorted(lengths, reverse=True)[:MEMORY]

    # ------------------------------------------------------------------ verdict

    @property
    def problems(self) -> list[str]:
        """Why this storm was not weathered; empty: it was."""
        found = [f"{count} × {word}" for word, count in self.outcomes.items() if word in _BAD]
        found += [f"{done.line(self.zero)}" for done in self.done if done.problem]
        found += [why for clients in checker.COMPLETE if (why := self.too_few(clients))]
        return list(dict.fromkeys(found + self.left))

    def too_few(self, clients: str) -> str:
        """Why too small a share of these requests completed; empty: it did not."""
        return checker.too_few(*self.completed(clients), clients)

    def completed(self, clients: str) -> tuple[int, int]:
        """How many, and of how many that should have."""
        groups = [group for group in GROUPS if group.startswith(clients)]
        counts: Counter[str] = Counter()
        for (outcome, group), count in self.split.items():
            counts[outcome] += count if group in groups else 0
        excused = counts[checker.CANCELLED] + counts[checker.CUT]
        return counts[checker.COMPLETED], sum(counts.values()) - excused

    @property
    def injected(self) -> Counter[str]:
        """Faults that happened, by kind."""
        return Counter(done.fault.kind for done in self.done if not done.skipped)


_BAD = set(checker.FORBIDDEN)
_ENDED_WRONGLY = _BAD - {checker.REPEATED, checker.WRONG}
"""Whose answers are not all there."""


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest that so many are not above; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


# ---------------------------------------------------------------------- as a page


def markdown(storm: Storm, machine: Iterable[str]) -> str:
    """The result file."""
    faults = sum(storm.injected.values())
    requests = sum(storm.outcomes.values())
    lost = sum(storm.outcomes[word] for word in _ENDED_WRONGLY)
    missing = "".join(f"- left out here: {why}\n" for why in storm.missing)
    verdict = _bullets("Not weathered:", storm.problems) if storm.problems else WEATHERED
    return f"""# A storm over a cluster of real processes

{_about(storm)}

{"".join(f"- {fact}" + chr(10) for fact in machine)}{missing}
| faults | requests | tokens | requests lost | tokens lost | tokens repeated | worst gap |
|---:|---:|---:|---:|---:|---:|---:|
| {faults:,} | {requests:,} | {storm.tokens:,} | {lost} | {storm.tokens_lost} | \
{storm.tokens_repeated} | {storm.worst_gap:.1f} s |

{verdict}

## How requests ended

{_outcomes(storm)}

A request was *taken* if its answer had begun or its error names the worker that had it; of one
whose client hung up early that is not known. Requests that their clients cancelled, and those that
were lost with a killed frontend, do not count here:

{_shares(storm)}

{_growth(storm)}{storm.migrated:,} requests were continued by another worker. {storm.not_asked:,}
connections to frontends that were down did not come about, and are no requests. {storm.most_open}
requests were open at once at most. First tokens came after
{quantile(storm.first_tokens, 0.5):.2f} s (median),
{quantile(storm.first_tokens, 0.99):.2f} s (p99).

## By frontend

`hurried` gives each request {checker.Circumstances.hurry:g} s, the others more than any may last.

{_by_frontend(storm)}

Refused before they were taken, and after how long ({checker.EARLY:g} s is the most, unless the
frontend itself was away):

{_refusals(storm)}

## Faults, and the gaps they made

A gap is the time between two chunks of one stream, counted from half a second on: for each fault
within it that befell the stream's frontend, a worker that had it, or something that is everybody's.

{_gaps(storm)}
"""


def _about(storm: Storm) -> str:
    return (
        f"`engine={storm.engine}`, {storm.streams} clients at once for {storm.lasted:.0f} s, seed "
        f"`{storm.seed}`. Repeat with\n`python -m tests.chaos.storm --seconds {storm.seconds:.0f} "
        f"--seed {storm.seed} --streams {storm.streams} --engine {storm.engine}`.\n"
        "Two routers, two frontends (and one whose requests have a near deadline), three workers "
        "that take\nrequests and one that computes long prompts for two of them. Every answer is "
        "compared with that of\nan undisturbed run, token by token, with its usage and its ends.\n"
        f"{testbed.settings(storm.engine)}"
    )


def _outcomes(storm: Storm) -> str:
    """The table of outcomes. "not taken" is what the client knows: one that disconnects early
    never learns it."""
    head = ["| outcome | requests |" + "".join(f" {group} |" for group in GROUPS) + " |"]
    head.append("|---|---:|" + "---:|" * len(GROUPS) + "---|")
    rows = [_outcome(storm, word, "") for word in checker.ALLOWED]
    rows += [_outcome(storm, word, "must be 0") for word in checker.FORBIDDEN]
    return "\n".join([*head, *rows])


def _outcome(storm: Storm, word: str, note: str) -> str:
    cells = [storm.outcomes[word], *(storm.split[word, group] for group in GROUPS)]
    return f"| {word} | {' | '.join(f'{count:,}' for count in cells)} | {note} |"


def _growth(storm: Storm) -> str:
    if not storm.growth:
        return ""
    most = ", ".join(f"{count} {what}" for what, count in storm.growth.items())
    return f"Afterwards no node had more than at the beginning by more than {most}.\n\n"


def _shares(storm: Storm) -> str:
    lines = []
    for clients, least in checker.COMPLETE.items():
        completed, of = storm.completed(clients)
        share = f"{completed / of:.1%}" if of else "none were asked"
        lines.append(
            f"- {clients}: {completed:,} of {of:,} completed ({share}; at least {least:.0%} must)"
        )
    return "\n".join(lines)


def _by_frontend(storm: Storm) -> str:
    names = sorted({frontend for _, frontend in storm.by_frontend})
    words = [w for w in (*checker.ALLOWED, *checker.FORBIDDEN) if storm.outcomes[w]]
    head = ["| outcome |" + "".join(f" {name} |" for name in names), "|---|" + "---:|" * len(names)]
    rows = [
        f"| {word} |" + "".join(f" {storm.by_frontend[word, name]:,} |" for name in names)
        for word in words
    ]
    return "\n".join([*head, *rows])


def _refusals(storm: Storm) -> str:
    head = [
        "| code | frontend | refusals | median | p99 | latest |",
        "|---|---|---:|---:|---:|---:|",
    ]
    rows = [
        f"| {code} | {frontend} | {len(times):,} | "
        + " | ".join(f"{quantile(times, share):.2f} s" for share in (0.5, 0.99, 1.0))
        + " |"
        for (code, frontend), times in sorted(storm.refusals.items())
    ]
    return "\n".join([*head, *rows])


def _gaps(storm: Storm) -> str:
    skipped = Counter(done.fault.kind for done in storm.done if done.skipped)
    rows = [
        "| fault | injected | left out | gaps | p50 | p99 | worst | well again, median | worst |"
    ]
    rows.append("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for kind in [*(kind.name for kind in schedule.KINDS), "none"]:
        gaps = storm.gaps.get(kind, [])
        healed = [
            done.healed - done.ended
            for done in storm.done
            if done.fault.kind == kind and done.healed and done.fault.target != "disk"
        ]
        cells = [_seconds(quantile(gaps, share)) for share in (0.5, 0.99, 1.0)]
        cells += [_seconds(quantile(healed, share)) for share in (0.5, 1.0)]
        counts = f"{storm.injected[kind] or ''} | {skipped[kind] or ''} | {len(gaps) or ''}"
        rows.append(f"| {kind} | {counts} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _seconds(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _bullets(head: str, lines: Iterable[str]) -> str:
    return head + "\n\n" + "\n".join(f"- {line.splitlines()[0]}" for line in lines)


# ---------------------------------------------------------------------- otherwise


def as_json(storm: Storm) -> dict[str, Any]:
    """The report as JSON."""
    return {
        "seed": storm.seed,
        "engine": storm.engine,
        "streams": storm.streams,
        "seconds": storm.seconds,
        "lasted_seconds": storm.lasted,
        "faults": dict(storm.injected),
        "left_out": dict(Counter(d.fault.kind for d in storm.done if d.skipped)),
        "outcomes": dict(storm.outcomes),
        "outcomes_by_group": _nested(storm.split),
        "outcomes_by_frontend": _nested(storm.by_frontend),
        "refused_seconds": {
            f"{code} at {frontend}": {"count": len(t), "p99": quantile(t, 0.99), "max": max(t)}
            for (code, frontend), t in storm.refusals.items()
        },
        "tokens": storm.tokens,
        "tokens_lost": storm.tokens_lost,
        "tokens_repeated": storm.tokens_repeated,
        "migrated": storm.migrated,
        "most_open": storm.most_open,
        "worst_gap_seconds": storm.worst_gap,
        "gaps_seconds": {
            kind: {"count": len(g), "p50": quantile(g, 0.5), "p99": quantile(g, 0.99), "max": g[0]}
            for kind, g in storm.gaps.items()
        },
        "growth": storm.growth,
        "problems": storm.problems,
        "missing": storm.missing,
    }


def _nested(counts: Counter[tuple[str, str]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (outcome, of), count in counts.items():
        found.setdefault(of, {})[outcome] = count
    return found


def failure(storm: Storm) -> str:
    """All that helps to find out why: how to repeat it, what was done, whose life went wrong, what
    the nodes said."""
    shown: dict[str, int] = Counter()
    stories: list[str] = []
    for outcome in storm.wrong:
        shown[outcome.verdict.outcome] += 1
        if shown[outcome.verdict.outcome] <= SHOWN:
            stories.append(f"{outcome.verdict.outcome}: {outcome.verdict.why}")
            stories.append(outcome.life.story(storm.zero))
    why = Counter(f"{o.verdict.outcome}: {o.verdict.why[:110]}" for o in storm.wrong)
    return "\n".join(
        [
            f"seed {storm.seed}, engine {storm.engine}, {storm.streams} clients",
            *(f"  {problem}" for problem in storm.problems),
            "reasons:",
            *(f"  {count} × {reason}" for reason, count in why.most_common(30)),
            "the schedule so far:",
            *(f"  {done.line(storm.zero)}" for done in storm.done),
            *stories,
            *storm.last_words,
        ]
    )
