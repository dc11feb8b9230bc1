"""Every number that names a question, a one-way message or a stream between nodes.

Numbers are 16 bits, chosen once and never reused. Those of actors and topics stand with them.

    0x0100-0x010f  membership      gossip/messages.py, gossip/service.py
    0x0200-0x020f  actors          runtime
    0x0210-0x021f  topics          runtime/topics
    0x0300-0x030f  routers         here, messages/handoff.py
    0x0310-0x031f  workers         here, messages/channel.py
    0x0320-0x032f  any node        here
    0x0330         the hash secret here
"""

from __future__ import annotations

from typing import Final

from pdserve.messages.handoff import (
    AttemptFailed,
    DisaggSet,
    HandOver,
    HandOverTaken,
    Notify,
    OpenAttempt,
    Opened,
    Renew,
    Renewed,
    SetDisagg,
    Taken,
    TransferAnswer,
    TransferAsk,
    Withdraw,
)
from pdserve.messages.names import AskSecret, HashSecret
from pdserve.messages.routing import Explained, Route, Routed
from pdserve.messages.status import (
    Ask,
    ClusterStatus,
    DrainOrder,
    DrainState,
    MetricPage,
    Report,
    Scrape,
)
from pdserve.wire.codec import Method

ROUTE: Final = Method(0x0300, "route", Route, Routed)
"""A frontend asks a router for a worker."""
RELEASE: Final = 0x0301
"""A frontend tells the router that a booking is over: `Release`."""
MOVE: Final = 0x0303
"""A router tells a frontend that a request would begin sooner elsewhere: `Move`."""
EXPLAIN: Final = Method(0x0302, "explain", Route, Explained)
"""What a router would answer, and why; nothing is booked."""

OPEN_ATTEMPT: Final = Method(0x0311, "open attempt", OpenAttempt, Opened)
"""A prefill worker asks a decode worker for blocks to fill."""
RENEW: Final = Method(0x0312, "renew", Renew, Renewed)
"""A prefill worker renews its leases at a decode worker."""
NOTIFY: Final = Method(0x0313, "notify", Notify, Taken)
"""A prefill worker hands a prefilled request over."""
ATTEMPT_FAILED: Final = Method(0x0314, "attempt failed", AttemptFailed, Taken)
"""A prefill worker gives an attempt up."""
WITHDRAW: Final = Method(0x0315, "withdraw", Withdraw, Taken)
"""A decode worker wants nothing more of an attempt."""
TRANSFER: Final = Method(0x0316, "transfer", TransferAsk, TransferAnswer)
"""One worker's transport to another's."""
DISAGG: Final = Method(0x0317, "disagg", SetDisagg, DisaggSet)
"""An operator tells a decode worker how to decide."""
HAND_OVER: Final = Method(0x0318, "hand over", HandOver, HandOverTaken)
"""A worker asks another for the KV of a sequence that it has."""

STATUS: Final = Method(0x0320, "status", Ask, ClusterStatus)
"""Anybody with the key asks any node how the cluster is."""
REPORT: Final = Method(0x0321, "report", Ask, Report)
"""A node asks another what it says of itself."""
SCRAPE: Final = Method(0x0322, "scrape", Scrape, MetricPage)
"""A frontend asks one that shares its port for its numbers."""
DRAIN: Final = Method(0x0323, "drain", DrainOrder, DrainState)
"""An operator wants a node to drain."""

SECRET: Final = Method(0x0330, "hash secret", AskSecret, HashSecret)
"""A node asks one that holds a better hash secret for it: see `runtime.secret`."""
