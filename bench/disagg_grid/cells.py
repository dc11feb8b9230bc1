"""The grid of clusters and loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count, product
from random import Random
from typing import TYPE_CHECKING, Final

from pdserve.sim.workloads.trace_request import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.handoff import Disagg

__all__ = [
    "ABLATIONS",
    "KINDS",
    "Arm",
    "Kind",
    "Scale",
    "World",
    "ablations",
    "arms",
    "grid",
    "mix",
]

_OWN: Final = 1 << 20
"""First group id of prompts that share nothing with others."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A worker's engine and the objective of its users."""

    preset: str
    itl: Seconds
    """Longest mean time between tokens: 2.5 decode steps of an idle worker."""
    ttft: Seconds


KINDS: Final = (Kind("h100-8b", 0.015, 0.5), Kind("h100-70b-tp4", 0.04, 1.0))


@dataclass(frozen=True, slots=True)
class Arm:
    """Numbers of workers of each mode, with the policy."""

    workers: int = 0
    prefill: int = 0
    decode: int = 0
    disagg: Disagg = "never"
    options: Mapping[str, str] = field(default_factory=dict)
    """Options of the policy."""
    planned: bool = False
    """True if a planner switches the workers' modes."""

    @property
    def name(self) -> str:
        if self.workers:
            return "aggregated"
        return f"{self.prefill}:{self.decode} {self.disagg}{' planned' if self.planned else ''}"


@dataclass(frozen=True, slots=True)
class World:
    """The network, load and engine of one cell."""

    kind: Kind
    load: float = 1.0
    """The load in units of the rate at which aggregated workers just keep the objective."""
    bandwidth: float = 25e9


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of all replays."""

    requests: int = 400
    workers: int = 8
    seeds: int = 3
    loads: Sequence[float] = (0.3, 0.6, 1.0, 1.5)
    bandwidths: Sequence[float] = (25e9, 1.25e9)
    prefills: Sequence[int] = (2, 4, 6)
    share: float = 0.2
    """The share of long prompts."""
    chat: int = 300
    long: int = 12_000
    output: int = 200
    noise: float = 0.1
    kv_tokens: int = 400_000
    seconds: Seconds = 0.0
    """More than 0: requests of so many seconds, instead of `requests`."""
    warm_up: Seconds = 0.0
    """Requests of the first seconds do not count."""


ABLATIONS: Final[dict[str, dict[str, str]]] = {
    "the whole": {},
    "without prefill workers": {"elsewhere": "false"},
    "without decode": {"lambda_decode": "0"},
    "with a bound on decode steps": {"most_itl": "ITL"},
}
"""Options of `ttft`; `ITL`: the objective's."""


def mix(scale: Scale, rate: float, seed: int) -> Iterator[TraceRequest]:
    """Chats whose answers stream, and long prompts among them. Lengths are gamma of shape 4."""
    random, at = Random(f"mix {seed}"), 0.0
    for number in count() if scale.seconds else range(scale.requests):
        at += random.expovariate(rate)
        if scale.seconds and at >= scale.seconds:
            return
        long = random.random() < scale.share
        prompt = _about(random, scale.long if long else scale.chat, least=16)
        output = _about(random, scale.output // 2 if long else scale.output, least=2)
        yield TraceRequest(number, at, ((_OWN + number, prompt),), output)


def _about(random: Random, mean: int, least: int) -> int:
    return max(least, int(random.gammavariate(4, mean / 4)))


def arms(scale: Scale) -> list[Arm]:
    """All arms that run over a network."""
    choices: tuple[Disagg, ...] = ("always", "predict", "rule")
    return [
        Arm(0, prefill, scale.workers - prefill, disagg)
        for prefill, disagg in product(scale.prefills, choices)
    ]


def grid(scale: Scale) -> Iterator[tuple[World, Arm, int]]:
    """All (world, arm, seed). Arms that move no KV use no network and run only with the first."""
    alone = [Arm(workers=scale.workers), *(Arm(0, p, scale.workers - p) for p in scale.prefills)]
    for kind, load in product(KINDS, scale.loads):
        for arm, seed in product(alone, range(1, scale.seeds + 1)):
            yield World(kind, load, scale.bandwidths[0]), arm, seed
        for bandwidth, arm in product(scale.bandwidths, arms(scale)):
            for seed in range(1, scale.seeds + 1):
                yield World(kind, load, bandwidth), arm, seed


def ablations(scale: Scale) -> Iterator[tuple[World, str, Arm, int]]:
    """(world, name, arm, seed): the router's terms where decode workers are half of all."""
    load = max(load for load in scale.loads if load <= 1)
    choices: tuple[Disagg, ...] = ("predict", "always")
    for kind, disagg in product(KINDS, choices):
        for name, options in ABLATIONS.items():
            given = {key: f"{kind.itl}" if v == "ITL" else v for key, v in options.items()}
            arm = Arm(0, scale.workers // 2, scale.workers // 2, disagg, given)
            for seed in range(1, scale.seeds + 1):
                yield World(kind, load, scale.bandwidths[0]), name, arm, seed
