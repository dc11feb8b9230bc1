"""Numbers of all requests, one-way messages and streams between nodes.

Numbers are 16 bits, chosen once and never reused. Those of topics stand with them.

    0x0100-0x010f  membership      gossip/messages.py, gossip/service.py
    0x0200-0x020f  reserved        `RESERVED`
    0x0210-0x021f  topics          runtime/topics
    0x0300-0x030f  routers         here, messages/handoff.py
    0x0310-0x031f  workers         here, messages/worker_stream.py
    0x0320-0x032f  any node        here
    0x0330         the hash secret here
    0x0340-0x034f  agents          here, messages/agent.py
    0x0350-0x035f  planners        here
"""

from __future__ import annotations

from typing import Final

from pdserve.messages.agent import (
    AgentQuery,
    AgentReport,
    StartWorker,
    StopTaken,
    StopWorker,
)
from pdserve.messages.handoff import (
    AttemptAck,
    AttemptFailed,
    AttemptOpened,
    DisaggSet,
    KvFetch,
    KvFetchReply,
    LeasesRenewed,
    NotifyHandoff,
    OpenAttempt,
    RenewLeases,
    SetDisagg,
    TransportCall,
    TransportReply,
    WithdrawAttempt,
)
from pdserve.messages.hash_secret import HashSecret, HashSecretQuery
from pdserve.messages.kv_pull import (
    KvChains,
    KvPullGrant,
    KvTaken,
    ListKv,
    OfferKv,
    PullKv,
    WarmUp,
)
from pdserve.messages.mode import ModeReport, SetMode
from pdserve.messages.planner import Instance
from pdserve.messages.planner_orders import PlannerAnswer, PlannerOrder
from pdserve.messages.routing import (
    ReleaseBooking,
    RouteDecision,
    RouteRequest,
    RouterMigrationHint,
    RoutingPreview,
)
from pdserve.messages.status import (
    ClusterStatus,
    DrainOrder,
    DrainState,
    MetricPage,
    NodeReport,
    Scrape,
    StatusQuery,
    UndoDrain,
)
from pdserve.messages.tiers import DropOrder, DropReport
from pdserve.messages.trace import TraceQuery, TraceReply
from pdserve.wire.codec import Method, Notice

RESERVED: Final = range(0x0200, 0x0210)
"""Numbers not to be reused: releases 0.1 and 0.2 had four of these for messages that no role sent.
"""

ROUTE: Final = Method(0x0300, "route", RouteRequest, RouteDecision)
"""A frontend asks a router for a worker."""
RELEASE: Final = Notice(0x0301, "release", ReleaseBooking)
"""A frontend ends a booking at a router."""
MOVE: Final = Notice(0x0303, "move", RouterMigrationHint)
"""A router suggests to a frontend to move a request."""
EXPLAIN: Final = Method(0x0302, "explain", RouteRequest, RoutingPreview)
"""Asks a router how it would decide, and why; nothing is booked."""

OPEN_ATTEMPT: Final = Method(0x0311, "open attempt", OpenAttempt, AttemptOpened)
"""A prefill worker asks a decode worker for blocks to fill."""
RENEW: Final = Method(0x0312, "renew", RenewLeases, LeasesRenewed)
"""A prefill worker renews its leases at a decode worker."""
NOTIFY: Final = Method(0x0313, "notify", NotifyHandoff, AttemptAck)
"""A prefill worker tells a decode worker that a request is prefilled."""
ATTEMPT_FAILED: Final = Method(0x0314, "attempt failed", AttemptFailed, AttemptAck)
"""A prefill worker reports a failed attempt."""
WITHDRAW: Final = Method(0x0315, "withdraw", WithdrawAttempt, AttemptAck)
"""A decode worker cancels an attempt."""
TRANSFER: Final = Method(0x0316, "transfer", TransportCall, TransportReply)
"""Transport control messages between two workers."""
DISAGG: Final = Method(0x0317, "disagg", SetDisagg, DisaggSet)
"""An operator sets a decode worker's disaggregation policy."""
HAND_OVER: Final = Method(0x0318, "hand over", KvFetch, KvFetchReply)
"""A worker asks another for the KV of a sequence that it holds."""
PULL_KV: Final = Method(0x0319, "pull kv", PullKv, KvPullGrant)
"""A worker asks another for blocks of its pool. Answered when they are on their way."""
OFFER_KV: Final = Method(0x031A, "offer kv", OfferKv, KvTaken)
"""A worker that leaves offers blocks of its pool to another one. Answered when they are there."""
LIST_KV: Final = Method(0x031B, "list kv", ListKv, KvChains)
"""A worker asks another which of its blocks are worth most."""
WARM: Final = Method(0x031C, "warm", WarmUp, KvTaken)
"""An operator has a worker pull another one's blocks."""
MODE: Final = Method(0x031D, "mode", SetMode, ModeReport)
"""An operator has a worker change its mode."""
DROP_KV: Final = Method(0x031F, "drop kv", DropOrder, DropReport)
"""An operator has a worker forget KV on its tiers."""

STATUS: Final = Method(0x0320, "status", StatusQuery, ClusterStatus)
"""Asks a node for its view of the whole cluster."""
REPORT: Final = Method(0x0321, "report", StatusQuery, NodeReport)
"""Asks a node for its own report."""
SCRAPE: Final = Method(0x0322, "scrape", Scrape, MetricPage)
"""A frontend asks another process on its port for its metrics."""
DRAIN: Final = Method(0x0323, "drain", DrainOrder, DrainState)
"""An operator asks a node to drain."""
TRACES: Final = Method(0x0324, "traces", TraceQuery, TraceReply)
"""Asks a node for traces of requests: its own, or those of all frontends."""
UNDO_DRAIN: Final = Method(0x0325, "undo drain", UndoDrain, DrainState)
"""Asks a node that drains to serve again."""

SECRET: Final = Method(0x0330, "hash secret", HashSecretQuery, HashSecret)
"""A node asks another for its hash secret (`runtime.hash_secret`)."""

START_WORKER: Final = Method(0x0340, "start worker", StartWorker, Instance)
"""A planner has an agent start a worker on its host."""
STOP_WORKER: Final = Method(0x0341, "stop worker", StopWorker, StopTaken)
"""A planner has an agent end a worker of its host."""
AGENT_REPORT: Final = Method(0x0342, "agent report", AgentQuery, AgentReport)
"""A planner asks an agent what it can start, and what it has started."""

PLANNER: Final = Method(0x0350, "planner", PlannerOrder, PlannerAnswer)
"""An operator asks or tells a planner something."""
