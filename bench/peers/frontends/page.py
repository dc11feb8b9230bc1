"""Writes the page of the comparison. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from bench.peers.frontends.load import ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from bench.peers.frontends.load import Probe, Row, Sample
    from bench.peers.frontends.profile import Profile

__all__ = ["Findings", "Ratio", "behind", "page", "ratios"]

_AIMS: Final = {
    ("one token, 16 connections", "requests"): 1.0,
    ("one token, 64 connections", "requests"): 1.0,
    ("one token, 2,000 words", "requests"): 1.5,
    ("streams of 64, 64 connections", "chunks"): 1.5,
    ("20/s, streams of 16", "p50"): 1.0,
    ("20/s, streams of 16", "p99"): 1.0,
    ("one after the other, streams of 16", "p50"): 1.0,
}
_WORDS: Final = {
    "requests": "requests/s",
    "chunks": "chunks/s",
    "p50": "first text, p50",
    "p99": "first text, p99",
    "front": "CPU of frontend and router",
}
_MORE_IS_BETTER: Final = ("requests", "chunks")


@dataclass
class Findings:
    """All measurements."""

    ours: str
    """The arm by which aims are judged: it is placed as the rivals are."""
    rivals: Sequence[str]
    """Names of the arms to which ratios are shown; each in the rows that it has."""
    samples: Mapping[tuple[str, str], Sequence[Sample]]
    """By row and arm, in order of rounds."""
    probes: Mapping[tuple[str, str], Probe]
    apart: str = ""
    """The arm of ours whose router is a process of its own; empty: not measured."""
    systems: Sequence[tuple[str, float, int, int, int]] = ()
    """By arm: name, seconds to the first answer, processes, PSS idle and after the load."""
    profiles: dict[str, Mapping[str, Profile]] = field(default_factory=dict)
    """By row, and by process."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as good ours is: above 1 is better, for rates and for times."""

    row: Row
    rival: str
    what: str
    rounds: Sequence[float]
    apart: Sequence[float] = ()
    """The same of the arm whose router is a process of its own."""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def aim(self) -> float | None:
        """The least wanted median; None: none is stated."""
        return 1.0 if self.what == "front" else _AIMS.get((self.row.name, self.what))


def ratios(findings: Findings) -> list[Ratio]:
    """All ratios, by row and rival."""
    return [
        Ratio(
            row,
            rival,
            what,
            _each(findings, findings.ours, row, rival, what),
            _each(findings, findings.apart, row, rival, what),
        )
        for row in ROWS
        for rival in findings.rivals
        if (row.name, rival) in findings.samples and (row.name, findings.ours) in findings.samples
        for what in row.compares
    ]


def _each(findings: Findings, ours: str, row: Row, rival: str, what: str) -> list[float]:
    """The ratio of each round; none if that arm of ours was not measured."""
    if (row.name, ours) not in findings.samples:
        return []
    pairs = zip(findings.samples[row.name, ours], findings.samples[row.name, rival], strict=True)
    values = [(getattr(a, what), getattr(b, what)) for a, b in pairs]
    if what in _MORE_IS_BETTER:
        return [a / max(b, 1e-9) for a, b in values]
    return [b / max(a, 1e-9) for a, b in values]


def behind(findings: Findings) -> list[Row]:
    """The rows in which a median ratio is below 1."""
    rows = (one.row for one in ratios(findings) if one.median < 1)
    return list(dict.fromkeys(rows))


def page(findings: Findings, head: Sequence[str]) -> str:
    """The whole page."""
    parts = [
        list(head),
        ["## In short", "", *_short(findings)],
        ["## Ratios by round", "", *_ratios(findings)],
        ["## All figures", "", *_table(findings)],
        ["## What was checked", "", *_checked(findings)],
        ["## Start-up and memory", "", *_systems(findings)],
        ["## Profiles of rows below 1.0", "", *_profiles(findings)],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _short(findings: Findings) -> Iterator[str]:
    found = ratios(findings)
    lost = [one for one in found if one.median < 1]
    yield (
        f"Ratios of {findings.ours} to others; above 1 pdserve is better, in rates as in times and "
        f"CPU. {len(found) - len(lost)} of {len(found)} medians are at least 1."
    )
    if findings.apart:
        yield (
            f"Its frontend and router are one process, as Dynamo's are. {findings.apart} has a "
            "process for each; its ratios follow in brackets."
        )
    if lost:
        yield ""
        yield "Below 1:"
        yield ""
    for one in lost:
        yield f"- {one.row.name}, to {one.rival}: {_WORDS[one.what]} {one.median:.2f}{_apart(one)}"


def _ratios(findings: Findings) -> Iterator[str]:
    found = ratios(findings)
    rounds = max((len(one.rounds) for one in found), default=0)
    numbers = " | ".join(map(str, range(1, rounds + 1)))
    apart = "median (router apart)" if findings.apart else "median"
    yield f"| load | to | compared | {apart} | lowest to highest | aim | {numbers} |"
    yield f"|---|---|---|---:|---|---|{'---:|' * rounds}"
    for one in found:
        each = " | ".join(f"{value:.2f}" for value in one.rounds)
        yield (
            f"| {one.row.name} | {one.rival} | {_WORDS[one.what]} | {one.median:.2f}{_apart(one)} "
            f"| {min(one.rounds):.2f} to {max(one.rounds):.2f} | {_met(one)} | {each} |"
        )


def _apart(one: Ratio) -> str:
    return f" ({statistics.median(one.apart):.2f})" if one.apart else ""


def _met(one: Ratio) -> str:
    if one.aim is None:
        return ""
    return f"{one.aim:g}, {'met' if one.median >= one.aim else 'missed'}"


def _table(findings: Findings) -> Iterator[str]:
    yield (
        "| load | arm | requests/s | lowest to highest | chunks/s | prompt tokens/s | first text "
        "p50 / p99 ms | CPU us/request: frontend + router | worker side | all | their core "
        "| chunks an answer | bad | others |"
    )
    yield f"|---|---|{'---:|' * 12}"
    for row in ROWS:
        arms = [arm for name, arm in findings.samples if name == row.name]
        for arm in arms:
            yield _one(row, arm, findings.samples[row.name, arm])


def _one(row: Row, arm: str, samples: Sequence[Sample]) -> str:
    def middle(name: str) -> float:
        return float(statistics.median(getattr(sample, name) for sample in samples))

    rates = [sample.requests for sample in samples]
    cells = [
        row.name,
        arm,
        f"{middle('requests'):,.0f}",
        f"{min(rates):,.0f} to {max(rates):,.0f}",
        f"{middle('chunks'):,.0f}" if row.tokens else "",
        f"{middle('prompt'):,.0f}" if middle("prompt") else "",
        f"{middle('p50'):.2f} / {middle('p99'):.2f}",
        *(f"{middle(name):,.0f}" for name in ("front", "workers", "all")),
        f"{middle('share'):.2f}",
        f"{middle('each'):.1f}" if row.tokens else "",
        str(sum(sample.bad for sample in samples)),
        f"{middle('foreign'):.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _checked(findings: Findings) -> Iterator[str]:
    samples = findings.samples.values()
    bad = sum(sample.bad for one in samples for sample in one)
    yield (
        "The generator checked every answer: status 200, the tokens that were asked for by "
        f"`usage`, a whole stream. {bad} were not right or were not sent in time; no rate, time "
        "or chunk counts them."
    )
    for (row, arm), probe in findings.probes.items():
        if probe.wrong:
            yield f"- {arm} does not serve *{row}* and is left out of it: {probe.wrong}"
    yield from _prompts(findings)


def _prompts(findings: Findings) -> Iterator[str]:
    """Both have to have tokenised the same prompt to as many tokens."""
    for row in ROWS:
        ours = findings.probes.get((row.name, findings.ours))
        for rival in findings.rivals:
            theirs = findings.probes.get((row.name, rival))
            if not ours or not theirs or ours.wrong or theirs.wrong:
                continue
            if ours.prompt_tokens != theirs.prompt_tokens:
                yield (
                    f"- *{row.name}*: the same prompt has {ours.prompt_tokens} tokens here, and "
                    f"{theirs.prompt_tokens} with {rival}"
                )


def _systems(findings: Findings) -> Iterator[str]:
    yield "| arm | start to first answer, s | processes | PSS idle, MiB | after the load, MiB |"
    yield "|---|---:|---:|---:|---:|"
    for name, started, processes, idle, after in findings.systems:
        yield f"| {name} | {started:.2f} | {processes} | {idle / 2**20:.0f} | {after / 2**20:.0f} |"


def _profiles(findings: Findings) -> Iterator[str]:
    below = behind(findings)
    if not below:
        yield "No row is below 1.0."
        return
    if not findings.profiles:
        yield "Not taken in this run: `--profile PY_SPY` takes them. The rows:"
        yield ""
        yield from (f"- {row.name}" for row in below)
        return
    yield (
        "Taken with py-spy while the row ran once more; `bench/peers/frontends/profile.py` says "
        "how to take one by hand. Shares of the process's samples by function, without what it "
        "calls. All stacks are in `build/profiles`."
    )
    for name, profiles in findings.profiles.items():
        yield ""
        yield f"*{name}*"
        yield ""
        for process, functions in profiles.items():
            words = ", ".join(f"{function} {share:.0%}" for function, share in functions)
            yield f"- {process}: {words or 'no sample'}"
