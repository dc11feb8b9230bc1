"""What a router is told: how it chooses, and how long it believes what it knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.router.hold import ORDERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Bytes, Seconds

__all__ = ["RouterConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """One router. Routers of a cluster may differ; each stands by its own decisions."""

    policy: str = "ttft"
    """Entry-point name in the group `pdserve.policies`, or `module:attribute`. The default predicts
    the time to the first token, learns what it needs for that, and needs no tuning."""
    policy_options: Mapping[str, str] = field(default_factory=dict)
    """What the policy is made with, by name; which ones there are is in its docstring."""
    hold_work: Seconds = 0.1
    """A worker with less predicted work than this before it is open. While none is, requests wait
    here, where the next one can still be chosen and can still go anywhere; 0: they never do. Enough
    for one or two engine steps, so that no engine runs dry while the router hears of it."""
    queue_order: str = "sjf"
    """Among the waiting requests of a tenant: `sjf`, least predicted work first, corrected by the
    time waited; `fifo`, by arrival."""
    rebalance: bool = True
    """Ask frontends to have requests begun elsewhere that wait at a worker for longer than they
    would at another."""
    hold_limit: int = 4096
    """Requests of one model that may wait here; one more is refused with 429, or displaces one of
    lower priority. Several seconds' worth for a large cluster."""
    hold_bytes: Bytes = 256 * 1024 * 1024
    """What they may occupy, names of blocks included."""
    booking_ttl: Seconds = 10.0
    """A booking that its worker never reported ends this long after the decision. Well above the
    time from an answer to the worker's report, a dial and a retry included; short, because until
    then a request that never came looks like load. What a worker has reported never ages."""
    max_bookings: int = 262_144
    """Own bookings open at once; one more request is refused with 429. A guard of memory (under
    100 MiB), far above what frontends keep open."""
    sweep_interval: Seconds = 1.0
    """Between two looks for bookings and memories that ran out: both may last this much longer. A
    tenth of `booking_ttl`, so that the sweep does not blur it."""
    gone_model_memory: Seconds = 300.0
    """So long after its last worker left, a model is "no worker now" (503, try again) and not
    "unknown" (404). A worker that is started anew loads within it."""
    gone_models: int = 1024
    """Models remembered so; the one that left first is forgotten first."""
    retry_after: Seconds = 2.0
    """What a refused client is told to wait: a restarted engine or a new worker is known about this
    soon, and clients that obey do not crowd in meanwhile."""
    assumed_max_sequences: int = 256
    """The size of a worker that has not said its own: the default of `--max-sequences`."""
    index_max_blocks: int = 8_000_000
    """Distinct blocks that the index knows; more are refused and counted. A guard of memory (under
    1 GiB), above what the pools of a large cluster hold."""
    predict_ttl: Seconds = 5.0
    """A choice counts as cached at its worker at most this long, unless the worker's events say the
    same: time enough for the prompt to be computed and told, short enough that one that was
    abandoned is soon forgotten."""
    approximate_ttl: Seconds = 120.0
    """What was sent to a worker whose engine tells nothing counts as cached there at most this
    long: a guess at how long a busy pool keeps a prompt."""
    approximate_blocks: int = 1_000_000
    """Blocks remembered so, of all workers together; what was sent least recently goes first."""

    def validate(self) -> None:
        """Raise `ConfigError` for what can never work, naming key and remedy. Whether the policy
        exists shows when it is loaded."""
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
