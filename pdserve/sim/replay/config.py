"""Configures a replay: the cluster, its engines, and the service level objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve.worker.config import DISAGG, KV_FETCH, WITHOUT_TIERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.handoff import Disagg
    from pdserve.messages.tiers import KvFetchMode

__all__ = ["ReplayConfig", "ReplaySlo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySlo:
    """The service level objective of a request: its first token comes within `ttft` + `cold` times
    what its prompt takes on an idle worker with an empty cache, and its mean inter-token latency is
    at most `itl`."""

    ttft: Seconds = 1.0
    cold: float = 2.0
    """Factor of the prompt's own time, so that long prompts may take longer."""
    itl: Seconds = 0.0
    """Seconds; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayConfig:
    """One replay. The same config and trace give the same numbers."""

    workers: int = 4
    """Number of aggregated workers."""
    prefill: int = 0
    """Number of prefill workers."""
    decode: int = 0
    """Number of decode workers."""
    disagg: Disagg = "rule"
    """The rule by which a decode worker hands a prompt to a prefill worker; see
    `worker.config.WorkerConfig.disagg`, also for the next two."""
    disagg_min_tokens: int = 512
    disagg_max_queue: int = 10
    bandwidth: float = 25e9
    """Bytes per second at which each worker sends KV, and at which it receives."""
    transfer_latency: Seconds = 20e-6
    """Seconds added to each part that is sent."""
    routers: int = 1
    frontends: int = 1
    with_router: bool = False
    """Each frontend asks a router of its own first; there are as many routers as frontends."""
    policy: str = ""
    """Empty: the router's default."""
    policy_options: Mapping[str, str] = field(default_factory=dict)
    router_options: Mapping[str, str] = field(default_factory=dict)
    """Other fields of `router.config.RouterConfig`, as text."""
    seed: int = 0
    engine: str = "sim"
    engine_options: Mapping[str, str] = field(default_factory=dict)
    """The engine's own options, for all workers."""
    slow_share: float = 0.0
    """Share of the workers that take `slow_factor` times as long for each step and transfer."""
    slow_factor: float = 1.0
    noise: float = 0.0
    """Standard deviation of a step's time, as a share of it."""
    block_size: int = 512
    """Tokens per block. 512 is the block size of the public traces: smaller blocks take longer and
    find no more cache hits."""
    kv_tokens: int = 500_000
    """Tokens of KV in each worker's pool."""
    host_kv: Bytes = 0
    """Size of each worker's host tier; 0: none. Nothing of it is allocated."""
    disk_kv: Bytes = 0
    """Size of each worker's disk tier; 0: none."""
    kv_fetch: KvFetchMode = "never"
    """Whether workers fetch KV from each other; see `messages.tiers.KvFetchMode`."""
    max_model_len: int = 262_144
    max_batch_tokens: int = 2048
    max_sequences: int = 256
    max_waiting: int = 65_536
    steps_at_once: int = 32
    """Decode steps that the engine simulates as one while its batch stays the same. Tokens then
    come in bursts; the first and last token of a request are on time."""
    delay: Seconds = 0.0002
    """Network delay one way, between any two nodes."""
    sample_every: Seconds = 5.0
    """Interval of samples of the workers' load, for plots."""
    patience: Seconds = 0.0
    """A request's deadline after its arrival; 0: none."""
    warm_up: Seconds = 0.0
    """Requests that arrive before this time are served, and left out of the summary's figures of
    requests."""
    slo: ReplaySlo = field(default_factory=ReplaySlo)
    scaling: bool = False
    """True if workers come, go and change their modes during the replay."""

    def validate(self) -> None:
        """Errors: `ConfigError` for values that cannot work."""
        if not self.prefill and not self.decode and self.workers < 1:
            raise ConfigError("workers must be at least 1")
        for name in ("routers", "frontends", "block_size", "max_sequences"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 1")
        if self.with_router and self.routers != self.frontends:
            raise ConfigError("with-router needs as many routers as frontends")
        self._validate_handoffs()
        if not 0 <= self.slow_share <= 1 or not self.slow_factor > 0:
            raise ConfigError(
                f"slow {self.slow_share:g}:{self.slow_factor:g} is not possible: give the share "
                "of the workers (0 to 1) and how many times as long they take"
            )
        for name in ("noise", "delay", "patience", "warm_up"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name.replace('_', '-')} must not be negative")
        if self.engine == "torch":
            raise ConfigError(
                "the torch engine computes a model, in real time: simulate needs one that models "
                "time, such as --engine sim (bench/gpu and `pdserve bench` measure torch)"
            )
        if self.kv_tokens < self.block_size:
            raise ConfigError(f"kv-tokens {self.kv_tokens} is less than one block")
        if not self.sample_every > 0:
            raise ConfigError("sample-every must be more than 0 seconds")
        self._validate_tiers()

    def _validate_handoffs(self) -> None:
        if min(self.workers, self.prefill, self.decode) < 0:
            raise ConfigError("there cannot be less than 0 workers of a kind")
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError("--prefill and --decode belong together: at least one worker of each")
        if self.disagg not in DISAGG:
            raise ConfigError(f"disagg {self.disagg!r} is unknown: use one of {', '.join(DISAGG)}")
        if not self.bandwidth > 0:
            raise ConfigError("bandwidth must be more than 0 bytes per second")
        for name in ("transfer_latency", "disagg_min_tokens", "disagg_max_queue"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name.replace('_', '-')} must not be negative")

    def _validate_tiers(self) -> None:
        if min(self.host_kv, self.disk_kv) < 0:
            raise ConfigError("host-kv and disk-kv must not be negative")
        if self.kv_fetch not in KV_FETCH:
            raise ConfigError(
                f"kv-fetch {self.kv_fetch!r} is unknown: use one of {', '.join(KV_FETCH)}"
            )
        if self.has_tiers and self.engine in WITHOUT_TIERS:
            raise ConfigError(f"engine {self.engine} has no KV tiers: use --engine sim")

    @property
    def fetches(self) -> bool:
        """True if workers may fetch KV from each other."""
        return self.kv_fetch != "never"

    @property
    def moves_kv(self) -> bool:
        """True if KV may go from worker to worker, by handoffs or fetches."""
        return bool(self.prefill or self.fetches or self.scaling)

    @property
    def has_tiers(self) -> bool:
        """True if workers have tiers below their devices, or fetch KV."""
        return bool(self.host_kv or self.disk_kv or self.fetches)

    @property
    def all_workers(self) -> int:
        """Number of workers of all three kinds."""
        return self.workers + self.prefill + self.decode

    @property
    def slow_workers(self) -> int:
        """Number of slow workers; they are the last ones."""
        return round(self.slow_share * self.all_workers)
