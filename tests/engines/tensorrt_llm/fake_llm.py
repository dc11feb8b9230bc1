"""A fake of tensorrt_llm for tests: the names that the adapter uses, with the behaviours of
behaviours.toml and no others.

It computes no model: the next token is a hash of the tokens so far (and of the seed, if it
samples). It generates when its results are read, in the reader's loop, so tests need no time.
"""

from __future__ import annotations

import asyncio
import enum
import hashlib
import json
import math
import tomllib
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

BEHAVIOURS = {
    entry["name"]: entry
    for entry in tomllib.loads(
        Path(__file__).with_name("behaviours.toml").read_text(encoding="utf-8")
    )["behaviour"]
}


def behaviour(name: str) -> None:
    """Mark what the next lines do, by its name in behaviours.toml."""
    assert name in BEHAVIOURS, f"{name} has no source"


class RequestError(RuntimeError):
    pass


@dataclass(kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


@dataclass(kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad_token_ids: list[int] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    n: int = 1
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_decoding: GuidedDecodingParams | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        behaviour("ranges")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError("top_p")
        if (self.top_k or 0) < 0 or (self.temperature or 0) < 0:
            raise ValueError("top_k or temperature")
        guide = self.guided_decoding
        if guide is not None:
            guides = guide.json, guide.regex, guide.grammar, guide.json_object, guide.structural_tag
            if sum(map(bool, guides)) > 1:
                raise ValueError("one guide only")
        behaviour("greedy-once")
        if self.n > 1 and self.greedy:
            raise ValueError("greedy with n > 1")

    @property
    def greedy(self) -> bool:
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        return unset or self.top_k == 1 or self.top_p == 0.0 or self.temperature == 0


@dataclass(kw_only=True)
class SamplingParams14(SamplingParams):
    prompt_ignore_length: int | None = None


@dataclass(kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None

    def __post_init__(self) -> None:
        behaviour("request-types")
        if self.request_type not in ("context_only", "generation_only", "context_and_generation"):
            raise ValueError(f"Unknown request type: {self.request_type}")


@dataclass(slots=True)
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True)
class CompletionOutput:
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    disaggregated_params: DisaggregatedParams | None = None
    diff_from: int = 0

    @property
    def token_ids_diff(self) -> list[int]:
        behaviour("diff")
        return self.token_ids[self.diff_from :]


class RequestOutput:
    """A request, which generates when it is read."""

    def __init__(self, llm: FakeLlm, prompt: list[int], params: SamplingParams, **options: Any):
        behaviour("needs-loop")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise AssertionError("there was no event loop") from None
        self.llm = llm
        self.prompt_token_ids = prompt
        self.params = params
        self.options = options
        self.priority: float = options.get("priority", 0.5)
        self.salt: str | None = options.get("cache_salt")
        self.disaggregated: DisaggregatedParams | None = options.get("disaggregated_params")
        self.outputs = [CompletionOutput()]
        self.cached_tokens = 0
        self.finished = False
        self.cancelled = False
        self.slot = False
        self.turn = asyncio.Event()
        llm.arrivals += 1
        self.order = (-self.priority if llm.by_priority else 0.0, llm.arrivals)
        behaviour("max-tokens-capped")
        self.room = min(params.max_tokens, llm.max_seq_len - len(prompt))

    def abort(self) -> None:
        self.cancelled = True
        self.turn.set()

    def __aiter__(self) -> RequestOutput:
        behaviour("one-object")
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        if self.llm.broken is not None:
            raise self.llm.broken
        await self._wait_for_turn()
        output = self.outputs[0]
        output.diff_from = len(output.token_ids)
        if self.llm.broken is not None:
            raise self.llm.broken
        if (error := self.llm.take_fault(self.prompt_token_ids)) is not None:
            behaviour("request-error")
            self._end(None)
            raise error
        if self.cancelled:
            behaviour("reasons")
            self._end("cancelled")
        else:
            for _ in range(self.llm.per_answer):
                if not self.finished:
                    self._generate(output)
        return self

    async def _wait_for_turn(self) -> None:
        if not self.slot and not self.cancelled:
            self.llm.enqueue(self)
            await self.turn.wait()
        else:
            await asyncio.sleep(0)
        await self.llm.gate.wait()

    def _generate(self, output: CompletionOutput) -> None:
        if not output.token_ids:
            self.cached_tokens = self.llm.match(self.prompt_token_ids, self.salt)
        given = self.disaggregated
        if given is not None and given.request_type == "generation_only" and not output.token_ids:
            assert given.first_gen_tokens is not None
            token = given.first_gen_tokens[0]
            logits = {token: 0.0}
        else:
            token, logits = self._sample(output)
        output.token_ids.append(token)
        if self._is_second_of_handover(output):
            behaviour("handed-token-not-in-diff")
            output.diff_from = 1
        behaviour("logprobs-zero-is-none")
        if self.params.logprobs:
            behaviour("logprobs-by-token")
            output.logprobs.append(_logprobs(logits, token, self.params.logprobs))
        self.llm.store(self.prompt_token_ids + output.token_ids, self.salt)
        self._stop(output, token)

    def _is_second_of_handover(self, output: CompletionOutput) -> bool:
        given = self.disaggregated
        handed = given is not None and given.request_type == "generation_only"
        return handed and self.llm.old_diff and len(output.token_ids) <= 2

    def _sample(self, output: CompletionOutput) -> tuple[int, dict[int, float]]:
        params, tokens = self.params, self.prompt_token_ids + output.token_ids
        behaviour("bias-for-every-token")
        bias = params.embedding_bias
        if bias is not None and len(bias) != self.llm.vocab_size:
            raise RequestError("embedding_bias has another size than the vocabulary")
        key = "greedy" if params.greedy else f"{params.seed} {len(output.token_ids)}"
        logits = self.llm.logits(tokens, key)
        if self.llm.penalties:
            behaviour("penalties")
            self._penalize(logits, tokens)
        if bias is not None:
            logits = {token: value + float(bias[token]) for token, value in logits.items()}
        best = max(logits, key=lambda token: (logits[token], -token))
        if logits[best] == -math.inf:
            raise RequestError("no token is left")
        return best, logits

    def _penalize(self, logits: dict[int, float], tokens: list[int]) -> None:
        params = self.params
        ignored = getattr(params, "prompt_ignore_length", None) or 0
        counted = Counter(tokens[ignored:])
        repetition = params.repetition_penalty or 1.0
        for token in set(tokens) & logits.keys():
            value = logits[token]
            logits[token] = value / repetition if value > 0 else value * repetition
        for token in counted.keys() & logits.keys():
            logits[token] -= (params.presence_penalty or 0.0) + counted[token] * (
                params.frequency_penalty or 0.0
            )

    def _stop(self, output: CompletionOutput, token: int) -> None:
        params = self.params
        behaviour("ignore-eos")
        end_id = -1 if params.ignore_eos else params.end_id
        if self.disaggregated is not None and self.disaggregated.request_type == "context_only":
            behaviour("handover")
            output.disaggregated_params = DisaggregatedParams(
                request_type="context_only",
                first_gen_tokens=[token],
                ctx_request_id=self.llm.arrivals,
                opaque_state=self.llm.endpoint,
                disagg_request_id=self.disaggregated.disagg_request_id,
            )
            behaviour("reasons")
            self._end("not_finished")
        elif token == end_id:
            self._end("stop")
        elif token in (params.stop_token_ids or []):
            output.stop_reason = token
            if not params.include_stop_str_in_output:
                behaviour("stop-token-cut")
                output.token_ids = output.token_ids[:-1]
            self._end("stop")
        elif len(output.token_ids) >= self.room:
            self._end("length")

    def _end(self, reason: str | None) -> None:
        self.finished = True
        self.outputs[0].finish_reason = reason
        self.llm.leave(self)


def _logprobs(logits: dict[int, float], token: int, top: int) -> dict[int, Logprob]:
    total = math.log(sum(math.exp(value) for value in logits.values() if value > -1e9))
    ranked = sorted(logits, key=lambda each: -logits[each])
    wanted = dict.fromkeys([*ranked[:top], token])
    return {each: Logprob(logits[each] - total, ranked.index(each) + 1) for each in wanted}


class Iteration:
    """What `get_stats_async` and `get_kv_cache_events_async` return."""

    def __init__(self, queue: deque[Any], timeout: float) -> None:
        self.queue = queue

    def __aiter__(self) -> Iteration:
        return self

    async def __anext__(self) -> Any:
        behaviour("iterations")
        if not self.queue:
            raise StopAsyncIteration
        return self.queue.popleft()


class FakeLlm:
    """`LLM`; tests reach into it."""

    release = "1.2.1"
    made: ClassVar[list[FakeLlm]] = []
    """The newest ones, for tests whose core is behind a client."""
    old_diff = False
    penalties = False
    per_answer = 1
    """Tokens per answer."""
    endpoint = b"endpoint"
    pool_blocks = 1 << 16

    def __init__(self, model: str, **arguments: Any) -> None:
        unknown = arguments.keys() - TorchLlmArgs.model_fields.keys()
        if unknown:
            raise ValueError(f"Extra inputs are not permitted: {sorted(unknown)}")
        config = json.loads((Path(model) / "config.json").read_bytes())
        self.vocab_size: int = config["vocab_size"]
        self.arguments = arguments
        self.made.append(self)
        del self.made[:-4]
        self.max_seq_len: int = arguments["max_seq_len"]
        self.slots: int = arguments["max_batch_size"]
        cache = arguments["kv_cache_config"]
        self.block: int = cache["tokens_per_block"]
        self.reuse: bool = cache["enable_block_reuse"]
        self.buffer: int = cache.get("event_buffer_max_size", 0)
        policy = arguments.get("scheduler_config", {}).get("waiting_queue_policy")
        self.by_priority = policy == "priority"
        self.arrivals = 0
        self.waiting: list[RequestOutput] = []
        self.requests: list[RequestOutput] = []
        """All that were ever submitted."""
        self.faults: dict[tuple[int, ...], Exception] = {}
        self.broken: Exception | None = None
        self.down = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.stats: deque[Any] = deque(maxlen=1000)
        self.events: deque[Any] = deque()
        self.next_event = 0
        self.stored: OrderedDict[int, int | None] = OrderedDict()

    # ---------------------------------------------------------------- LLM's methods

    def generate_async(
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        cache_salt: str | None = None,
    ) -> RequestOutput:
        return self._generate(inputs, sampling_params, disaggregated_params, cache_salt=cache_salt)

    def _generate(
        self, inputs: Any, params: SamplingParams, disaggregated: Any, **options: Any
    ) -> RequestOutput:
        behaviour("shutting-down")
        if self.down:
            raise RuntimeError("LLM is shutting down")
        guide = params.guided_decoding
        if guide is not None and guide.structural_tag:
            behaviour("lark")
            raise RequestError("Unsupported guide type")
        if disaggregated is not None and disaggregated.request_type == "context_only":
            behaviour("context-only-one-token")
            params.max_tokens = 1
        prompt = list(inputs["prompt_token_ids"])
        result = RequestOutput(self, prompt, params, disaggregated_params=disaggregated, **options)
        self.requests.append(result)
        return result

    def get_stats_async(self, timeout: float = 2) -> Iteration:
        return Iteration(self.stats, timeout)

    def get_kv_cache_events_async(self, timeout: float = 2) -> Iteration:
        return Iteration(self.events, timeout)

    def shutdown(self) -> None:
        self.down = True

    # ---------------------------------------------------------------- scheduling

    @property
    def running(self) -> int:
        return sum(1 for result in self.requests if result.slot)

    def enqueue(self, result: RequestOutput) -> None:
        behaviour("priority-order")
        self.waiting.append(result)
        self.waiting.sort(key=lambda each: each.order)
        self._admit()

    def leave(self, result: RequestOutput) -> None:
        result.slot = False
        if result in self.waiting:
            self.waiting.remove(result)
        self._admit()
        self.stats.append(self._record())

    def _admit(self) -> None:
        while self.waiting and self.running < self.slots:
            result = self.waiting.pop(0)
            result.slot = True
            result.turn.set()

    def _record(self) -> dict[str, Any]:
        used = self.running
        return {
            "iter": self.arrivals,
            "iterLatencyMS": 1.0,
            "numActiveRequests": self.running,
            "numQueuedRequests": len(self.waiting),
            "kvCacheStats": {
                "maxNumBlocks": self.pool_blocks,
                "freeNumBlocks": self.pool_blocks - used,
                "usedNumBlocks": used,
                "tokensPerBlock": self.block,
            },
        }

    def take_fault(self, prompt: list[int]) -> Exception | None:
        return self.faults.pop(tuple(prompt), None)

    def logits(self, tokens: list[int], key: str) -> dict[int, float]:
        text = f"{tokens[-4:]} {len(tokens)} {key}".encode()
        digest = hashlib.shake_128(text).digest(self.vocab_size)
        return {token: value / 64 for token, value in enumerate(digest)}

    # ---------------------------------------------------------------- prefix cache

    def _hashes(self, tokens: list[int], salt: str | None) -> list[int]:
        found, before = [], f"{salt}"
        for start in range(0, len(tokens) - self.block + 1, self.block):
            before += f" {tokens[start : start + self.block]}"
            digest = hashlib.blake2b(before.encode(), digest_size=8).digest()
            found.append(int.from_bytes(digest, "little"))
        return found

    def match(self, prompt: list[int], salt: str | None) -> int:
        """Tokens of full blocks that are stored, of all but the last token."""
        matched = 0
        if self.reuse:
            for key in self._hashes(prompt[:-1], salt):
                if key not in self.stored:
                    break
                self.stored.move_to_end(key)
                matched += self.block
        return matched

    def store(self, tokens: list[int], salt: str | None) -> None:
        """Keep the blocks whose KV has been computed: of all tokens but the last one."""
        if not self.reuse:
            return
        parent: int | None = None
        for index, key in enumerate(self._hashes(tokens[:-1], salt)):
            if key not in self.stored:
                self.stored[key] = parent
                block = tokens[index * self.block : (index + 1) * self.block]
                self._tell(
                    {"type": "stored", "parent_hash": parent, "blocks": [_block(key, block)]}
                )
            parent = key
        while len(self.stored) > self.pool_blocks:
            self._remove()

    def _remove(self) -> None:
        """Evict the least recently used leaf."""
        parents = set(self.stored.values())
        key = next(each for each in self.stored if each not in parents)
        del self.stored[key]
        behaviour("kv-removals-joined")
        if self.events and self.events[-1]["data"]["type"] == "removed":
            self.events[-1]["data"]["block_hashes"].append(key)
        else:
            self._tell({"type": "removed", "block_hashes": [key]})

    def _tell(self, data: dict[str, Any]) -> None:
        behaviour("kv-event-form")
        if not self.buffer:
            return
        self.events.append(
            {"event_id": self.next_event, "data": data, "window_size": self.max_seq_len}
        )
        self.next_event += 1
        behaviour("kv-events-dropped")
        while len(self.events) > self.buffer:
            self.events.popleft()


def _block(key: int, tokens: list[int]) -> dict[str, Any]:
    return {
        "type": "stored_block",
        "block_hash": key,
        "tokens": [
            {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens
        ],
        "cache_level": 0,
        "priority": 35,
    }


class FakeLlm14(FakeLlm):
    """`LLM` of the 1.4 pre-releases."""

    release = "1.4.0rc1"
    penalties = True

    def generate_async(  # type: ignore[override]
        self,
        inputs: Any,
        sampling_params: Any = None,
        lora_request: Any = None,
        prompt_adapter_request: Any = None,
        streaming: bool = False,
        kv_cache_retention_config: Any = None,
        disaggregated_params: Any = None,
        trace_headers: Any = None,
        _postproc_params: Any = None,
        scheduling_params: Any = None,
        conversation_params: Any = None,
        cache_salt: str | None = None,
        priority: float = 0.5,
    ) -> RequestOutput:
        return self._generate(
            inputs,
            sampling_params,
            disaggregated_params,
            cache_salt=cache_salt,
            priority=priority,
        )


# -------------------------------------------------------------------- argument model


class _Field:
    def __init__(self, annotation: Any) -> None:
        self.annotation = annotation


class Policy(enum.Enum):
    FCFS = "fcfs"
    PRIORITY = "priority"


def _model(**fields: Any) -> Any:
    described = {name: _Field(annotation) for name, annotation in fields.items()}
    return type("Model", (), {"model_fields": described})


KvCacheConfig = _model(
    enable_block_reuse=bool,
    tokens_per_block=int,
    free_gpu_memory_fraction=float,
    max_gpu_total_bytes=int,
    event_buffer_max_size=int,
    dtype=str,
)
TorchLlmArgs = _model(
    model=str,
    dtype=str,
    tensor_parallel_size=int,
    max_seq_len=int,
    max_batch_size=int,
    max_num_tokens=int,
    enable_chunked_prefill=bool,
    kv_cache_config=KvCacheConfig,
    guided_decoding_backend=str,
    enable_iter_perf_stats=bool,
    scheduler_config=_model(waiting_queue_policy=Policy, capacity_scheduler_policy=str),
    cache_transceiver_config=_model(backend=str),
    backend=str,
    max_beam_width=int,
)


def fake_modules(llm: type[FakeLlm]) -> Any:
    """What `importlib.import_module` would give for tensorrt_llm."""
    newer = issubclass(llm, FakeLlm14)
    package = SimpleNamespace(
        __version__=llm.release,
        LLM=llm,
        SamplingParams=SamplingParams14 if newer else SamplingParams,
        DisaggregatedParams=DisaggregatedParams,
    )
    modules = {
        "tensorrt_llm": package,
        "tensorrt_llm.llmapi": SimpleNamespace(GuidedDecodingParams=GuidedDecodingParams),
        "tensorrt_llm.llmapi.llm_args": SimpleNamespace(TorchLlmArgs=TorchLlmArgs),
    }
    return modules.__getitem__
