"""The grid of worlds and policies."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pdserve.messages.tiers import KvFetchMode

__all__ = [
    "ABLATIONS",
    "BEYOND",
    "CANDIDATES",
    "KV_LOAD",
    "RIVALS",
    "TTFT",
    "WORKLOADS",
    "Arm",
    "Scale",
    "World",
    "few_worlds",
    "grid",
]


WORKLOADS: Final = ("conversation", "middle", "code", "agentic", "shared-prefix", "unique")
"""What clients send; `runner.requests_of` makes it."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A policy with its options and its router's."""

    name: str
    policy: str
    options: Mapping[str, str] = field(default_factory=dict)
    router: Mapping[str, str] = field(default_factory=dict)
    host_tokens: int = 0
    """Tokens of each worker's host tier."""
    fetch: KvFetchMode = "never"


@dataclass(frozen=True, slots=True)
class World:
    """The conditions of a cell. All fields but `load` and `tuning` describe the cluster."""

    load: float = 1.0
    """The load in units of the trace speed at which the reference just keeps its objective."""
    jitter: float = 3.0
    slow: bool = False
    routers: int = 1
    preset: str = "h100-8b"
    tuning: bool = False
    """True: the trace's first half, else its second half."""
    whole: bool = False
    """True: neither half, but all of the trace."""
    workload: str = "conversation"
    """One of `WORKLOADS`."""

    @property
    def words(self) -> str:
        """A cell's name."""
        parts = [
            f"load {self.load:g}",
            f"jitter {self.jitter:g} s" if self.jitter else "no jitter",
            "a quarter slow" if self.slow else "equal workers",
            f"{self.routers} router{'s' * (self.routers > 1)}",
        ]
        parts += [] if self.workload == "conversation" else [self.workload]
        return ", ".join(parts if self.preset == "h100-8b" else [*parts, self.preset])


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of all replays."""

    requests: int = 800
    workers: int = 8
    kv_tokens: int = 500_000
    noise: float = 0.3
    seeds: int = 5
    loads: Sequence[float] = (0.5, 0.75, 1.0, 1.2)
    few_loads: Sequence[float] = (0.75, 1.0, 1.2)
    routers: Sequence[int] = (1, 2, 4)


TTFT: Final = Arm("ttft", "ttft")
KV_LOAD: Final = Arm("kv_load, defaults", "kv_load")
RIVALS: Final = (
    Arm("random", "random"),
    Arm("round_robin", "round_robin"),
    Arm("weighted_round_robin", "weighted_round_robin"),
    Arm("least_loaded", "least_loaded"),
    Arm("power_of_two", "power_of_two"),
    Arm("session", "session"),
    Arm("prefix_hash", "prefix_hash"),
    Arm("approx_prefix, command line", "approx_prefix"),
    Arm("approx_prefix, library", "approx_prefix", {"preset": "library"}),
    Arm("weighted", "weighted"),
    Arm("mooncake", "mooncake"),
    Arm("sticky", "sticky"),
    Arm("preble", "preble"),
)
ABLATIONS: Final = (
    Arm("ttft without externality", "ttft", {"gamma": "0"}),
    Arm("ttft without opportunity", "ttft", {"kappa0": "0", "kappa1": "0"}),
    Arm("ttft without either", "ttft", {"gamma": "0", "kappa0": "0", "kappa1": "0"}),
    Arm("ttft without harm to decoding", "ttft", {"lambda_decode": "0"}),
    Arm("ttft without exploration", "ttft", {"explore": "0", "tolerance": "0"}),
    Arm("ttft, fifo queue", "ttft", {}, {"queue_order": "fifo"}),
    Arm("ttft, no queue", "ttft", {}, {"hold_work": "0"}),
    Arm("kv_load, fifo queue", "kv_load", {}, {"queue_order": "fifo"}),
    Arm("kv_load, no queue", "kv_load", {}, {"hold_work": "0"}),
)
BEYOND: Final = 1.6
"""A load at which `ttft` also has too few workers, so that its terms matter most."""
CANDIDATES: Final = tuple(
    Arm(
        f"kv_load {credit}/{decay}/{weight}/{temperature}",
        "kv_load",
        {
            "overlap_credit": credit,
            "credit_decay": decay,
            "request_weight": weight,
            "temperature": temperature,
        },
    )
    for credit, decay, weight, temperature in (
        ("1", "0", "0", "0"),
        ("1.5", "0", "0", "0"),
        ("2", "0", "0", "0"),
        ("3", "0", "0", "0"),
        ("2", "4", "0", "0"),
        ("2", "4", "64", "0"),
        ("2", "0", "4", "0"),
        ("2", "0", "16", "0"),
        ("1", "0", "16", "0"),
        ("2", "0", "0", "0.1"),
    )
)
"""The settings over which `kv_load` is tuned: those that its authors publish for different loads
(credit 1.5; 2, 4, 64 for agents), and others near them."""


def few_worlds(scale: Scale) -> list[World]:
    """The worlds in which every policy runs."""
    return [World(load=load) for load in scale.few_loads]


def grid(scale: Scale, tuned: Arm) -> Iterator[tuple[World, Arm, int]]:
    """All (world, arm, seed) of the report. The seeds of a cell follow each other, so that an
    unfinished grid has whole cells."""
    whole = [
        World(load=load, jitter=jitter, slow=slow, routers=routers)
        for routers, slow, jitter, load in product(
            scale.routers, (False, True), (3.0, 0.0), scale.loads
        )
    ]
    few = few_worlds(scale)
    other = [replace(world, preset="dynamo-mocker") for world in few]
    plan = [(world, arm) for world in whole for arm in (TTFT, tuned)]
    plan += [(world, arm) for world in few for arm in (KV_LOAD, *RIVALS)]
    plan += [(world, arm) for world in other for arm in (TTFT, tuned)]
    plan += [(World(load=1.0), arm) for arm in ABLATIONS]
    plan += [(World(load=BEYOND), arm) for arm in (TTFT, tuned, KV_LOAD, *ABLATIONS)]
    for world, arm in plan:
        for seed in range(1, scale.seeds + 1):
            yield world, arm, seed
