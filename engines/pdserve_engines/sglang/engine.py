"""Loads SGLang and wraps what the core uses of it. The only file that touches SGLang's objects.

The names it uses are listed in tests/contracts/sglang.toml, so that a new release of SGLang is
compared before anybody runs it. It decides nothing about requests.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib
import logging
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.engine_core.kit import read_model_limits
from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineCapabilities, LoadProgress
from pdserve_engines.sglang.options import server_arguments
from pdserve_engines.sglang.process_guard import child_processes, kept_handlers
from pdserve_engines.sglang.versions import untested

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from pdserve.messages.engine import EngineSpec

__all__ = ["SglangEngine", "SglangPackage", "import_sglang", "load_engine"]

_log = logging.getLogger(__name__)

_RESERVED = 2
"""Tokens of the context, or of the pool, that SGLang leaves unused by each request."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


@dataclass(frozen=True, slots=True)
class SglangPackage:
    """What the adapter takes from the package."""

    engine: Callable[..., Any]
    """The class `Engine`."""
    fields: tuple[str, ...]
    """Fields of `ServerArgs`."""
    version: str


def import_sglang() -> SglangPackage:
    """Import the package. Raises `ConfigError` if it is not installed."""
    # Logprobs before temperature and penalties, as pdserve's API has them; read at the import.
    os.environ.setdefault("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    try:
        with kept_handlers():
            engine = importlib.import_module("sglang.srt.entrypoints.engine")
            arguments = importlib.import_module("sglang.srt.server_args")
            version = importlib.import_module("sglang.version")
    except ImportError as error:
        raise ConfigError(
            f"the sglang engine needs the package sglang ({error}): pip install 'pdserve[sglang]'"
        ) from error
    return SglangPackage(
        engine.Engine, _field_names(arguments.ServerArgs), str(version.__version__)
    )


def _field_names(owner: Any) -> tuple[str, ...]:
    """Fields of `ServerArgs`, a msgspec struct; in older releases a dataclass."""
    names = getattr(owner, "__struct_fields__", None) or owner.__dataclass_fields__
    return tuple(names)


def load_engine(
    sglang: SglangPackage,
    spec: EngineSpec,
    events: str,
    progress: Callable[[LoadProgress], None],
    children: Callable[[], frozenset[int]] = child_processes,
) -> SglangEngine:
    """Load the model into SGLang; `events` is the folder for the sockets of KV events, or empty.

    Raises `ConfigError` for what SGLang refuses of the configuration, and if this process has
    children: SGLang would kill them at its end.
    """
    arguments = server_arguments(spec, sglang.fields, events)
    before = children()
    if before:
        raise ConfigError(
            "the sglang engine needs an engine process of its own, since SGLang kills all children "
            "of its process; serve other workers of this machine as nodes of their own"
        )
    progress(LoadProgress(stage="loading the model into SGLang"))
    try:
        with kept_handlers():
            engine = sglang.engine(**arguments)
    except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
        raise ConfigError(f"SGLang refuses this configuration: {_first_lines(error)}") from error
    return SglangEngine(engine, spec, sglang.version, children)


def _first_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]


class SglangEngine:
    """A loaded SGLang engine; its scheduler and its detokenizer are child processes."""

    def __init__(
        self,
        engine: Any,
        spec: EngineSpec,
        version: str,
        children: Callable[[], frozenset[int]],
    ) -> None:
        """`children` lists this process's children: now SGLang's, and no others."""
        self.version = version
        self._engine = engine
        self._children = children
        self._ours = children()
        self._arguments = _resolved(engine.server_args)
        self._loras = frozenset(adapter.id for adapter in spec.loras)
        # With decode context parallelism SGLang's tree, and its events, have larger pages.
        shards = int(self._arguments.get("dcp_size") or 1)
        self.page = int(self._arguments["page_size"] or 1) * shards
        self.pool_tokens = int(_scheduler_info(engine)["max_total_num_tokens"])
        self.seeded = bool(self._arguments.get("enable_deterministic_inference"))
        self.reasoning = bool(self._arguments.get("reasoning_parser"))
        self.capabilities = self._describe(spec)

    # ------------------------------------------------------------------ what it is

    def _describe(self, spec: EngineSpec) -> EngineCapabilities:
        limits = read_model_limits(spec)
        fits = min(limits.max_model_len, self.pool_tokens)
        features = ["grammar"] if (Path(spec.model) / "tokenizer.json").is_file() else []
        if self._loras:
            features.append("lora")
        dtype = str(self._arguments.get("dtype") or spec.dtype)
        return EngineCapabilities(
            engine=spec.engine,
            model_type=limits.model_type,
            dtype=dtype,
            device=str(self._arguments.get("device") or spec.device),
            max_model_len=max(1, fits - _RESERVED),
            vocab_size=limits.vocab_size,
            block_size=self.page,
            num_blocks=self.pool_tokens // self.page,
            block_bytes=0,
            max_batch_tokens=spec.max_batch_tokens,
            max_sequences=spec.max_sequences,
            prompt_logprobs=True,
            kv_events=spec.prefix_cache,
            eos_token_ids=limits.eos_token_ids,
            compat_hash=self._compat_hash(spec, dtype),
            features=tuple(features),
            reduced=self._reduced(limits.max_model_len),
            untested=untested(self.version),
        )

    def _reduced(self, context: int) -> str:
        """Why a shorter context is served than was asked for."""
        if self.pool_tokens >= context:
            return ""
        return (
            f"SGLang's pool holds {self.pool_tokens} tokens, fewer than the context of {context}: "
            "give it more memory or set --max-model-len"
        )

    def _compat_hash(self, spec: EngineSpec, dtype: str) -> str:
        """Equal for workers whose blocks hold the same numbers: checkpoint, dtype, KV format."""
        facts = (
            "sglang",
            dtype,
            str(self._arguments.get("kv_cache_dtype")),
            str(self._arguments.get("quantization")),
            self.page,
        )
        digest = hashlib.sha256(repr(facts).encode())
        folder = Path(spec.model)
        digest.update((folder / "config.json").read_bytes())
        for pattern in _WEIGHTS:
            for path in sorted(folder.glob(pattern)):
                digest.update(f"{path.name} {path.stat().st_size} ".encode())
        return digest.hexdigest()[:32]

    def has_lora(self, lora: str) -> bool:
        """Whether an adapter is loaded."""
        return lora in self._loras

    # ------------------------------------------------------------------ requests, in the loop

    async def generate(
        self, rid: str, arguments: dict[str, Any], salt: str, lora: str
    ) -> AsyncGenerator[Any, None]:
        """The chunks of one request. Closing the stream aborts it."""
        if salt:
            arguments = arguments | {"cache_salt": salt}
        if lora:
            arguments = arguments | {"lora_path": lora}
        stream: AsyncGenerator[Any, None] = await self._engine.async_generate(rid=rid, **arguments)
        return stream

    def abort(self, rid: str) -> None:
        """Tell the scheduler to end a request; unknown ones are ignored."""
        self._engine.tokenizer_manager.abort_request(rid)

    async def load(self) -> Any | None:
        """SGLang's newest record of its load; None before there is one."""
        loads = await self._engine.tokenizer_manager.get_loads()
        return loads[0] if loads else None

    async def clear_cache(self) -> None:
        """Drop all cached blocks; SGLang does it only while no request runs."""
        await self._engine.tokenizer_manager.flush_cache()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """End SGLang's processes, and no others.

        SGLang's own `shutdown` kills every child of this process, so it is called only if there are
        no strangers among them; it is also taken off the list of what runs at exit.
        """
        atexit.unregister(self._engine.shutdown)
        strangers = self._children() - self._ours
        if strangers:
            _log.warning("this process has children besides SGLang's; they are left alone")
            self._kill_own()
            return
        try:
            with kept_handlers():
                self._engine.shutdown()
        except RuntimeError as error:
            _log.warning("SGLang has not ended all its processes: %s", _first_lines(error))

    def _kill_own(self) -> None:
        for pid in self._children() & self._ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _resolved(arguments: Any) -> dict[str, Any]:
    """The arguments with what SGLang has chosen for those that were left open."""
    if hasattr(arguments, "resolved_dict"):
        return dict(arguments.resolved_dict())
    return dict(vars(arguments))


def _scheduler_info(engine: Any) -> dict[str, Any]:
    info: dict[str, Any] = engine._scheduler_init_result.scheduler_infos[0]
    return info
