"""Configuration of a router: policy, admission bounds, and how long each kind of knowledge is
valid.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.router.admission_queue import ORDERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Bytes, Seconds

__all__ = ["RouterConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Settings of one router. Routers of a cluster may differ; each decides by its own."""

    policy: str = "ttft"
    """Entry-point name in the group `pdserve.policies`, or `module:attribute`. The default predicts
    the time to the first token, learns what it needs for that, and needs no tuning."""
    policy_options: Mapping[str, str] = field(default_factory=dict)
    """Options passed to the policy, by name; the policy's docstring lists them."""
    hold_work: Seconds = 0.1
    """A worker with less predicted prefill work than this is open. While none is, requests wait in
    the router, where they can still go to any worker; 0: they never wait. The default is one or
    two engine steps, so that no engine runs dry.
    """
    queue_order: str = "sjf"
    """Order of one tenant's waiting requests: `sjf`, least predicted work first, corrected by the
    time waited; `fifo`, by arrival.
    """
    kv_copies: int = 0
    """Workers that may keep a prefix which they fetched from each other; 0: half of the model's, at
    least 2. Copies follow demand up to there. Beyond, one costs the room of other prefixes and
    saves no computation, only the next fetch.
    """
    rebalance: bool = True
    """Tell frontends to move waiting requests to a worker that would begin them sooner."""
    hold_limit: int = 4096
    """Most requests of one model that wait; one more is refused with 429, or displaces one of lower
    priority. The default is several seconds' worth for a large cluster.
    """
    hold_bytes: Bytes = 256 * 1024 * 1024
    """Most bytes that waiting requests occupy, block hashes included."""
    booking_ttl: Seconds = 10.0
    """A booking that its worker never reported ends this long after the decision. Well above the
    time from decision to report, with a dial and a retry; short, because until then a lost
    request looks like load. Reported bookings do not expire.
    """
    max_bookings: int = 262_144
    """Most open bookings of this router; one more request is refused with 429. Guards memory (under
    100 MiB), far above what frontends keep open.
    """
    sweep_interval: Seconds = 1.0
    """Interval between sweeps of expired entries, which may live this much longer. A tenth of
    `booking_ttl`, so that the sweep does not blur it.
    """
    gone_model_memory: Seconds = 300.0
    """For this long after its last worker left, a model is "no worker" (503, retry) and not
    "unknown" (404). A restarted worker loads within it.
    """
    gone_models: int = 1024
    """Most such models that are remembered; the one that left first is dropped first."""
    retry_after: Seconds = 2.0
    """Retry-After of refused clients: a restarted engine or a new worker is known within it."""
    assumed_max_sequences: int = 256
    """Assumed size of a worker that has not reported one: the default of `--max-sequences`."""
    index_max_blocks: int = 8_000_000
    """Most distinct blocks in the prefix index; more are refused and counted. Guards memory (under
    1 GiB), above what the pools of a large cluster hold.
    """
    predict_ttl: Seconds = 5.0
    """A placed prompt counts as cached at its worker for at most this long, unless the worker's
    events confirm it. Long enough for prefill and the event, short enough that aborted requests
    are soon dropped.
    """
    approximate_ttl: Seconds = 120.0
    """A prompt sent to a worker without KV events counts as cached there for at most this long: a
    guess at how long a busy pool keeps a prompt.
    """
    approximate_blocks: int = 1_000_000
    """Most blocks remembered for workers without KV events, all workers together; least recently
    sent is dropped first.
    """

    def validate(self) -> None:
        """Raises `ConfigError`, with key and remedy, for values that cannot work. A missing policy
        shows when it is loaded.
        """
        for name in (
            "booking_ttl",
            "sweep_interval",
            "gone_model_memory",
            "retry_after",
            "predict_ttl",
            "approximate_ttl",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{_key(name)} must be more than 0 seconds")
        if not self.hold_work >= 0:
            raise ConfigError("hold-work must be 0 seconds or more")
        if self.kv_copies < 0:
            raise ConfigError("kv-copies must be at least 1, or auto")
        if self.queue_order not in ORDERS:
            raise ConfigError(f"queue-order must be one of {', '.join(ORDERS)}")
        for name in (
            "hold_limit",
            "hold_bytes",
            "max_bookings",
            "gone_models",
            "assumed_max_sequences",
            "index_max_blocks",
            "approximate_blocks",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_key(name)} must be at least 1")


def _key(name: str) -> str:
    return name.replace("_", "-")
