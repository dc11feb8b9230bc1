"""Defines the status messages: a node's report, the cluster view of one node, and metrics.

`NodeReport` is a node's own account, with values that are in no card. `ClusterStatus` is the view
of the node that was asked: its members, each with its report or the reason why there is none.
`MetricFamily` carries `/metrics` values between frontends that share a port.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.ids import NodeId
from pdserve.messages.agent import AgentReport
from pdserve.messages.engine import PathState
from pdserve.messages.handoff import QueueState
from pdserve.messages.kv_events import Tier
from pdserve.messages.mode import ModeReport
from pdserve.messages.planner import PlannerReport
from pdserve.messages.routing import Count, WorkerLoad
from pdserve.observe.exposition import ScrapedFamily

MemberReachability = Literal["alive", "suspect", "unreachable"]
"""`suspect`: some members cannot reach it. `unreachable`: the asked node has lost its link
to it."""


class StatusQuery(msgspec.Struct, frozen=True, array_like=True):
    """Asks for a status."""


class DrainOrder(msgspec.Struct, frozen=True, array_like=True):
    """Tells a node's process to drain: take nothing new and move its requests."""

    stay: bool = False
    """True: it stays in the cluster, idle, until a signal ends it; False: it exits."""
    term: Count = 0
    """Term of the planner that orders it, greater for a later owner; 0: an operator orders it."""
    number: Count = 0
    """Number of the planner's plan in that term. An order older than the last one is refused."""
    last: bool = False
    """True: a planner's order holds even if no other ready worker would do what this one does."""


class UndoDrain(msgspec.Struct, frozen=True, array_like=True):
    """Tells a node's process that drains to serve again."""

    term: Count = 0
    """As in `DrainOrder`."""
    number: Count = 0


class DrainState(msgspec.Struct, frozen=True, array_like=True):
    """Progress of a draining process."""

    drained: bool = False
    """True if nothing is left, or the time has passed."""
    left: Count = 0
    """Requests that are left."""
    remaining: float = 0.0
    """Seconds until the remaining requests end, for their frontends to retry them."""
    stays: bool = False
    """True: it exits only on a signal."""
    already: bool = False
    """True: it was already draining or, if it `serves`, did not drain."""
    serves: bool = False
    """True: it takes new work, for its drain was undone or there was none."""
    refused: str = ""
    """Why this order is not obeyed; empty: it is."""
    term: Count = 0
    """Term of the planner that ordered the drain; 0: an operator did, or a signal."""
    newest: Count = 0
    """Newest term of which an order was obeyed; 0: no planner's was."""


class RouterStats(msgspec.Struct, frozen=True, array_like=True):
    """Counters of a router in this life, and what it holds."""

    routed: Count = 0
    refused: Count = 0
    bookings: Count = 0
    """Its own open bookings."""
    held: Count = 0
    """Requests that wait for a worker."""
    ever_held: Count = 0
    held_seconds: float = 0.0
    """Seconds waited by requests that were then given a worker."""
    policy: str = ""
    decisions: dict[str, int] = {}
    """Decisions by policy, or by its fallback."""
    prompt_tokens: Count = 0
    """Prompt tokens of requests whose first token has come."""
    expected_tokens: Count = 0
    """Prompt tokens expected to be cached when the worker was chosen."""
    cached_tokens: Count = 0
    """Prompt tokens that the worker found cached."""
    prediction: float = 0.0
    """Recent median of observed over predicted time to first token; 0: none was predicted."""
    index_blocks: Count = 0
    """Distinct blocks of the workers' pools in its index."""
    prefill: dict[str, QueueState] = {}
    """The prefill queues that it owns, by model."""
    prefill_events: dict[str, int] = {}
    """What happened to items of those queues, ever: see `router.prefill_queue.queue`."""
    moves_asked: Count = 0
    """Migration hints sent: another worker would have begun the request sooner."""
    copies_kept: Count = 0
    """Decisions for a worker that fetches a prefix and keeps it."""
    copies_let_go: Count = 0
    """The same, where enough workers had the prefix already."""


class LatencyCounts(msgspec.Struct, frozen=True, array_like=True):
    """A histogram's growth, without empty buckets at both ends."""

    bounds: tuple[float, ...] = ()
    """Upper bounds in seconds; the first bucket begins at 0 unless it is empty."""
    counts: tuple[Count, ...] = ()
    """Observations per bucket; one more than bounds: those above the last bound."""


class ModelWindow(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a frontend did for one model in the last seconds."""

    model: str = ""
    """Its served name; empty: requests that ended before their model was known."""
    seconds: float = 0.0
    """Length of the window: 10 or 60 s, and less after the start."""
    requests: Count = 0
    """Requests that have ended."""
    errors: Count = 0
    """Those of them that failed by the servers' fault, or were refused."""
    prompt_tokens: Count = 0
    """Prompt tokens of requests that have got a first token."""
    uncached_tokens: Count = 0
    """Those of them that were computed."""
    output_tokens: Count = 0
    """Tokens sent to clients."""
    ttft: LatencyCounts = LatencyCounts()
    itl: LatencyCounts = LatencyCounts()
    slo: dict[str, tuple[Count, Count]] = {}
    """By objective (`ttft`, `itl`, `both`): requests that kept it, and that did not."""


class EngineWindow(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a worker's engine did in the last seconds."""

    seconds: float = 0.0
    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    computed_tokens: Count = 0
    output_tokens: Count = 0
    preemptions: Count = 0


class FrontendStats(msgspec.Struct, frozen=True, array_like=True):
    """What a frontend has in progress."""

    active: Count = 0
    """Generation requests in progress."""
    connections: Count = 0
    """Open client connections."""
    rerouted: Count = 0
    """Requests that were rerouted because a worker did not take them, in this life."""
    recent: tuple[ModelWindow, ...] = ()
    """By model, over the last 10 s."""
    minute: tuple[ModelWindow, ...] = ()
    """By model, over the last 60 s."""


class HandoffStats(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Counters of a worker's part in disaggregated prefill, over its life."""

    mode: str
    """`prefill` or `decode`."""
    disagg: str = ""
    """How a decode worker decides now."""
    remote: dict[str, int] = {}
    """Prompts prefilled by another worker, by reason."""
    local: dict[str, int] = {}
    """Prompts that a decode worker prefilled itself, by reason."""
    ended: dict[str, int] = {}
    """Attempts of a decode worker, claims of a prefill worker, by outcome."""
    states: dict[str, int] = {}
    """Requests under way to their first token, by state of the handoff."""


class TierReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One KV tier of a worker, below its device. Counters are over the worker's life."""

    name: Tier
    capacity: Count = 0
    """Bytes that it has."""
    valid: Count = 0
    """Bytes of blocks that can be reused."""
    retention: float = 0.0
    """Seconds that a block stayed before it was evicted, recently; 0: nothing was evicted yet."""
    hit_tokens: Count = 0
    """Prompt tokens that came to the device from here."""
    stored: Count = 0
    """Blocks that came in."""
    evicted: Count = 0
    """Blocks that went out for lack of room."""
    unsaved: Count = 0
    """Blocks of the tier above that were evicted before they could be copied here."""
    failed: Count = 0
    """Blocks that could not be read, or did not match their checksum."""
    trouble: str = ""
    """Why it works in part or not at all; empty: it works."""


class RankStatus(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One tensor-parallel rank of a worker's engine."""

    rank: Count
    """0 is the engine process."""
    pid: Count
    device: str = ""
    state: str = ""
    """`running`; `stopped`, by a signal; or `ended`."""


class NodeReport(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One node, by its own account. Fields of roles that it does not have are None."""

    reason: str = ""
    """Why it cannot work; empty: it can."""
    degraded: dict[str, str] = {}
    """Degraded functions of its process: name to cause and remedy."""
    worker: WorkerLoad | None = None
    router: RouterStats | None = None
    frontend: FrontendStats | None = None
    handoffs: HandoffStats | None = None
    paths: tuple[PathState, ...] = ()
    """KV transfer paths of a worker."""
    drain: DrainState | None = None
    """Drain progress of its process; None: it is not draining."""
    recent: EngineWindow | None = None
    """A worker's engine over the last 10 s."""
    minute: EngineWindow | None = None
    """The same over the last 60 s."""
    tiers: tuple[TierReport, ...] = ()
    """A worker's KV tiers below its device."""
    mode: ModeReport | None = None
    """A worker's mode, and how far a change of it is."""
    planner: PlannerReport | None = None
    """A planner's plans, and what it knows of instances and operators' wishes."""
    agent: AgentReport | None = None
    """What an agent can start on its host, and what it has started."""
    ranks: tuple[RankStatus, ...] = ()
    """The processes that compute a worker's model together; empty: one does."""


class MemberStatus(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One member, as the asked node sees it."""

    node: NodeId
    role: str
    epoch: int
    """Start of its life in Unix milliseconds, unless its clock went back."""
    address: str = ""
    state: MemberReachability = "alive"
    version: str = ""
    host: str = ""
    pid: int = 0
    started: int = 0
    """Unix seconds; 0: its card has not arrived."""
    models: tuple[str, ...] = ()
    """Names of the models it serves."""
    draining: bool = False
    reason: str = ""
    """Why it serves nothing, from its card."""
    http: str = ""
    metrics: str = ""
    group: str = ""
    degraded: tuple[str, ...] = ()
    """Names of degraded functions, from its card; the report has details."""
    silence: str = ""
    """Why there is no report."""
    report: NodeReport | None = None
    tokens: tuple[str, ...] = ()
    """For each of `models`, the reproducibility its engine promises, see `ModelStatus.tokens`."""


class ModelStatus(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One served model and its workers."""

    name: str
    aliases: tuple[str, ...] = ()
    engine: str = ""
    dtype: str = ""
    max_model_len: int = 0
    workers: tuple[NodeId, ...] = ()
    tokens: str = ""
    """Whether tokens depend on the worker and the batch: `exact`, with the kernels that all workers
    have; `close`, with their data type; or `near ties may differ`.
    """
    adapters: tuple[str, ...] = ()
    """Ids of the LoRA adapters that any of its workers has."""


class ClusterStatus(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The cluster, as one node sees it."""

    cluster: str
    asked: NodeId
    """The node that answers."""
    now: float
    """Its wall clock in Unix seconds; compute ages against it."""
    members: tuple[MemberStatus, ...] = ()
    """Members by role and name, the asked node included."""
    models: tuple[ModelStatus, ...] = ()
    conflicts: dict[NodeId, str] = {}
    """Workers that get no requests because their model differs from others of the same name."""


class Scrape(msgspec.Struct, frozen=True, array_like=True):
    """Asks another frontend for its metrics, if both share a port."""

    group: str
    """Name of the group that shares the port; a frontend of another group answers with nothing."""


class MetricSample(msgspec.Struct, frozen=True, array_like=True):
    """One line of `/metrics`."""

    name: str
    labels: dict[str, str]
    value: float


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """One metric with all its samples."""

    name: str
    kind: str
    help: str
    samples: tuple[MetricSample, ...]


class MetricPage(msgspec.Struct, frozen=True, array_like=True):
    """All metrics of one process."""

    families: tuple[MetricFamily, ...]
    """Empty: `scraped` has taken its place."""
    scraped: tuple[ScrapedFamily, ...] = ()
