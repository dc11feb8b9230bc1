"""A stand-in for SGLang's `Engine` in one process, for the adapter's tests.

It behaves as behaviours.toml says SGLang does, place by place; `like` names the entries. The model
is a function of the tokens so far. What SGLang does with grammars, penalties and adapters is not
faked.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import zlib
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.clock import SystemClock
from pdserve_engines.sglang.core import SglangCore
from pdserve_engines.sglang.engine import SglangPackage
from pdserve_engines.sglang.events import END

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable

ENGINE = "tests.engines.sglang.fake_sglang:create"
FAKED: set[str] = set()
"""Names of behaviours."""
PUBLISHERS: dict[str, FakePublisher] = {}
"""By endpoint, as subscribers find them."""
ENGINES: list[FakeEngine] = []
"""Engines that are not shut down."""

VERSION = "0.5.23"
POOL_TOKENS = 4096
END_TOKEN = 63
"""The end token that the fake's tokenizer knows."""
VOCABULARY = 64


def like(*names: str) -> Callable[[Any], Any]:
    """Names the behaviours that a function or class stands in for."""
    FAKED.update(names)
    return lambda item: item


FIELDS = (
    "model_path", "context_length", "dtype", "page_size", "max_running_requests", "device",
    "chunked_prefill_size", "mem_fraction_static", "disable_radix_cache", "random_seed",
    "grammar_backend", "incremental_streaming_output", "stream_interval", "log_level",
    "enable_priority_scheduling", "kv_events_config", "enable_deterministic_inference",
    "reasoning_parser", "base_gpu_id", "enable_lora", "lora_paths", "max_loras_per_batch",
    "quantization", "kv_cache_dtype", "tp_size",
)  # fmt: skip
"""Of `ServerArgs`, as tests/contracts/sglang.toml lists them."""


def create(**arguments: Any) -> SglangCore:
    """A core with a fake engine, in the process of the test."""
    return SglangCore(
        SystemClock(),
        find=lambda: SglangPackage(FakeEngine, FIELDS, VERSION),
        sockets=FakeSockets,
        children=frozenset,
        poll_interval=0.01,
        **arguments,
    )


def create_newer() -> SglangCore:
    """The same with a release that is not known."""
    made = create()
    made._find = lambda: SglangPackage(FakeEngine, FIELDS, "0.9.1")
    return made


@dataclass(eq=False)
class Request:
    """A request in the scheduler, with the state that the caller's side keeps of it."""

    rid: str
    input: list[int]
    sampling: dict[str, Any]
    rest: dict[str, Any]
    room: int = 0
    output: list[int] = field(default_factory=list)
    cached: int = 0
    begun: bool = False
    finish: dict[str, Any] | None = None
    to_finish: dict[str, Any] | None = None
    sent: int = 0
    chunks: deque[dict[str, Any]] = field(default_factory=deque)
    event: asyncio.Event = field(default_factory=asyncio.Event)
    known: list[int] = field(default_factory=list)
    """All output ids on the caller's side."""
    dispatched: bool = False
    abort_sent: bool = False


class FakeEngine:
    """`sglang.srt.entrypoints.engine.Engine`."""

    kills: Callable[[], None] | None = None
    """What kills the children; None: nothing is killed, since the process is the test's."""
    spawns = 0
    """Child processes that the launch starts."""

    @like("at_exit", "launch_handler", "root_logger")
    def __init__(self, **arguments: Any) -> None:
        unknown = arguments.keys() - set(FIELDS)
        if unknown:
            raise TypeError(f"Unexpected keyword argument '{min(unknown)}'")
        config = json.loads((Path(arguments["model_path"]) / "config.json").read_text())
        arguments.setdefault("context_length", config["max_position_embeddings"])
        self.server_args = SimpleNamespace(resolved_dict=lambda: arguments, **arguments)
        atexit.register(self.shutdown)
        logging.getLogger().handlers = [logging.NullHandler()]
        logging.getLogger().setLevel(logging.WARNING)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGQUIT, lambda number, frame: os._exit(3))
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        self.children = [subprocess.Popen(command) for _ in range(self.spawns)]
        self._scheduler_init_result = SimpleNamespace(
            scheduler_infos=[{"max_total_num_tokens": POOL_TOKENS}]
        )
        self.tokenizer_manager = FakeTokenizerManager(arguments)
        ENGINES.append(self)

    async def async_generate(self, *, stream: bool, **arguments: Any) -> Any:
        assert stream
        return self.tokenizer_manager.generate_request(arguments)

    @like("children")
    def shutdown(self) -> None:
        if self in ENGINES:
            ENGINES.remove(self)
        for endpoint in [e for e, p in PUBLISHERS.items() if p is self.tokenizer_manager.publisher]:
            del PUBLISHERS[endpoint]
        if self.kills is not None:
            self.kills()


def kill_children() -> None:
    """Kill every child of this process."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, path.read_text().split()):
            os.kill(pid, signal.SIGKILL)


class FakeTokenizerManager:
    """`TokenizerManager`, and the scheduler behind it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.rid_to_state: dict[str, Request] = {}
        self.incremental = bool(arguments.get("incremental_streaming_output"))
        self.seeded = bool(arguments.get("enable_deterministic_inference"))
        self.page = int(arguments["page_size"])
        self.context = int(arguments["context_length"])
        self.running_limit = int(arguments["max_running_requests"])
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.pages: dict[tuple[str, tuple[int, ...]], int] = {}
        self.aborts: list[str] = []
        self.seen: list[dict[str, Any]] = []
        """Arguments of all requests."""
        self.publisher = FakePublisher()
        if arguments.get("kv_events_config"):
            config = json.loads(arguments["kv_events_config"])
            assert config["publisher"] == "zmq"
            PUBLISHERS[config["endpoint"]] = PUBLISHERS[config["replay_endpoint"]] = self.publisher
        self.radix = not arguments.get("disable_radix_cache")
        self.task: asyncio.Task[None] | None = None
        self.steps = 0
        self.pause_at: int | None = None
        """Steps after which the scheduler stands still, until a test takes this away."""
        self.wake = asyncio.Event()

    @like("loop_handlers")
    def auto_create_handle_loop(self) -> None:
        if self.task is not None:
            return
        loop = asyncio.get_running_loop()
        self.task = loop.create_task(self._handle_loop(), name="fake-sglang")
        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGTERM, lambda: None)
            loop.add_signal_handler(signal.SIGQUIT, lambda: os._exit(3))

    # ------------------------------------------------------------------ the caller's side

    @like("duplicate_id", "stream", "abandoned")
    async def generate_request(self, arguments: dict[str, Any]) -> AsyncGenerator[Any, None]:
        self.auto_create_handle_loop()
        self.seen.append(arguments)
        rest = dict(arguments)
        rid = rest.pop("rid")
        if rid in self.rid_to_state:
            raise ValueError(f"Duplicate request ID detected: {rid}")
        request = Request(rid, list(rest.pop("input_ids")), dict(rest.pop("sampling_params")), rest)
        self.rid_to_state[rid] = request
        try:
            self._validate(request)
            self._verify(request.sampling)
            await asyncio.sleep(0)
            self.waiting.append(request)
            request.dispatched = True
            self.wake.set()
            while True:
                await request.event.wait()
                request.event.clear()
                chunk = self._coalesce(request)
                yield chunk
                if chunk["meta_info"]["finish_reason"] is not None:
                    return
        except BaseException:
            if self.rid_to_state.get(rid) is request:
                if request.dispatched:
                    self.abort_request(rid)
                else:
                    del self.rid_to_state[rid]
            raise

    @like("length_check")
    def _validate(self, request: Request) -> None:
        length = len(request.input)
        if length >= self.context:
            raise ValueError(f"The input ({length} tokens) is longer than the model's context")
        if length + request.sampling["max_new_tokens"] > self.context:
            raise ValueError("Requested token count exceeds the model's maximum context length")

    @like("parameter_check", "greedy")
    def _verify(self, sampling: dict[str, Any]) -> None:
        assert sampling["temperature"] >= 0
        assert 0 < sampling["top_p"] <= 1
        assert sampling["top_k"] == -1 or sampling["top_k"] >= 1
        if not 0 < sampling["repetition_penalty"] <= 2:
            raise ValueError("repetition_penalty must be in (0, 2]")
        if not 0 <= sampling["min_new_tokens"] <= sampling["max_new_tokens"]:
            raise ValueError("min_new_tokens must be in [0, max_new_tokens]")
        if not -(2**63) <= sampling["sampling_seed"] <= 2**63 - 1:
            raise ValueError("sampling_seed must be in [-2**63, 2**63 - 1]")
        assert all(isinstance(key, str) for key in sampling.get("logit_bias") or {})

    @like("coalesced")
    def _coalesce(self, request: Request) -> dict[str, Any]:
        chunks = list(request.chunks)
        request.chunks.clear()
        chunk = dict(chunks[-1])
        if self.incremental and len(chunks) > 1:
            chunk["output_ids"] = [token for each in chunks for token in each["output_ids"]]
            meta = chunk["meta_info"] = dict(chunk["meta_info"])
            for key in (
                "output_token_logprobs",
                "output_top_logprobs",
                "output_token_ids_logprobs",
            ):
                if key in meta:
                    meta[key] = [item for each in chunks for item in each["meta_info"].get(key, [])]
        return chunk

    @like("abort")
    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        state = self.rid_to_state.get(rid)
        if not rid or abort_all or state is None or state.abort_sent:
            return
        state.abort_sent = True
        self._abort_in_scheduler(rid)

    @like("load")
    async def get_loads(self) -> list[Any]:
        self.auto_create_handle_loop()
        used = sum(len(each.input) + len(each.output) for each in self.running)
        return [
            SimpleNamespace(
                num_running_reqs=len(self.running),
                num_waiting_reqs=len(self.waiting),
                num_waiting_uncached_tokens=sum(len(each.input) for each in self.waiting),
                num_used_tokens=used,
            )
        ]

    @like("flush")
    async def flush_cache(self) -> None:
        self.auto_create_handle_loop()
        if not self.running and not self.waiting:
            self.pages.clear()
            self.publisher.publish([{"type": "AllBlocksCleared"}])

    # ------------------------------------------------------------------ the scheduler

    async def _handle_loop(self) -> None:
        while True:
            if not self.waiting and not self.running:
                self.wake.clear()
                await self.wake.wait()
            # Another thread takes the pause away, so an asyncio event does not fit.
            while self.pause_at is not None and self.steps >= self.pause_at:  # noqa: ASYNC110
                await asyncio.sleep(0)
            self._step()
            self.steps += 1
            await asyncio.sleep(0)

    def _step(self) -> None:
        self.waiting.sort(key=lambda each: -each.rest["priority"])
        while self.waiting and len(self.running) < self.running_limit:
            request = self.waiting.pop(0)
            self._prefill(request)
            self.running.append(request)
        for request in list(self.running):
            request.output.append(self._sample(request))
            self._update_finish(request)
            self._emit(request)
            if request.finish is not None:
                self.running.remove(request)
                self._store(request, [*request.input, *request.output[:-1]])

    @like("room")
    def _prefill(self, request: Request) -> None:
        limit = min(self.context - 1, POOL_TOKENS - 1)
        request.room = max(
            0, min(request.sampling["max_new_tokens"], limit - len(request.input) - 1)
        )
        salt = request.rest.get("cache_salt") or ""
        if self.radix and request.rest.get("logprob_start_len", -1) == -1:
            while request.cached + self.page < len(request.input):
                end = request.cached + self.page
                if (salt, tuple(request.input[:end])) not in self.pages:
                    break
                request.cached = end
        self._store(request, request.input)

    @like("stored_events")
    def _store(self, request: Request, tokens: list[int]) -> None:
        if not self.radix:
            return
        salt, parent = request.rest.get("cache_salt") or "", None
        new: list[int] = []
        before = None
        for end in range(self.page, len(tokens) + 1, self.page):
            key = salt, tuple(tokens[:end])
            if key not in self.pages:
                before = parent if not new else before
                self.pages[key] = random.getrandbits(63)
                new.append(self.pages[key])
            parent = self.pages[key]
        if new:
            last = len(tokens) // self.page * self.page
            self.publisher.publish([stored(new, before, tokens[last - len(new) * self.page : last],
                                           self.page, salt)])  # fmt: skip

    @like("seeds", "noise_by_position", "min_new_tokens")
    def _sample(self, request: Request) -> int:
        sampling = request.sampling
        context = [*request.input, *request.output]
        noise: object = None
        if sampling["temperature"] > 0:
            noise = (sampling["sampling_seed"], len(context)) if self.seeded else random.random()
        token = likeliest(context, noise)
        masked: set[int] = set()
        if len(request.output) < sampling["min_new_tokens"]:
            masked = {*sampling["stop_token_ids"], END_TOKEN}
        while token in masked:
            token = (token + 1) % VOCABULARY
        return token

    @like("token_stops", "stop_before_length", "finish_reasons")
    def _update_finish(self, request: Request) -> None:
        sampling, token = request.sampling, request.output[-1]
        if request.to_finish is not None:
            request.finish = request.to_finish
        elif not sampling["ignore_eos"] and token in {*sampling["stop_token_ids"], END_TOKEN}:
            request.finish = {"type": "stop", "matched": token}
        elif len(request.output) >= request.room:
            request.finish = {"type": "length", "length": request.room}

    @like("deltas", "counts", "stop_in_output")
    def _emit(self, request: Request) -> None:
        delta = request.output[request.sent :]
        offset, request.sent = request.sent, len(request.output)
        request.known.extend(delta)
        meta = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.input),
            "completion_tokens": len(request.output),
            "cached_tokens": request.cached,
            "num_retractions": 0,
            **self._logprobs(request, offset if self.incremental else 0),
        }
        ids = delta if self.incremental else request.known
        if request.finish is not None:
            ids = list(ids)
            self.rid_to_state.pop(request.rid, None)
        request.chunks.append({"text": "", "output_ids": ids, "meta_info": meta})
        request.event.set()

    @like("logprobs")
    def _logprobs(self, request: Request, offset: int) -> dict[str, Any]:
        if not request.rest.get("return_logprob"):
            return {}
        meta: dict[str, Any] = {"input_token_logprobs": [], "output_token_logprobs": []}
        top = request.rest["top_logprobs_num"]
        starts = request.rest.get("logprob_start_len", -1)
        inputs = request.input[starts:] if starts >= 0 else []
        meta["input_token_logprobs"] = [
            (None if not index else -1.5, token, None) for index, token in enumerate(inputs)
        ]
        outputs = request.output[offset:]
        meta["output_token_logprobs"] = [(-0.5, token, None) for token in outputs]
        if top:
            meta["input_top_logprobs"] = [
                None if not index else _alternatives(token, top)
                for index, token in enumerate(inputs)
            ]
            meta["output_top_logprobs"] = [_alternatives(token, top) for token in outputs]
        if request.rest.get("token_ids_logprob") is not None:
            ids = request.rest["token_ids_logprob"]
            meta["output_token_ids_logprobs"] = [[(-3.0, id, None) for id in ids] for _ in outputs]
        return meta

    @like("abort_by_prefix", "abort_echo")
    def _abort_in_scheduler(self, rid: str) -> None:
        self.aborts.append(rid)
        for request in [each for each in self.waiting if each.rid.startswith(rid)]:
            self.waiting.remove(request)
            ids = request.known[-1:] if self.incremental else request.known
            reason = {"type": "abort", "message": "Abort in waiting queue"}
            meta = {"id": rid, "finish_reason": reason, "completion_tokens": len(request.known)}
            request.chunks.append({"text": "", "output_ids": ids, "meta_info": meta})
            self.rid_to_state.pop(request.rid, None)
            request.event.set()
        for request in self.running:
            if request.rid.startswith(rid):
                request.to_finish = {"type": "abort", "message": "Aborted", "status_code": None}


def likeliest(context: list[int], noise: object = None) -> int:
    """The token that the model prefers."""
    return zlib.crc32(repr((context, noise)).encode()) % (VOCABULARY - 1)


def greedy(prompt: Iterable[int], count: int) -> list[int]:
    """The output of a greedy request."""
    context = list(prompt)
    start = len(context)
    for _ in range(count):
        context.append(likeliest(context))
    return context[start:]


def _alternatives(token: int, count: int) -> list[tuple[float, int, None]]:
    return [(-0.5 - index, (token + index) % VOCABULARY, None) for index in range(count)]


def stored(
    hashes: list[int], parent: int | None, tokens: list[int], page: int, salt: str
) -> dict[str, Any]:
    """A `BlockStored` event."""
    event = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": page,
        "lora_id": None,
        "medium": "GPU",
    }
    return event | ({"cache_salt": salt} if salt else {})


@like("publisher", "replay")
class FakePublisher:
    """`ZmqEventPublisher` without sockets."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, bytes]] = []
        self.live: list[asyncio.Queue[list[bytes]]] = []
        self.number = 0
        self.dropped: set[int] = set()
        """Numbers that do not reach subscribers."""
        self.forgotten: set[int] = set()
        """Numbers that are not kept for replay."""

    def publish(self, events: list[dict[str, Any]]) -> None:
        payload = msgspec.msgpack.encode([0.0, events, 0])
        number, self.number = self.number, self.number + 1
        if number not in self.forgotten:
            self.kept.append((number, payload))
        if number not in self.dropped:
            for queue in self.live:
                queue.put_nowait([b"", number.to_bytes(8, "big"), payload])

    def replay(self, start: bytes) -> list[list[bytes]]:
        first = int.from_bytes(start, "big")
        found = [
            [b"", b"", number.to_bytes(8, "big"), payload]
            for number, payload in self.kept
            if number >= first
        ]
        return [*found, [b"", b"", END, b""]]


class _Live:
    def __init__(self, publisher: FakePublisher) -> None:
        self.queue: asyncio.Queue[list[bytes]] = asyncio.Queue()
        publisher.live.append(self.queue)

    async def recv_multipart(self) -> list[bytes]:
        return await self.queue.get()

    async def send_multipart(self, frames: list[bytes]) -> object:
        raise AssertionError("a subscriber sends nothing")


class _Replay:
    def __init__(self, publisher: FakePublisher) -> None:
        self.publisher = publisher
        self.answers: deque[list[bytes]] = deque()

    async def recv_multipart(self) -> list[bytes]:
        return self.answers.popleft()

    async def send_multipart(self, frames: list[bytes]) -> object:
        empty, start = frames
        assert empty == b""
        self.answers.extend(self.publisher.replay(start))
        return None


class FakeSockets:
    """The subscriber's two sockets."""

    def __init__(self, live: str, replay: str) -> None:
        self.live = _Live(PUBLISHERS[live])
        self.replay = _Replay(PUBLISHERS[replay])
        self.closed = False

    def close(self) -> None:
        self.closed = True
