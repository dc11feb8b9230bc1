"""The TensorRT-LLM core: `LLM` in the engine process, driven through its asynchronous interface.

TensorRT-LLM schedules, computes and samples in processes of its own; its `LLM` object hands
requests to them and results to an asyncio loop. The core owns that loop in a thread (`LoopThread`),
runs requests there (`Requests`), and translates KV events and statistics. What TensorRT-LLM cannot
do is refused by name, what it does only nearly is counted.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import threading
from collections import Counter, deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from pdserve.engine_core.kit import (
    SelfSchedulingCore,
    capabilities_without_kv,
    read_model_limits,
)
from pdserve.errors import ConfigError, EngineDied, InvalidRequest, Overloaded
from pdserve.messages.engine import LoadProgress
from pdserve_engines.loop_thread import LoopThread, pause
from pdserve_engines.tensorrt_llm.events import KvNames
from pdserve_engines.tensorrt_llm.options import llm_arguments
from pdserve_engines.tensorrt_llm.outputs import PoolStats, pool_stats
from pdserve_engines.tensorrt_llm.package import load_package
from pdserve_engines.tensorrt_llm.params import Support, inexact, refusal
from pdserve_engines.tensorrt_llm.requests import Reports, Requests
from pdserve_engines.tensorrt_llm.versions import release_of, untested

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from pdserve.clock import Clock
    from pdserve.engine_core.kit import ModelLimits
    from pdserve.errors import PdserveError
    from pdserve.ids import Seconds
    from pdserve.messages.engine import EngineCapabilities, EngineSpec, EngineStats
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve_engines.tensorrt_llm.choices import Choice
    from pdserve_engines.tensorrt_llm.options import LlmArguments
    from pdserve_engines.tensorrt_llm.package import Package

__all__ = ["TensorRtLlmCore"]

_log = logging.getLogger(__name__)

CANCEL_LIMIT: Seconds = 120.0
"""Seconds that TensorRT-LLM may take to end a cancelled request. With a KV transfer under way it
keeps the blocks until its transport is done, which its own deadlines bound to about a minute; after
that the engine is broken and is started anew."""
STOP_LIMIT: Seconds = 10.0
"""Seconds for requests to end at the core's stop."""
SHUTDOWN_LIMIT: Seconds = 30.0
"""Seconds for TensorRT-LLM's own processes to end."""
_POLL: Seconds = 0.1
"""Seconds between two looks for events and statistics; each look waits as long itself."""
_RETRY: Seconds = 5.0
"""Seconds until the next look after one that failed."""
_EVENTS = 1 << 17
"""KV events that wait for the core's next step; the oldest are dropped, which shows as a gap."""

_LOSSES = {
    "guided_decoding_backend": "there are no grammars",
    "enable_iter_perf_stats": "there are no statistics of its KV pool",
    "kv_cache_config.event_buffer_max_size": "routers do not see its prefix cache",
    "scheduler_config.waiting_queue_policy": "priorities are ignored",
    "enable_chunked_prefill": "prompts longer than --max-batch-tokens fail",
    "kv_cache_config.free_gpu_memory_fraction": "--gpu-memory-utilization is ignored",
    "kv_cache_config.max_gpu_total_bytes": "--kv-memory is ignored",
}
"""Optional setting that a release lacks -> what that means."""


class TensorRtLlmCore(SelfSchedulingCore):
    """A core whose requests TensorRT-LLM computes."""

    def __init__(self, clock: Clock, load: Callable[[], Package] = load_package) -> None:
        """`load`: imports TensorRT-LLM."""
        super().__init__(clock)
        self._load_package = load
        self._package_used: Package | None = None
        self._llm: Any = None
        self._loop: LoopThread | None = None
        self._requests: Requests | None = None
        self._support = Support(0, 0)
        self._names: KvNames | None = None
        self._raw: deque[Mapping[str, Any]] = deque(maxlen=_EVENTS)
        self._pool = PoolStats()
        self._limit = 0
        self.inexact: Counter[str] = Counter()
        """Requests that were served only nearly as asked, by the field that was not exact."""

    # ------------------------------------------------------------------ life

    def open(
        self, spec: EngineSpec, progress: Callable[[LoadProgress], None]
    ) -> EngineCapabilities:
        """Build `LLM`. Raises `ConfigError` for options and models that it refuses."""
        progress(LoadProgress(stage="importing TensorRT-LLM"))
        package = self._load_package()
        limits = read_model_limits(spec)
        arguments = llm_arguments(spec, limits.max_model_len, package.arguments)
        if "cache_salt" not in package.generate_parameters:
            raise ConfigError("this release of TensorRT-LLM cannot keep tenants' prefixes apart")
        progress(LoadProgress(stage="TensorRT-LLM loads the model"))
        try:
            self._llm = package.llm(**arguments.values)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"TensorRT-LLM refuses the configuration: {error}") from error
        self._support = _support(package, limits, arguments)
        self._limit = spec.max_sequences + spec.max_waiting
        capabilities = self._capabilities_of(spec, limits, package, arguments)
        self._start(package, spec, capabilities, arguments)
        return capabilities

    def _start(
        self,
        package: Package,
        spec: EngineSpec,
        capabilities: EngineCapabilities,
        arguments: LlmArguments,
    ) -> None:
        self._loop = loop = LoopThread("tensorrt-llm", self._broke)
        reports = Reports(
            self._report_delta,
            self._report_error,
            self._failed,
            self._report_prefilled,
            lambda: self.wake(),
        )
        self._package_used = package
        self._requests = Requests(loop, package, self._llm, self._support, self.clock, reports)
        loop.start()
        if capabilities.kv_events:
            secret = spec.hash_secret or secrets.token_bytes(32)
            self._names = KvNames(capabilities.block_size, secret, capabilities.compat_hash)
            loop.submit(self._watch("KV events", self._look_for_events), "KV events")
        if arguments.has("enable_iter_perf_stats"):
            loop.submit(self._watch("statistics", self._look_for_stats), "statistics")

    def _capabilities_of(
        self, spec: EngineSpec, limits: ModelLimits, package: Package, arguments: LlmArguments
    ) -> EngineCapabilities:
        events = arguments.has("kv_cache_config.event_buffer_max_size")
        features = ("grammar", "bans") if self._support.grammar else ("bans",)
        basic = capabilities_without_kv(
            spec, limits, features=features, dtype=spec.dtype, device="cuda"
        )
        return replace(
            basic,
            kv_events=events,
            compat_hash=_compat_hash(spec, limits, package, arguments),
            reduced="; ".join(_shortfalls(arguments)),
            untested=untested(package.version),
        )

    def shutdown(self) -> int:
        """End the loop and TensorRT-LLM's processes, each within its limit."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop(STOP_LIMIT)
        llm, self._llm = self._llm, None
        if llm is not None:
            closing = threading.Thread(target=llm.shutdown, name="llm-shutdown", daemon=True)
            closing.start()
            closing.join(SHUTDOWN_LIMIT)
            if closing.is_alive():
                _log.warning("TensorRT-LLM has not shut down after %g s", SHUTDOWN_LIMIT)
        self._requests = None
        return 0

    # ------------------------------------------------------------------ submissions

    def add(self, handle: int, request: GenerateRequest) -> None:
        """Hand a request to TensorRT-LLM. Raises `Overloaded` and, for what this release cannot do,
        `InvalidRequest`."""
        self._check(request)
        self._begin(handle, request)

    def _begin(
        self,
        handle: int,
        request: GenerateRequest,
        disaggregated: Mapping[str, Any] | None = None,
        **hand_over: Any,
    ) -> None:
        """Hand a checked request to the loop's thread; see `Requests.begin`."""
        if self._loop is not None and self._requests is not None:
            begin = partial(self._requests.begin, **hand_over)
            self._loop.call_soon(begin, handle, request, self.clock.now(), disaggregated)

    @property
    def _package(self) -> Package:
        assert self._package_used is not None, "the engine is not loaded"
        return self._package_used

    def _check(self, request: GenerateRequest) -> None:
        if self.sequences > self._limit:
            raise Overloaded(f"{self._limit} sequences run or wait", retry_after=1.0)
        if (unable := refusal(request, self._support)) is not None:
            field, what = unable
            raise InvalidRequest(f"the tensorrt_llm engine has no {what}", param=field)
        if field := inexact(request, self._support):
            if not self.inexact[field]:
                _log.warning("requests are served that are not exact in %r", field)
            self.inexact[field] += 1
        if self._names is not None:
            self._names.note_prompt(request.prompt, request.cache_salt)

    def drop(self, handle: int) -> None:
        """Cancel a request; its output is discarded at once, TensorRT-LLM frees it soon."""
        if self._loop is not None and self._requests is not None:
            self._loop.call_soon(self._requests.drop, handle)

    # ------------------------------------------------------------------ steps

    @property
    def busy(self) -> bool:
        """There are KV events to translate."""
        return bool(self._raw)

    def next_due(self) -> Seconds | None:
        """When a cancelled request must have ended."""
        oldest = None if self._requests is None else self._requests.oldest_cancel
        return None if oldest is None else oldest + CANCEL_LIMIT

    def advance(self, now: Seconds) -> None:
        """Translate KV events, and watch what was cancelled."""
        if self._names is not None:
            while self._raw:
                self.kv_events.extend(self._names.translate(self._raw.popleft()))
        due = self.next_due()
        if due is not None and due <= now:
            raise EngineDied(
                f"TensorRT-LLM has not ended a cancelled request for {CANCEL_LIMIT:g} s"
            )

    @property
    def waiting(self) -> int:
        """Choices without a token; TensorRT-LLM does not say which of them it has begun."""
        return 0 if self._requests is None else min(self._requests.waiting, self.sequences)

    def rekey(self, hash_secret: bytes) -> None:
        """Name blocks by another secret. TensorRT-LLM keeps what it has cached."""
        if self._names is not None:
            self.kv_events += self._names.rekey(hash_secret)

    def stats(self) -> EngineStats:
        """The kit's statistics with TensorRT-LLM's blocks. Its last record is older than its last
        change, so a pool at rest counts as free."""
        basic, pool = super().stats(), self._pool
        used = pool.used_blocks if self.sequences else 0
        return replace(
            basic,
            blocks_total=pool.blocks,
            blocks_used=used,
            blocks_free=max(pool.blocks - used, 0),
            inexact_continuations=sum(self.inexact.values()),
        )

    # ------------------------------------------------------------------ in the loop's thread

    def _report_delta(self, choice: Choice, delta: TokenDelta) -> None:
        self.post(delta)

    def _report_error(self, choice: Choice, error: PdserveError) -> None:
        self.post_error(choice.handle, error)

    def _report_prefilled(self, choice: Choice) -> None:
        """Only a core that hands prompts over asks for one."""

    async def _watch(self, name: str, look: Callable[[], Awaitable[None]]) -> None:
        """Look again and again; a look that fails is repeated after a while."""
        failing = False
        while True:
            try:
                await look()
                failing = False
            except Exception as error:
                if not failing:
                    _log.warning("TensorRT-LLM gives no %s: %s", name, error)
                    self._raw.append(_LOST)
                    self.wake()
                failing = True
            await pause(_RETRY if failing else _POLL)

    async def _look_for_events(self) -> None:
        async for event in self._llm.get_kv_cache_events_async(timeout=_POLL):
            self._raw.extend(event if isinstance(event, list) else [event])
            self.wake()

    async def _look_for_stats(self) -> None:
        async for record in self._llm.get_stats_async(timeout=_POLL):
            self._pool = pool_stats(record)

    def _broke(self, name: str, error: BaseException) -> None:
        """Something of the loop has failed; requests report their own errors."""
        self._failed(EngineDied(f"TensorRT-LLM, {name}: {type(error).__name__}: {error}"))

    def _failed(self, error: BaseException) -> None:
        if self._requests is not None:
            self._requests.die()
        self.post_failure(error)


_LOST: Mapping[str, Any] = {"event_id": -1, "data": {"type": "created"}}
"""Not the event that is expected next, so what is known of the pool is dropped."""


def _support(package: Package, limits: ModelLimits, arguments: LlmArguments) -> Support:
    return Support(
        vocab_size=limits.vocab_size,
        max_model_len=limits.max_model_len,
        grammar=arguments.has("guided_decoding_backend"),
        penalties=release_of(package.version).penalties,
        ignore_length="prompt_ignore_length" in package.sampling_fields,
    )


def _shortfalls(arguments: LlmArguments) -> list[str]:
    """What is less than asked for, with the reason."""
    return [
        f"this release of TensorRT-LLM has no setting {path}: {_LOSSES[path]}"
        for path in arguments.missing
    ]


def _compat_hash(
    spec: EngineSpec, limits: ModelLimits, package: Package, arguments: LlmArguments
) -> str:
    """Equal for workers that may use each other's blocks: the checkpoint, its data type, the KV's
    format, and the release, which decides how a hand-over is written. Parallel layouts do not
    count: TensorRT-LLM converts between them."""
    cache = arguments.values.get("kv_cache_config", {})
    facts = (
        package.version,
        limits.model_type,
        _checkpoint(Path(spec.model)),
        spec.dtype,
        str(cache.get("dtype", "auto")),
        spec.block_size,
        str(arguments.values.get("quant_config")),
    )
    return f"tensorrt_llm {hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}"


def _checkpoint(folder: Path) -> tuple[str, tuple[tuple[str, int], ...]]:
    """What tells checkpoints apart without reading the weights: the configuration, and names and
    sizes of the files with weights."""
    config = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
    weights = sorted(folder.glob("*.safetensors"))
    return config, tuple((path.name, path.stat().st_size) for path in weights)
