"""Defines what routers tell planners of the demand for each model.

Each router publishes a `DemandReport` as the latest value of the topic `DEMAND`. Counters grow over
the life of the router, so a reader loses nothing when it misses a report: it takes differences
between two reports of one life. Several routers' counters add up.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.ids import NodeId

__all__ = ["DEMAND", "Arrival", "DemandReport", "FinishedRequest", "ModelDemand", "ModelTimes"]

DEMAND: Final = "demand"
"""Topic of a router, a value: `DemandReport`."""

Count = Annotated[int, Meta(ge=0)]
Amount = Annotated[float, Meta(ge=0)]


class Arrival(msgspec.Struct, frozen=True, array_like=True):
    """One request when it first reached the router. A request that is routed again, after a
    refusal or a lost worker, is no second arrival."""

    at: float
    """Seconds on the router's clock, as `DemandReport.now`."""
    prompt_tokens: Count
    cached_tokens: Count = 0
    """Prompt tokens that the worker with the most of them had in its cache."""
    choices: Count = 1


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
    """The demand for one model as one router saw it. Counters begin with the router's life."""

    model: str
    arrivals: Count = 0
    """Requests that reached the router, whatever became of them: held and refused ones count."""
    refused: Count = 0
    """Those of them that the router refused for want of capacity, and those that expired while
    they were held."""
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
    """KV tokens times the seconds that they were held, of requests that have ended: prompt and half
    of the output, from the placement to the end."""
    finished: Count = 0
    """Requests whose answer is complete."""
    output_tokens: Count = 0
    first_tokens: Count = 0
    """Requests whose first token has come."""
    kept: dict[str, Count] = {}
    """By objective (`ttft`, `itl`, `both`): requests that kept it."""
    missed: dict[str, dict[str, Count]] = {}
    """By objective and by cause (`observe.slo.CAUSES`): requests that did not keep it."""
    times: ModelTimes = ModelTimes()
    speeds: dict[NodeId, Amount] = {}
    """Factor by which each worker is slower than `times`, where it is known."""
    prediction_poor: bool = False
    """True: predictions have been wrong for a while, so `work` is not to be trusted."""
    recent: tuple[Arrival, ...] = ()
    """The newest arrivals, the oldest first; at most `RECENT_LIMIT` of them."""
    recent_end: Count = 0
    """Number, in this life, of the arrival after the last of `recent`."""
    ended: tuple[FinishedRequest, ...] = ()
    """The newest finished requests, the oldest first; at most `RECENT_LIMIT` of them."""
    ended_end: Count = 0
    """Number, in this life, of the finished request after the last of `ended`."""


class DemandReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One router's demand, for all its models."""

    now: float = 0.0
    """Seconds on the router's own clock, which has no meaning on other machines."""
    models: tuple[ModelDemand, ...] = ()


RECENT_LIMIT: Final = 256
"""Arrivals, and finished requests, of one model in one report."""
