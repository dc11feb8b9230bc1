"""A vLLM of a few hundred lines, for the core and its engine without the package.

It schedules, preempts, caches blocks and reports as vLLM 0.32.0 does; the model is a hash. What it
does was read in these files of that release, and each part names its own:

- `v1/engine/core.py`: `add_request`, `abort_requests`, `step`, `post_step`, `shutdown`.
- `v1/engine/core_client.py`: `InprocClient`.
- `v1/core/sched/scheduler.py`: `schedule`, `update_from_output`, `finish_requests`.
- `v1/core/block_pool.py`: `cache_full_blocks`, `_maybe_evict_cached_block`, `reset_prefix_cache`.
- `v1/structured_output/__init__.py`: `grammar_init`, `grammar_bitmask`, `accept_tokens`.
- `v1/core/kv_cache_utils.py`: `_gen_mm_extra_hash_keys`, `to_event_extra_keys`.
- `sampling_params.py`, `v1/request.py`, `v1/outputs.py`, `v1/engine/__init__.py`: the records.

`install` puts modules of these names in place of the package's.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdserve_engines.vllm.options import OURS
from tests.engines.vllm import fake_vision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

VERSION = "0.32.0"
VOCAB = 1280
"""As the bundled checkpoint, whose tokenizer grammars need."""
BLOCKS = 64
STOP, LENGTH, ABORT, ERROR, _REPETITION = range(5)
QUEUED, SCHEDULED, PREEMPTED = 1, 2, 3
WAITING, WAITING_FOR_GRAMMAR, RUNNING, PREEMPTED_STATUS, FINISHED = range(5)

_CHANGED = {"quantization": None, "max_logprobs": 20, "max_loras": 1, "max_lora_rank": 16}
EngineArgsBase: Any = make_dataclass(
    "EngineArgsBase",
    [(name, Any, field(default=None)) for name in OURS]
    + [(name, Any, field(default=value)) for name, value in _CHANGED.items()]
    + [("enforce_eager", bool, field(default=False)), ("num_blocks", int, field(default=BLOCKS))],
)


class EngineArgs(EngineArgsBase):  # type: ignore[misc]
    """`engine/arg_utils.py`: what it does not know raises a TypeError, bad values a ValueError."""

    def create_engine_config(self) -> Any:
        if self.quantization == "bogus":
            raise ValueError("Unknown quantization method: bogus")
        length = self.max_model_len or 2048
        model = SimpleNamespace(
            max_model_len=length,
            dtype="torch.float32",
            quantization=self.quantization,
            get_vocab_size=lambda: VOCAB,
            get_hidden_size=lambda: 4,
            get_total_num_kv_heads=lambda: 2,
            pooler_config=SimpleNamespace(seq_pooling_type="LAST"),
            hf_config=SimpleNamespace(num_labels=4),
            get_multimodal_config=lambda: SimpleNamespace(
                mm_processor_kwargs=None, media_io_kwargs={}
            ),
        )
        return SimpleNamespace(
            arguments=self,
            model_config=model,
            cache_config=SimpleNamespace(
                enable_prefix_caching=self.enable_prefix_caching, cache_dtype="auto"
            ),
            scheduler_config=SimpleNamespace(
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_num_seqs=self.max_num_seqs,
            ),
            device_config=SimpleNamespace(device_type="cpu"),
            parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
            speculative_config=None,
            use_v2_model_runner=False,
            kv_transfer_config=None,
        )


# ---------------------------------------------------------------- records


@dataclass
class StructuredOutputsParams:
    """`sampling_params.py`; only grammars are used."""

    grammar: str | None = None


@dataclass
class SamplingParams:
    """`sampling_params.py`."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = field(default_factory=list)
    min_tokens: int = 0
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    logprob_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    skip_clone: bool = False
    _bad_words_token_ids: list[list[int]] = field(default_factory=list)


@dataclass
class PoolingParams:
    """`pooling_params.py`."""

    task: str
    use_activation: bool | None = None


@dataclass
class LoRARequest:
    """`lora/request.py`."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass
class EngineCoreRequest:
    """`v1/engine/__init__.py`."""

    request_id: str
    prompt_token_ids: list[int]
    mm_features: list[Any] | None
    sampling_params: SamplingParams | None
    pooling_params: PoolingParams | None
    arrival_time: float
    lora_request: LoRARequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    priority: int = 0


@dataclass
class EngineCoreOutput:
    """`v1/engine/__init__.py`."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    prefill_stats: Any = None


def _record(kind: str, **values: Any) -> Any:
    """One of vLLM's KV events, whose class's name tells its kind (`distributed/kv_events.py`)."""
    return type(kind, (SimpleNamespace,), {})(**values)


class Request:
    """`v1/request.py`: ordered by priority, arrival and id."""

    def __init__(self, wanted: EngineCoreRequest) -> None:
        self.request_id = wanted.request_id
        self.sampling = wanted.sampling_params
        self.pooling = wanted.pooling_params
        self.prompt = list(wanted.prompt_token_ids)
        self.tokens = list(wanted.prompt_token_ids)
        self.order = (wanted.priority, wanted.arrival_time, wanted.request_id)
        self.lora = None if wanted.lora_request is None else wanted.lora_request.lora_name
        self.salt = wanted.cache_salt
        self.images = wanted.mm_features or []
        self.status = WAITING
        self.num_computed_tokens = 0
        self.blocks: list[int] = []
        self.cached_blocks = 0
        self.events: list[Any] = []
        self.prefill_stats: Any = SimpleNamespace(num_cached_tokens=0)
        self.grammar: Future[Any] | None = None
        self.noise = random.Random(0 if self.sampling is None else self.sampling.seed)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def note(self, kind: int) -> None:
        self.events.append(SimpleNamespace(type=kind, timestamp=time.monotonic()))

    def take_events(self) -> list[Any] | None:
        events, self.events = self.events, []
        return events or None


# ---------------------------------------------------------------- the pool


class BlockPool:
    """`v1/core/block_pool.py`: equal blocks may exist twice; those that nobody holds stay cached in
    the order in which they were left."""

    def __init__(self, count: int, block_size: int) -> None:
        self.num_gpu_blocks = count
        self.block_size = block_size
        self.cached_block_hash_to_block: dict[Any, set[int]] = {}
        self.queue: list[Any] = []
        self._names: dict[int, Any] = {}
        self._users: dict[int, int] = {}
        # One block, the null block, is never free.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, count))

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._forget(block)
        self._users[block] = 1
        return block

    def _forget(self, block: int) -> None:
        name = self._names.pop(block, None)
        if name is None:
            return
        copies = self.cached_block_hash_to_block[name]
        copies.discard(block)
        if not copies:
            del self.cached_block_hash_to_block[name]
        self.queue.append(_record("BlockRemoved", block_hashes=[name], medium="GPU", group_idx=0))

    def find(self, name: Any) -> int | None:
        return next(iter(self.cached_block_hash_to_block.get(name, ())), None)

    def touch(self, block: int) -> None:
        self._users[block] = self._users.get(block, 0) + 1
        self._free.pop(block, None)

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None

    def cache(self, request: Request) -> None:
        """Name the blocks that are full by now, and report them in one event."""
        size, first = self.block_size, request.cached_blocks
        last = min(request.num_computed_tokens, len(request.tokens)) // size
        if first >= last:
            return
        names = [name_of(request, number, size) for number in range(first, last)]
        for number, name in zip(range(first, last), names, strict=True):
            self._names[request.blocks[number]] = name
            self.cached_block_hash_to_block.setdefault(name, set()).add(request.blocks[number])
        request.cached_blocks = last
        lora = () if request.lora is None else (request.lora,)
        root = () if request.salt is None else (request.salt,)
        self.queue.append(
            _record(
                "BlockStored",
                block_hashes=names,
                parent_block_hash=name_of(request, first - 1, size) if first else None,
                token_ids=request.tokens[first * size : last * size],
                block_size=size,
                medium="GPU",
                lora_name=request.lora,
                extra_keys=[
                    (*lora, *fake_vision.keys_of(request.images, number, size), *salt) or None
                    for number in range(first, last)
                    for salt in [() if number else root]
                ],
                group_idx=0,
            )
        )

    def reset(self) -> bool:
        if len(self._free) != self.num_gpu_blocks - 1:
            return False
        self.cached_block_hash_to_block.clear()
        self._names.clear()
        self.queue.append(_record("AllBlocksCleared"))
        return True

    def take_events(self) -> list[Any]:
        events, self.queue = self.queue, []
        return events


def name_of(request: Request, number: int, size: int) -> bytes:
    """A block's hash: of all tokens and images up to its end, the salt and the adapter."""
    images = [fake_vision.keys_of(request.images, each, size) for each in range(number + 1)]
    text = repr((request.tokens[: (number + 1) * size], images, request.salt, request.lora))
    return hashlib.sha256(text.encode()).digest()


# ---------------------------------------------------------------- the model


def logits_of(
    tokens: list[int], lora: str | None, images: list[Any] | None = None
) -> np.ndarray[Any, Any]:
    """Of the last three tokens and their number, and of what the images show."""
    seen = [each.data for each in images or ()]
    text = repr((tokens[-3:], len(tokens), lora, *seen))
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
    return np.random.RandomState(seed).standard_normal(VOCAB) * 3.0


def log_softmax(logits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())


def sample(request: Request, mask: np.ndarray[Any, Any] | None) -> tuple[int, np.ndarray[Any, Any]]:
    """(token, logprobs of all), in the order of `v1/sample/sampler.py`: raw logprobs; allowed
    tokens; grammar; bad words; bias and least length; penalties; noise."""
    wanted = request.sampling
    assert wanted is not None
    logits = logits_of(request.tokens, request.lora, request.images)
    raw = log_softmax(logits)
    if mask is not None:
        logits[~mask] = -np.inf
    if wanted.allowed_token_ids:
        keep = np.zeros(VOCAB, bool)
        keep[wanted.allowed_token_ids] = True
        logits[~keep] = -np.inf
    for *before, last in wanted._bad_words_token_ids:
        if not before or request.tokens[-len(before) :] == before:
            logits[last] = -np.inf
    for token, bias in (wanted.logit_bias or {}).items():
        logits[token] += bias
    if len(request.output) < wanted.min_tokens:
        logits[wanted.stop_token_ids] = -np.inf
    _penalise(logits, request, wanted)
    if wanted.temperature > 0:
        logits = logits / wanted.temperature
        draws = np.array([request.noise.random() for _ in range(VOCAB)])
        logits = logits - np.log(-np.log(np.clip(draws, 1e-12, 1 - 1e-12)))
    return int(logits.argmax()), raw


def _penalise(logits: np.ndarray[Any, Any], request: Request, wanted: SamplingParams) -> None:
    seen = list(set(request.tokens))
    scaled = np.where(logits > 0, 1 / wanted.repetition_penalty, wanted.repetition_penalty)
    logits[seen] = (logits * scaled)[seen]
    for token in request.output:
        logits[token] -= wanted.frequency_penalty
    for token in set(request.output):
        logits[token] -= wanted.presence_penalty


def rows_of(raw: list[np.ndarray[Any, Any]], tokens: list[int], top: int, ranks: str) -> Any:
    """`LogprobsLists` or `LogprobsTensors` (`v1/outputs.py`): the token itself, then the best."""
    best = [np.argsort(-row, kind="stable")[:top] for row in raw]
    ids = [[token, *row.tolist()] for token, row in zip(tokens, best, strict=True)]
    values = [row[each] for row, each in zip(raw, ids, strict=True)]
    rank = [int((row >= row[token]).sum()) for row, token in zip(raw, tokens, strict=True)]
    return SimpleNamespace(
        logprob_token_ids=np.array(ids),
        logprobs=np.array(values, dtype=np.float32),
        **{ranks: np.array(rank)},
    )


# ---------------------------------------------------------------- the scheduler


class Grammars:
    """`v1/structured_output/__init__.py`: compiles in threads of its own."""

    def __init__(self) -> None:
        self.backend: Any = None
        self.executor = ThreadPoolExecutor(max_workers=1)

    def begin(self, request: Request) -> None:
        assert request.sampling is not None
        wanted = request.sampling.structured_outputs
        if wanted is not None:
            request.status = WAITING_FOR_GRAMMAR
            stops = request.sampling.stop_token_ids
            request.grammar = self.executor.submit(
                self.backend.compile_grammar, "grammar", wanted.grammar, stop_token_ids=stops
            )

    def mask(self, request: Request) -> np.ndarray[Any, Any] | None:
        """The row of the bitmask, as the sampler reads it."""
        if request.grammar is None:
            return None
        bitmask = self.backend.allocate_token_bitmask(2)
        assert bitmask.dtype == torch.int32
        request.grammar.result().fill_bitmask(bitmask, 1)
        bits = np.unpackbits(bitmask[1].numpy().view(np.uint8), bitorder="little")
        return bits[:VOCAB].astype(bool)


class FullAttentionSpec(SimpleNamespace):
    """`v1/kv_cache_interface.py`."""


class Scheduler:
    """`v1/core/sched/scheduler.py`, with the policy `priority` and chunked prompts."""

    def __init__(self, config: Any, grammars: Grammars) -> None:
        self._limits = config.scheduler_config
        self._max_len = config.model_config.max_model_len
        self._prefix = config.cache_config.enable_prefix_caching
        self._grammars = grammars
        size = config.arguments.block_size
        spec = FullAttentionSpec(block_size=size, page_size_bytes=size * 64)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
        self.pool = BlockPool(config.arguments.num_blocks, size)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[group])
        self.kv_cache_manager = SimpleNamespace(block_pool=self.pool)
        self.kv_event_publisher: Any = None
        self.connector = None
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.finished_req_ids: set[str] = set()
        self.failed_grammars: list[Request] = []
        self.preempted = False
        """A step that preempts begins nothing."""

    def has_requests(self) -> bool:
        """Also True once after a request has ended, so that a step tells the workers."""
        return bool(self.running or self.waiting or self.finished_req_ids)

    def add_request(self, request: Request) -> None:
        assert request.request_id not in self.requests, "duplicate request id"
        self.requests[request.request_id] = request
        self.waiting.append(request)
        request.note(QUEUED)

    def finish(self, request: Request) -> None:
        """`_free_request`: blocks are free at once."""
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        request.status = FINISHED
        self.pool.release(request.blocks)
        del self.requests[request.request_id]
        self.finished_req_ids.add(request.request_id)

    def schedule(self) -> dict[str, int]:
        """Request -> tokens of this step."""
        self.finished_req_ids.clear()
        self.preempted = False
        budget, plan = self._limits.max_num_batched_tokens, dict[str, int]()
        for request in list(self.running):
            if request.status == RUNNING:
                count = self._extend(request, budget, plan)
                budget -= count
        if not self.preempted:
            self._begin_waiting(budget, plan)
        return plan

    def _begin_waiting(self, budget: int, plan: dict[str, int]) -> None:
        for request in sorted(self.waiting, key=lambda each: each.order):
            if budget <= 0 or len(self.running) >= self._limits.max_num_seqs:
                return
            if not self._grammar_is_ready(request):
                continue
            self._take_cached(request)
            count = min(budget, len(request.tokens) - request.num_computed_tokens)
            if not self._allocate(request, count):
                self._give_back(request)
                return
            self.waiting.remove(request)
            self.running.append(request)
            request.status = RUNNING
            request.note(SCHEDULED)
            plan[request.request_id] = count
            budget -= count

    def _grammar_is_ready(self, request: Request) -> bool:
        if request.status != WAITING_FOR_GRAMMAR:
            return True
        assert request.grammar is not None
        if not request.grammar.done():
            return False
        if request.grammar.exception() is not None:
            self.failed_grammars.append(request)
            return False
        request.status = WAITING
        return True

    def _take_cached(self, request: Request) -> None:
        """The longest cached prefix but the last token; none if prompt logprobs are wanted."""
        if not self._prefix or (request.sampling and request.sampling.prompt_logprobs is not None):
            return
        for number in range((len(request.tokens) - 1) // self.pool.block_size):
            block = self.pool.find(name_of(request, number, self.pool.block_size))
            if block is None:
                break
            self.pool.touch(block)
            request.blocks.append(block)
        request.cached_blocks = len(request.blocks)
        request.num_computed_tokens = len(request.blocks) * self.pool.block_size
        if request.prefill_stats is not None:
            request.prefill_stats.num_cached_tokens = request.num_computed_tokens

    def _give_back(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks, request.cached_blocks, request.num_computed_tokens = [], 0, 0

    def _allocate(self, request: Request, count: int) -> bool:
        need = -(-(request.num_computed_tokens + count) // self.pool.block_size)
        missing = need - len(request.blocks)
        if missing > self.pool.get_num_free_blocks():
            return False
        request.blocks += [self.pool.allocate() for _ in range(missing)]
        return True

    def _extend(self, request: Request, budget: int, plan: dict[str, int]) -> int:
        count = min(budget, len(request.tokens) - request.num_computed_tokens)
        while not self._allocate(request, count):
            victim = max(self.running, key=lambda each: each.order)
            plan.pop(victim.request_id, None)
            self._preempt(victim)
            if victim is request:
                return 0
        plan[request.request_id] = count
        return count

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self._give_back(victim)
        victim.status = PREEMPTED_STATUS
        victim.note(PREEMPTED)
        self.preempted = True
        self.waiting.append(victim)

    def update(self, plan: dict[str, int]) -> dict[int, Any]:
        """`update_from_output`: sample, cache, end, report."""
        outputs = []
        for key, count in plan.items():
            request = self.requests[key]
            request.num_computed_tokens += count
            if self._prefix:
                self.pool.cache(request)
            if request.num_computed_tokens == len(request.tokens):
                outputs.append(self._advance(request))
        for request in self.failed_grammars:
            self.finish(request)
            events = request.take_events()
            outputs.append(
                EngineCoreOutput(request.request_id, [], finish_reason=ERROR, events=events)
            )
        self.failed_grammars.clear()
        if events := self.pool.take_events():
            self.kv_event_publisher.publish(SimpleNamespace(ts=time.time(), events=events))
        return {0: SimpleNamespace(outputs=outputs)}

    def _advance(self, request: Request) -> EngineCoreOutput:
        output = EngineCoreOutput(request.request_id, [])
        if request.pooling is not None:
            output.pooling_output = torch.tensor(logits_of(request.tokens, request.lora)[:4])
            output.finish_reason = STOP
        else:
            self._sample(request, output)
        output.prefill_stats, request.prefill_stats = request.prefill_stats, None
        output.events = request.take_events()
        if output.finish_reason is not None:
            self.finish(request)
        return output

    def _sample(self, request: Request, output: EngineCoreOutput) -> None:
        wanted = request.sampling
        assert wanted is not None
        if wanted.prompt_logprobs is not None and not request.output:
            raw = [
                log_softmax(logits_of(request.tokens[:at], request.lora))
                for at in range(1, len(request.prompt))
            ]
            output.new_prompt_logprobs_tensors = rows_of(
                raw, request.prompt[1:], wanted.prompt_logprobs, "selected_token_ranks"
            )
        token, raw_row = sample(request, self._grammars.mask(request))
        if wanted.logprobs is not None:
            output.new_logprobs = rows_of(
                [raw_row], [token], wanted.logprobs, "sampled_token_ranks"
            )
        request.tokens.append(token)
        output.new_token_ids = [token]
        if request.grammar is not None:
            accepted = request.grammar.result().accept_tokens(request.request_id, [token])
            assert accepted, "vLLM would end the request by itself"
        self._check_stop(request, wanted, output)

    def _check_stop(self, request: Request, wanted: SamplingParams, output: Any) -> None:
        """`v1/core/sched/utils.py: check_stop`."""
        if request.tokens[-1] in wanted.stop_token_ids:
            output.finish_reason, output.stop_reason = STOP, request.tokens[-1]
        elif len(request.tokens) >= self._max_len or len(request.output) >= wanted.max_tokens:
            output.finish_reason = LENGTH


class EngineCore:
    """`v1/engine/core.py`."""

    def __init__(self, config: Any) -> None:
        self.structured_output_manager = Grammars()
        self.scheduler = Scheduler(config, self.structured_output_manager)
        self.model_executor = SimpleNamespace(is_failed=False, execute_model=self._execute)
        self.batch_queue = None
        self.step_fn = self.step
        self.ended = False
        self.before_step: Callable[[], None] = lambda: None
        """For tests: what happens at the next step."""
        self.on_execute: Callable[[], None] = lambda: None
        """For tests: what happens when the workers get a step."""

    def step(self) -> tuple[dict[int, Any], bool]:
        self.before_step()
        if not self.scheduler.has_requests():
            return {}, False
        plan = self.scheduler.schedule()
        future = self.model_executor.execute_model(plan, non_block=True)
        return self.scheduler.update(future.result()), bool(plan)

    def _execute(self, plan: dict[str, int], non_block: bool = False) -> Future[dict[str, int]]:
        """`v1/executor/multiproc_executor.py`: the workers have the step when it returns."""
        assert non_block
        self.on_execute()
        done: Future[dict[str, int]] = Future()
        done.set_result(plan)
        return done

    def post_step(self, model_executed: bool) -> None:
        assert isinstance(model_executed, bool)


class InprocClient:
    """`v1/engine/core_client.py`."""

    last: InprocClient
    """The one that was made last, for tests."""
    tasks: tuple[str, ...] = ("generate",)

    def __init__(
        self, config: Any, executor: Any, log_stats: bool, *, executor_fail_callback: Any = None
    ) -> None:
        assert log_stats, "times of requests come with the statistics"
        self.engine_core = EngineCore(config)
        self.fail = executor_fail_callback
        InprocClient.last = self

    def get_supported_tasks(self) -> tuple[str, ...]:
        return self.tasks

    def add_request(self, wanted: EngineCoreRequest) -> None:
        request = Request(wanted)
        if request.sampling is not None:
            self.engine_core.structured_output_manager.begin(request)
        self.engine_core.scheduler.add_request(request)

    def abort_requests(self, keys: list[str]) -> None:
        scheduler = self.engine_core.scheduler
        for key in set(keys) & scheduler.requests.keys():
            scheduler.finish(scheduler.requests[key])

    def reset_prefix_cache(self) -> bool:
        return self.engine_core.scheduler.pool.reset()

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = ()
    ) -> list[Any]:
        return [method(None, *args)]

    def shutdown(self) -> None:
        self.engine_core.ended = True


class VLLMError(Exception):
    """`exceptions.py`: no ValueError."""


class VLLMValidationError(VLLMError):
    """`exceptions.py`."""


class InputProcessor:
    """`v1/engine/input_processor.py`: the checks of one request."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.renderer = fake_vision.Renderer(fake_vision.images_per_prompt)
        self.model_config = config.model_config
        self.mm_encoder_cache_size = fake_vision.ENCODER_CACHE

    def _get_mm_identifier(self, name: str, lora: Any) -> str:
        return name if lora is None else f"{lora.lora_name}:{name}"

    def _validate_params(self, params: Any, tasks: tuple[str, ...]) -> None:
        if isinstance(params, PoolingParams):
            if params.task not in tasks:
                raise VLLMValidationError(f"Unsupported task: {params.task!r}")
            return
        if params.structured_outputs is not None:
            raise VLLMValidationError("the grammar is of a kind that vLLM does not read")
        for token in (*(params.logit_bias or ()), *(params.allowed_token_ids or ())):
            if not 0 <= token < VOCAB:
                raise VLLMValidationError(f"token id {token} is out of the vocabulary")


class StructuredOutputBackend:
    """`v1/structured_output/backend_types.py`."""


def _modules() -> Iterator[tuple[str, dict[str, Any]]]:
    platform = SimpleNamespace(device_type="cpu", is_cpu=lambda: True)
    executor = SimpleNamespace(get_class=lambda config: object)
    yield "vllm.engine.arg_utils", {"EngineArgs": EngineArgs}
    yield "vllm.platforms", {"current_platform": platform}
    yield "vllm.version", {"__version__": VERSION}
    yield "vllm.v1.engine.core_client", {"InprocClient": InprocClient}
    yield "vllm.v1.executor.abstract", {"Executor": executor}
    yield "vllm.v1.engine", {"EngineCoreRequest": EngineCoreRequest}
    yield "vllm.v1.engine.input_processor", {"InputProcessor": InputProcessor}
    yield (
        "vllm.sampling_params",
        {"SamplingParams": SamplingParams, "StructuredOutputsParams": StructuredOutputsParams},
    )
    yield "vllm.v1.kv_cache_interface", {"FullAttentionSpec": FullAttentionSpec}
    yield "vllm.exceptions", {"VLLMError": VLLMError}
    yield "vllm.pooling_params", {"PoolingParams": PoolingParams}
    yield "vllm.config.kv_events", {"KVEventsConfig": SimpleNamespace}
    yield (
        "vllm.v1.structured_output.backend_types",
        {"StructuredOutputBackend": StructuredOutputBackend},
    )
    yield "vllm.lora.request", {"LoRARequest": LoRARequest}
    yield from fake_vision.modules()


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the modules in place of vLLM's, until the test ends."""
    for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
        patch.delitem(sys.modules, name)
    for name, content in _modules():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if not getattr(sys.modules.get(parent), "__fake__", False):
                module = ModuleType(parent)
                module.__path__ = []
                module.__fake__ = True  # type: ignore[attr-defined]
                patch.setitem(sys.modules, parent, module)
        vars(sys.modules[name]).update(content)


assert {each.name for each in fields(EngineArgs)} >= set(OURS)
