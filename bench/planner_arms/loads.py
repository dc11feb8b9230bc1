"""The loads: made ones, whose rate and lengths are functions of time, and parts of public traces.

Rates of made loads are given in units of one worker: 1 is what each of eight aggregated workers
just carries (bench/disagg.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import cos, pi
from random import Random
from typing import TYPE_CHECKING, Final

from pdserve.sim.workloads.mooncake import MooncakeTrace
from pdserve.sim.workloads.table import TableTrace
from pdserve.sim.workloads.trace_request import TraceRequest
from pdserve.sim.workloads.transform import TraceTransform, transform_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pdserve.ids import Seconds

__all__ = ["KNEE", "LOADS", "STEADY", "Load", "Moment", "Part", "Split", "load_of", "requests"]

KNEE: Final = 2.0
"""Requests per second that one worker of `h100-70b-tp4` carries of the usual mix."""
_CHAT, _LONG, _OUTPUT = 300, 12_000, 200
_SHARED: Final = 10_000
"""Tokens of a long prompt that are cached while the hit rate is high."""
_GROUPS: Final = 8
_OWN: Final = 1 << 20
"""First content id of what no other prompt has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The load at one time."""

    rate: float
    """In units of one worker."""
    long: float = 0.2
    """Share of long prompts."""
    shared: bool = False
    """True if long prompts begin with one of a few common texts."""
    output: int = _OUTPUT
    """Mean tokens of a chat's answer; answers to long prompts have half as many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a public trace."""

    name: str
    """`conversation` of Mooncake, or `code` of Azure."""
    limit: int
    """Requests."""
    speed: float = 1.0
    jitter: Seconds = 0.0
    """Each arrival is delayed by up to so much: for times that are multiples of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A pool of prefill and decode workers whose size is fixed."""

    workers: int
    prefill: int
    """Prefill workers at the beginning, of arms that switch."""
    sequences: int
    """Most sequences of a worker: what decoding is short of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load."""

    about: str
    seconds: Seconds = 0.0
    """Of a made load."""
    at: Callable[[Seconds], Moment] = field(default=lambda at: Moment(rate=0.0))
    part: Part | None = None
    """None: the load is made."""
    step: Seconds = 0.0
    """When it rises or shifts at once; 0: it never does."""
    shifts: tuple[Seconds, ...] = ()
    """When its lengths change so much that other modes are needed."""
    initial: int = 1
    """Workers at the beginning, of arms that scale."""
    compressed: float = 1.0
    """Factor by which time is compressed; start-ups are divided by it too."""
    sizes: tuple[int, ...] = (2, 3, 4, 5)
    """Fixed sizes, of which the static arms are chosen."""
    split: Split | None = None
    """None: all workers are aggregated."""

    @property
    def statics(self) -> tuple[str, ...]:
        """Its static arms."""
        if self.split is None:
            return tuple(f"static {size}" for size in self.sizes)
        size = self.split.workers
        return (*(f"static {p}:{size - p}" for p in range(1, size)), f"static {size}")


def _step(at: Seconds) -> Moment:
    return Moment(rate=2.1 if _LEAD <= at < _LEAD + 360 else 0.7)


def _ramp(at: Seconds) -> Moment:
    up, down = at / 480, (720 - at) / 240
    return Moment(rate=0.7 + 1.8 * max(0.0, min(up, down)))


def _day(at: Seconds) -> Moment:
    return Moment(rate=1.5 - 1.1 * cos(2 * pi * at / 7200))


def _shift(at: Seconds) -> Moment:
    return Moment(rate=1.4, long=0.1 if at < _LEAD else 0.4)


def _collapse(at: Seconds) -> Moment:
    return Moment(rate=1.6, long=0.4, shared=at < _LEAD)


def _modes(at: Seconds) -> Moment:
    if _TO_LONG <= at < _TO_CHAT:
        return Moment(rate=1.8, long=1.0, output=100)
    return Moment(rate=1.7, long=0.03, output=2400)


_LEAD: Final[Seconds] = 480.0
"""When steps come: later than workers that are ordered at the beginning serve, even if a start-up
takes 300 s (p90 400 s). Else an arm would be measured by what it had before it could do anything.
"""
_TO_LONG: Final[Seconds] = 240.0
_TO_CHAT: Final[Seconds] = 600.0


_ALL_SIZES: Final = (2, 3, 4, 5, 6, 7, 8)
"""Up to as many workers as arms that scale may have: the traces need that many."""
LOADS: Final[dict[str, Load]] = {
    "step": Load(
        seconds=1260,
        at=_step,
        about="0.7, from 480 s to 840 s three times as much, then 0.7 again",
        step=_LEAD,
    ),
    "length shift": Load(
        seconds=960,
        at=_shift,
        about="1.4; a tenth of the prompts are long, from 480 s on four tenths",
        step=_LEAD,
        initial=2,
    ),
    "mode shift": Load(
        seconds=840,
        at=_modes,
        about="1.7 of chats with answers of 2,400 tokens, 3% of the prompts long; from 240 s to "
        "600 s 1.8 of long prompts with answers of 50 tokens; chats again. Six workers, prefill or "
        "decode, with 40 sequences each",
        shifts=(_TO_LONG, _TO_CHAT),
        split=Split(workers=6, prefill=1, sequences=40),
    ),
    "ramp": Load(seconds=960, at=_ramp, about="0.7 to 2.5 in 480 s, back in 240 s, then 240 s"),
    "hit-rate collapse": Load(
        seconds=960,
        at=_collapse,
        about="1.6, four tenths long; from 480 s on nothing of them is cached",
        step=_LEAD,
        initial=2,
        sizes=(2, 3, 4, 5, 6),
    ),
    "day": Load(
        seconds=7200,
        at=_day,
        about="0.4 to 2.6 and back, a day compressed to two hours; start-ups are compressed alike, "
        "the rules' own times are not",
        compressed=12.0,
    ),
    "Mooncake conversation": Load(
        about="its first 1,500 requests, jittered by up to 3 s: its times are multiples of 3 s",
        part=Part(name="conversation", limit=1500, jitter=3.0),
        initial=2,
        sizes=_ALL_SIZES,
    ),
    "Azure code": Load(
        about="its first 3,000 requests at three times its speed",
        part=Part(name="code", limit=3000, speed=3.0),
        sizes=_ALL_SIZES,
    ),
}


def _steady(rate: float) -> Load:
    def at(second: Seconds) -> Moment:
        return Moment(rate=rate * _STEADY_WORKERS)

    return Load(seconds=300, at=at, about=f"{rate:g} a worker", sizes=(_STEADY_WORKERS,))


_STEADY_WORKERS: Final = 4
STEADY: Final = {f"steady {rate:g}": _steady(rate) for rate in (0.7, 0.8, 0.9)}
"""Constant loads, which show how many requests a worker bears."""


def load_of(name: str) -> Load:
    """The load of this name."""
    return LOADS[name] if name in LOADS else STEADY[name]


def requests(load: Load, seed: int, files: Mapping[str, Path]) -> Iterator[TraceRequest]:
    """The requests of a load. `files`: those of the public traces by name."""
    if load.part is None:
        return _made(load, seed)
    return _traced(load.part, files[load.part.name], seed)


def _made(load: Load, seed: int) -> Iterator[TraceRequest]:
    """The requests of a made load. Lengths are gamma of shape 4, arrivals a Poisson process."""
    random, at, number = Random(f"load {seed}"), 0.0, 0
    most = max(load.at(float(second)).rate for second in range(int(load.seconds))) * KNEE
    while (at := at + random.expovariate(most)) < load.seconds:
        moment = load.at(at)
        if random.random() * most < moment.rate * KNEE:
            yield _request(random, number, at, moment)
            number += 1


def _request(random: Random, number: int, at: Seconds, moment: Moment) -> TraceRequest:
    long = random.random() < moment.long
    prompt = _about(random, _LONG if long else _CHAT, least=16)
    output = _about(random, moment.output // 2 if long else moment.output, least=2)
    group = random.randrange(_GROUPS)
    common = min(_SHARED, prompt - 1) if long and moment.shared else 0
    pieces = ((group, common), (_OWN + number, prompt - common)) if common else ()
    return TraceRequest(number, at, pieces or ((_OWN + number, prompt),), output)


def _about(random: Random, mean: int, least: int) -> int:
    return max(least, int(random.gammavariate(4, mean / 4)))


def _traced(part: Part, file: Path, seed: int) -> Iterator[TraceRequest]:
    trace = MooncakeTrace(file) if part.name == "conversation" else TableTrace(file)
    shape = TraceTransform(jitter=part.jitter, seed=seed, limit=part.limit, speed=part.speed)
    return transform_trace(trace, shape)
