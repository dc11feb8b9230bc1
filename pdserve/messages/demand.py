"""Defines what routers tell planners of the demand for each model.

Each router publishes a `DemandReport` as the latest value of the topic `DEMAND`. Counters grow from
one report to the next, so a reader loses nothing when it misses a report: it takes differences
between two reports of one count. Several routers' counters add up. `planner.demand_reader` reads
them.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.ids import NodeId

__all__ = [
    "DEMAND",
    "RECENT_LIMIT",
    "Arrival",
    "DemandReport",
    "EndedRequest",
    "FinishedRequest",
    "ModelDemand",
    "ModelTimes",
]

DEMAND: Final = "demand"
"""Topic of a router, a value: `DemandReport`."""

RECENT_LIMIT: Final = 256
"""Most arrivals, and most finished requests, of one model in one report."""

Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]


class EndedRequest(msgspec.Struct, frozen=True, array_like=True):
    """How a client's request ended, as its frontend saw it. It travels in the `ReleaseBooking` of
    the request's last booking, so a router hears of each request once."""

    model: str
    """As in `RouteRequest.model`."""
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    """Prompt tokens that its worker took from a cache."""
    output_tokens: Count = 0
    """Output tokens of all its choices."""
    decode: Amount = 0.0
    """Seconds from its first output token to its last one."""
    complete: bool = False
    """True if the answer is complete."""
    verdicts: tuple[tuple[str, str], ...] = ()
    """Each objective (`ttft`, `itl`, `both`), and the cause of its miss (`observe.slo.CAUSES`);
    empty if the request kept it. Objectives that say neither good nor bad of it are left out. Pairs
    cannot change, so nodes of one process pass the record without a copy."""


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """One request when it first reached a router. A request that is routed again, after a refusal,
    a lost worker or a lost router, is no second arrival."""

    at: float
    """Seconds on the router's clock, as `DemandReport.now`."""
    prompt_tokens: Count
    cached_tokens: Count = 0
    """Prompt tokens that the worker with the most of them had in its cache."""
    choices: Count = 1
    work: Amount = 0.0
    """Predicted prefill seconds at speed 1 of the other prompt tokens."""


class FinishedRequest(msgspec.Struct, frozen=True, array_like=True):
    """The lengths of one request whose answer is complete."""

    prompt_tokens: Count
    cached_tokens: Count
    """Prompt tokens that its worker took from a cache."""
    output_tokens: Count
    """Output tokens of all its choices."""


class ModelTimes(msgspec.Struct, frozen=True, array_like=True):
    """What the router has learnt of the model's times on a worker of speed 1, in seconds: the
    coefficients of `perf_model.latency_model.LatencyModel`."""

    base: Amount = 0.0
    per_token: Amount = 0.0
    per_pair: Amount = 0.0
    step_base: Amount = 0.0
    step_sequence: Amount = 0.0
    step_token: Amount = 0.0
    fitted: bool = False
    """False: they are defaults, or predict badly; decisions must not rest on them."""


class ModelDemand(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The demand for one model as one router saw it. Counters begin at zero with a new `count`."""

    model: str
    """As in `RouteRequest.model`: the base model of an adapter."""
    count: Count = 0
    """Number of this count of the model in the router's process. A router that has forgotten a
    model, because it knows too many, begins a new count."""
    began: float = 0.0
    """Seconds on the router's clock when this count began."""
    arrivals: Count = 0
    """Requests that reached the router, whatever became of them: held and refused ones count. Each
    prompt of a client's request counts."""
    refused: Count = 0
    """Those of them that ended without a worker: refused, or expired while they were held."""
    held: Count = 0
    """Requests that wait in the router now."""
    held_work: Amount = 0.0
    """Their predicted prefill seconds at speed 1."""
    held_oldest: Amount = 0.0
    """Seconds that the oldest of them has waited."""
    work: Amount = 0.0
    """Predicted prefill seconds at speed 1 of all arrivals, cached tokens left out."""
    work_squared: Amount = 0.0
    """The sum of the squares of those seconds."""
    kv_token_seconds: Amount = 0.0
    """KV tokens times the seconds that they were held, of what has ended: the prompt from placement
    to the end of the booking, and half of the output from its first token to its last one."""
    finished: Count = 0
    """Requests whose answer is complete."""
    output_tokens: Count = 0
    """Output tokens of requests that have ended."""
    first_tokens: Count = 0
    """Requests whose first token has come."""
    kept: dict[str, Count] = {}
    """By objective (`ttft`, `itl`, `both`): client's requests that kept it."""
    missed: dict[str, dict[str, Count]] = {}
    """By objective and by cause (`observe.slo.CAUSES`): client's requests that did not keep it.
    Frontends of the release before tell neither `kept` nor `missed`."""
    times: ModelTimes = ModelTimes()
    speeds: dict[NodeId, Amount] = {}
    """Factor by which each worker is slower than `times`, where it is known."""
    prediction_poor: bool = False
    """True: predictions have been wrong for a while, so `work` is not to be trusted."""
    recent: tuple[Arrival, ...] = ()
    """The newest of `arrivals`, the oldest first; at most `RECENT_LIMIT` of them."""
    ended: tuple[FinishedRequest, ...] = ()
    """The newest of `finished`, the oldest first; at most `RECENT_LIMIT` of them."""


class DemandReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One router's demand, for all its models."""

    now: float = 0.0
    """Seconds on the router's own clock, which has no meaning on other machines."""
    process: Count = 0
    """Drawn by the router's process at its start: another one has other counters. A node that
    rejoins the cluster keeps its process, and its counters."""
    number: Count = 0
    """Reports of the process so far, this one included."""
    since: float = 0.0
    """Seconds on the router's clock when the first thing happened that the report before does not
    contain."""
    resting: bool = False
    """True: nothing happens at the router, so reports are rare until something does."""
    models: tuple[ModelDemand, ...] = ()
