"""The loads: made ones, whose rate and lengths are functions of time, and two public traces.

Rates of made loads are given in units of one worker: 1 is what it just carries (bench/disagg.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from random import Random
from typing import TYPE_CHECKING, Final

from pdserve.sim.workloads.mooncake import MooncakeTrace
from pdserve.sim.workloads.table import TableTrace
from pdserve.sim.workloads.trace_request import TraceRequest
from pdserve.sim.workloads.transform import TraceTransform, transform_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pdserve.ids import Seconds

__all__ = ["KNEE", "LOADS", "Load", "Moment", "made", "traced"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One made load."""

    seconds: Seconds
    at: Callable[[Seconds], Moment]
    about: str
    step: Seconds = 0.0
    """When it rises or shifts at once; 0: it never does."""
    initial: int = 1
    """Workers at the beginning, of arms that scale."""
    compressed: float = 1.0
    """Factor by which time is compressed; start-ups are divided by it too."""
    sizes: tuple[int, ...] = (2, 3, 4, 5, 6)
    """Fixed sizes, of which the static arms are chosen."""


def _step(at: Seconds) -> Moment:
    return Moment(rate=2.1 if 120 <= at < 480 else 0.7)


def _ramp(at: Seconds) -> Moment:
    up, down = at / 480, (720 - at) / 240
    return Moment(rate=0.7 + 1.8 * max(0.0, min(up, down)))


def _day(at: Seconds) -> Moment:
    return Moment(rate=2.4 - 1.8 * cos(2 * pi * at / 7200))


def _shift(at: Seconds) -> Moment:
    return Moment(rate=1.4, long=0.1 if at < 240 else 0.4)


def _collapse(at: Seconds) -> Moment:
    return Moment(rate=1.6, long=0.4, shared=at < 300)


LOADS: Final[dict[str, Load]] = {
    "step": Load(
        seconds=900,
        at=_step,
        about="0.7, from 120 s to 480 s three times as much, then 0.7 again",
        step=120.0,
    ),
    "ramp": Load(seconds=960, at=_ramp, about="0.7 to 2.5 in 480 s, back in 240 s, then 240 s"),
    "length shift": Load(
        seconds=720,
        at=_shift,
        about="1.4; a tenth of the prompts are long, from 240 s on four tenths",
        step=240.0,
        initial=2,
    ),
    "hit-rate collapse": Load(
        seconds=900,
        at=_collapse,
        about="1.6, four tenths long; from 300 s on nothing of them is cached",
        step=300.0,
        initial=2,
    ),
    "day": Load(
        seconds=7200,
        at=_day,
        about="0.6 to 4.2 and back, a day compressed to two hours; start-ups are compressed alike",
        compressed=12.0,
        sizes=(2, 3, 4, 5, 6, 7),
    ),
}


def made(load: Load, seed: int) -> Iterator[TraceRequest]:
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
    output = _about(random, _OUTPUT // 2 if long else _OUTPUT, least=2)
    group = random.randrange(_GROUPS)
    common = min(_SHARED, prompt - 1) if long and moment.shared else 0
    pieces = ((group, common), (_OWN + number, prompt - common)) if common else ()
    return TraceRequest(number, at, pieces or ((_OWN + number, prompt),), output)


def _about(random: Random, mean: int, least: int) -> int:
    return max(least, int(random.gammavariate(4, mean / 4)))


def traced(name: str, path: Path, seed: int, limit: int = 0) -> Iterator[TraceRequest]:
    """A public trace: `conversation` of Mooncake, whose times are multiples of 3 s and are
    jittered, or `code` of Azure."""
    jitter = 3.0 if name == "conversation" else 0.0
    trace = MooncakeTrace(path) if name == "conversation" else TableTrace(path)
    return transform_trace(trace, TraceTransform(jitter=jitter, seed=seed, limit=limit))
