"""How the cluster is, for people who look: what a node says of itself, and one node's whole view.

`Report` is a node's own account, with numbers that are in no card. `ClusterStatus` is the view of
the node that was asked: its members, each with the report that it gave, or why it gave none.
`MetricFamily` carries numbers of `/metrics` between frontends that share a port.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.ids import NodeId
from pdserve.messages.engine import PathState
from pdserve.messages.handoff import QueueState
from pdserve.messages.routing import Count, WorkerLoad

State = Literal["alive", "suspect", "unreachable"]
"""`suspect`: some cannot hear it. `unreachable`: the asked node has lost its link to it."""


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """A question without details."""


class DrainOrder(msgspec.Struct, frozen=True, array_like=True):
    """An operator wants a node's process to take nothing new and to hand over what it has."""

    stay: bool = False
    """It stays in the cluster then, doing nothing, until a signal ends it; else it ends."""


class DrainState(msgspec.Struct, frozen=True, array_like=True):
    """How far a process is that drains."""

    drained: bool = False
    """All is gone, or the time has passed."""
    left: Count = 0
    """Requests that are still there."""
    remaining: float = 0.0
    """Seconds until those that are left end, for their frontends to send them on."""
    stays: bool = False
    """It ends only when it is told to."""
    already: bool = False
    """It was draining when it was asked to."""


class RouterNumbers(msgspec.Struct, frozen=True, array_like=True):
    """What a router has done in this life, and what it holds."""

    routed: Count = 0
    refused: Count = 0
    bookings: Count = 0
    """Its own, open at the moment."""
    held: Count = 0
    """Requests that wait for a worker at the moment."""
    ever_held: Count = 0
    held_seconds: float = 0.0
    """Of those that were given a worker then."""
    policy: str = ""
    decisions: dict[str, int] = {}
    """By the policy, or what it fell back to for want of good predictions."""
    prompt_tokens: Count = 0
    """Of requests whose first token has come."""
    expected_tokens: Count = 0
    """Of those, believed to be cached when the worker was chosen."""
    cached_tokens: Count = 0
    """Of those, found cached by the worker."""
    prediction: float = 0.0
    """Time to first token, observed over predicted: the median lately; 0: none was predicted."""
    index_blocks: Count = 0
    """Distinct blocks of workers' pools that it knows."""
    prefill: dict[str, QueueState] = {}
    """The prefill queues that it owns, by model."""
    prefill_events: dict[str, int] = {}
    """What happened to items of those queues, ever: see `router.prefill.queue`."""
    moves_asked: Count = 0
    """Requests that another worker would have begun sooner than the one they waited at."""


class FrontendNumbers(msgspec.Struct, frozen=True, array_like=True):
    """What a frontend has in hand."""

    active: Count = 0
    """Generation requests in progress."""
    connections: Count = 0
    """Open client connections."""
    rerouted: Count = 0
    """Requests that a worker did not take and another was asked for, in this life."""


class HandoffNumbers(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A worker's part in prefill and decode on different workers; counts over its life."""

    mode: str
    """`prefill` or `decode`."""
    disagg: str = ""
    """How a decode worker decides now."""
    remote: dict[str, int] = {}
    """Prompts that came from a prefill worker, by reason."""
    local: dict[str, int] = {}
    """Prompts that a decode worker prefilled itself, by reason."""
    ended: dict[str, int] = {}
    """Attempts of a decode worker, claims of a prefill worker, by outcome."""
    states: dict[str, int] = {}
    """Requests under way to their first token, by state of the handoff."""


class Report(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One node's account of itself. Numbers of roles that it does not have are None."""

    reason: str = ""
    """Why it cannot do its work; empty: it can."""
    degraded: dict[str, str] = {}
    """What its process does worse than it could: name to cause and remedy."""
    worker: WorkerLoad | None = None
    router: RouterNumbers | None = None
    frontend: FrontendNumbers | None = None
    handoffs: HandoffNumbers | None = None
    paths: tuple[PathState, ...] = ()
    """By which a worker's KV comes and goes."""
    drain: DrainState | None = None
    """Of its process; None: it does not drain."""


class MemberStatus(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One member, as the asked node sees it."""

    node: NodeId
    role: str
    epoch: int
    """The beginning of its life: Unix milliseconds, unless its clock went back."""
    address: str = ""
    state: State = "alive"
    version: str = ""
    host: str = ""
    pid: int = 0
    started: int = 0
    """Unix seconds; 0: its card has not arrived."""
    models: tuple[str, ...] = ()
    """What it serves, by name."""
    draining: bool = False
    reason: str = ""
    """Why it serves nothing, as its card says."""
    http: str = ""
    metrics: str = ""
    group: str = ""
    degraded: tuple[str, ...] = ()
    """Names of what its card says is degraded; the report, if there is one, says more."""
    silence: str = ""
    """Why there is no report."""
    report: Report | None = None


class ModelStatus(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One served model, and who serves it."""

    name: str
    aliases: tuple[str, ...] = ()
    engine: str = ""
    dtype: str = ""
    max_model_len: int = 0
    workers: tuple[NodeId, ...] = ()


class ClusterStatus(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The cluster, as one node sees it."""

    cluster: str
    asked: NodeId
    """Who says all this."""
    now: float
    """Its wall clock, Unix seconds: ages are to be told by it."""
    members: tuple[MemberStatus, ...] = ()
    """By role and name, the asked node included."""
    models: tuple[ModelStatus, ...] = ()
    conflicts: dict[NodeId, str] = {}
    """Workers that get no requests because their model is another one than its name's."""


class Scrape(msgspec.Struct, frozen=True, array_like=True):
    """A frontend asks another for its numbers, if both share a port."""

    group: str
    """What those that share the port are called; whoever is of another has no numbers."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One line of `/metrics`."""

    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """One metric with all its samples."""

    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]


class MetricPage(msgspec.Struct, frozen=True, array_like=True):
    """All numbers of one process."""

    families: tuple[MetricFamily, ...]
