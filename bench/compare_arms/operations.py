"""Runs operations of whatever pdserve can be imported and reports the CPU time of each.

    PYTHONPATH=TREE:TREE/engines python -P bench/compare_arms/operations.py < commands

A command is a line `OPERATION COUNT`; the answer is a line with seconds of CPU time per operation,
all threads included. `bench/compare.py` starts one such process for each of two trees, so nothing
here imports `bench`, and each name of pdserve that has changed is given by all its places (`find`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import inspect
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Final

import uvloop
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    Run = Callable[[int], Awaitable[None]]
    """Performs an operation a given number of times."""

STREAM_TOKENS: Final = 256
SEQUENCES: Final = 256
WORKERS: Final = 16
BLOCKS: Final = 64
"""Blocks of a prompt at the router; the first half is one of `PREFIXES` that workers hold."""
PREFIXES: Final = 32
OPEN: Final = 2
"""Requests in progress per worker while the router decides."""


def find(*places: str) -> Any:
    """Returns the first `module:name` that exists; a name's newest place comes first."""
    for place in places:
        module, _, name = place.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise ImportError(f"no {' and no '.join(places)}: add where this tree has it")


# ---------------------------------------------------------------- frontend


CLIENT = """
import json, socket, sys
port, path, body = int(sys.argv[1]), sys.argv[2], sys.argv[3].encode()
head = f"POST {path} HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nContent-Type: application/json\\r\\n"
request = f"{head}Content-Length: {len(body)}\\r\\n\\r\\n".encode() + body
end = b"0\\r\\n\\r\\n" if json.loads(body).get("stream") else b"}"
connection = socket.create_connection(("127.0.0.1", port), timeout=20)
for line in sys.stdin:
    for _ in range(int(line)):
        connection.sendall(request)
        answer = b""
        while not answer.endswith(end):
            part = connection.recv(1 << 16)
            if not part:
                sys.exit("the frontend closed the connection: " + repr(answer))
            answer += part
            if not answer.startswith(b"HTTP/1.1 200"):
                sys.exit(answer.decode())
    print("done", flush=True)
"""
"""Sends requests one after another, in a process of its own so that only the server is measured."""


class FakeBackend:
    """Answers each request with its `max_tokens`, one token per turn of the event loop."""

    def __init__(self, cards: dict[str, Any]) -> None:
        self._cards = cards
        self._delta = find("pdserve.messages.request:TokenDelta")
        self._finish = find("pdserve.messages.request:Finish")
        self._started = find(
            "pdserve.messages.request:FirstTokenStats", "pdserve.messages.request:Started"
        )(0, 0.001, 0.002, 0.002)

    def cards(self) -> dict[str, Any]:
        return self._cards

    def unready_reason(self) -> None: ...

    def refusal(self, card: Any, name: str | None = None) -> None: ...

    async def open(
        self, request: Any, sink: Any, hints: Any, on_placed: Any, *later: Any
    ) -> FakeBackend:
        self._next(request, sink, 1)
        return self

    def _next(self, request: Any, sink: Any, count: int) -> None:
        asyncio.get_running_loop().call_soon(self._tell, request, sink, count)

    def _tell(self, request: Any, sink: Any, count: int) -> None:
        last = count == request.sampling.max_tokens
        finish = None
        if last:
            size = len(request.prompt)
            finish = self._finish(reason="length", prompt_tokens=size, completion_tokens=count)
        started = self._started if count == 1 else None
        sink.on_delta(self._delta(0, 0, [100 + count % 50], finish, started=started))
        if not last:
            self._next(request, sink, count + 1)

    def cancel(self) -> None: ...

    def end_choice(self, choice: int) -> None: ...

    def output(self, choice: int) -> list[int]:
        return []

    def stats(self) -> Any:
        return find("pdserve.messages.engine:EngineStats")()

    statistics = stats  # its name in release 0.2


def byte_tokenizer() -> Tokenizer:
    """Makes a tokenizer with one token per byte, and a few words."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    raw.train_from_iterator(["How does a request travel through a server, step by step?"], trainer)
    return raw


@contextlib.asynccontextmanager
async def frontend(tokens: int, *, stream: bool) -> AsyncIterator[Run]:
    """Sends chat requests over one connection to a whole frontend."""
    raw = byte_tokenizer()
    card = find("pdserve.messages.card:ModelCard")(
        name="m",
        max_model_len=4096,
        vocab_size=raw.get_vocab_size(),
        block_size=32,
        eos_token_ids=(1,),
        tokenizer_json=raw.to_str().encode(),
        chat_template="{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}",
        created=1_700_000_000,
    )
    config = find("pdserve.frontend.config:FrontendConfig")(host="127.0.0.1", port=0)
    service = find("pdserve.frontend.service:FrontendService")(config, FakeBackend({"m": card}))
    await service.start()
    await service._models.prepare()
    message = {"role": "user", "content": "How does a request travel through a server?"}
    body = {"model": "m", "messages": [message], "max_tokens": tokens, "stream": stream}
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CLIENT, str(service.port), "/v1/chat/completions"),
        json.dumps(body),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    requests, answers = client.stdin, client.stdout

    async def run(count: int) -> None:
        requests.write(b"%d\n" % (-(-count // tokens) if stream else count))
        if await answers.readline() != b"done\n":
            raise RuntimeError("the client failed; its message is above")

    try:
        yield run
    finally:
        requests.close()
        await client.wait()
        await service.stop(0)


def frontend_request() -> AbstractAsyncContextManager[Run]:
    """Parses, plans, dispatches and answers a request of one token, without a stream."""
    return frontend(1, stream=False)


def frontend_token() -> AbstractAsyncContextManager[Run]:
    """Answers a stream that gets its tokens one by one."""
    return frontend(STREAM_TOKENS, stream=True)


# ---------------------------------------------------------------- router


class Router:
    """A router whose workers hold prefixes and have work; `decide` places one request."""

    def __init__(self) -> None:
        core = find("pdserve.router.core:RouterCore", "pdserve.router.desk:Desk")
        load_policy = find(
            "pdserve.router.policies.loader:load_policy", "pdserve.router.policies.load:load_policy"
        )
        life = find("pdserve.ids:NodeLife", "pdserve.router.bookings:Life")
        node = find("pdserve.ids:NodeId")
        config = find("pdserve.router.config:RouterConfig")(policy="kv_load")
        self._random = Random(1)
        self._now = 0.0
        self._core = core(config, load_policy("kv_load"), self._random, clock=lambda: self._now)
        self._frontend = life(node("frontend"), 1)
        self._request = find(
            "pdserve.messages.routing:RouteRequest", "pdserve.messages.routing:Route"
        )
        self._started = find(
            "pdserve.messages.request:FirstTokenStats", "pdserve.messages.request:Started"
        )
        self._prefixes = [self._random.randbytes(4 * BLOCKS) for _ in range(PREFIXES)]
        self._open: list[Any] = []
        for number in range(WORKERS):
            self._add(life(node(f"worker-{number:03}"), 1))
        for _ in range(4 * OPEN * WORKERS):
            self.decide()

    def _add(self, worker: Any) -> None:
        facts = find("pdserve.router.worker_table:WorkerFacts", "pdserve.router.pool:Facts")
        stored = find("pdserve.messages.kv_events:HashesStored", "pdserve.messages.kv:NamesStored")
        member = find("pdserve.runtime.registry:Member")
        load = find("pdserve.messages.routing:WorkerLoad")(
            ready=True,
            running=self._random.randrange(64),
            max_sequences=256,
            blocks_total=100_000,
            blocks_used=self._random.randrange(30_000),
            blocks_cached=20_000,
            kv_tokens=self._random.randrange(500_000),
        )
        self._core.worker(0.0, facts(worker, ("m",), max_sequences=256))
        self._core.index.worker_up(worker, events=True)
        feed = self._core.index.target(member(node=worker.node, epoch=1, address="", role="worker"))
        held = self._random.sample(self._prefixes, 4)
        events = [stored(tier=0, parent=bytes(8), names=prefix) for prefix in held]
        feed.apply(find("pdserve.wire.codec:encode")(events))
        self._core.load(worker, load, 0.0)

    def decide(self) -> None:
        """Places a request, reports its first token, and releases an earlier one."""
        core, self._now = self._core, self._now + 0.001
        names = self._random.choice(self._prefixes) + self._random.randbytes(4 * BLOCKS)
        request = self._request(
            request_id="r",
            model="m",
            prompt_tokens=32 * BLOCKS + 5,
            max_tokens=256,
            names=names,
            block_size=32,
        )
        booking = core.offer(self._now, self._frontend, request, lambda outcome: None).booking
        started = self._started(booking.cached_tokens, 0.0, 0.01, 0.01)
        core.holds(self._now, booking.worker, booking.id, started)
        self._open.append(booking)
        if len(self._open) > OPEN * WORKERS:
            done = self._open.pop(self._random.randrange(len(self._open)))
            core.bookings.release(done.id)
            core.let_go(done.worker, done.id)


@contextlib.asynccontextmanager
async def route() -> AsyncIterator[Run]:
    """Makes one routing decision by prefix among 16 workers, with the whole life of its booking."""
    router = Router()

    async def run(count: int) -> None:
        for _ in range(count):
            router.decide()

    yield run


# ---------------------------------------------------------------- scheduler


class NullExecutor:
    """An executor that computes nothing: every sequence gets the same token."""

    def load(self, spec: Any, progress: Any) -> Any:
        shape = find(
            "pdserve.engine_core.executor:KvBlockShape", "pdserve.engine.executor:KvLayout"
        )
        info = find("pdserve.engine_core.executor:ModelInfo", "pdserve.engine.executor:ModelInfo")
        layout = shape(1, 1, spec.block_size, 1, 1)
        return info(
            model_type="null",
            dtype="",
            device="",
            vocab_size=100_000,
            max_model_len=1 << 20,
            eos_token_ids=(2,),
            layout=layout,
            weight_bytes=0,
            kv_memory=65_536 * layout.block_bytes,
        )

    def allocate(self, num_blocks: int) -> None: ...

    def release(self, sequences: Any) -> None: ...

    def close(self) -> None: ...


@contextlib.asynccontextmanager
async def schedule() -> AsyncIterator[Run]:
    """Schedule and complete one token of one of 256 decoding sequences."""
    place = "pdserve.engine_core.executor:StepResult"
    result = find(place, "pdserve.engine.executor:StepResult")
    make_core = find("pdserve.engine_core.core:EngineCore", "pdserve.engine.core:EngineCore")
    core = make_core(NullExecutor(), find("pdserve.clock:SystemClock")())
    spec = find("pdserve.messages.engine:EngineSpec")
    submit = find("pdserve.messages.engine:Submit")
    core.load(
        spec(engine="null", model="", max_sequences=SEQUENCES, max_batch_tokens=2048),
        lambda progress: None,
    )
    scheduler = core.scheduler
    answer = result([5] * SEQUENCES, [None] * SEQUENCES)

    def step() -> None:
        plan = scheduler.schedule(0.0)
        samples = sum(chunk.samples for chunk in plan.chunks)
        whole = samples == SEQUENCES
        scheduler.complete(plan, answer if whole else result([5] * samples, [None] * samples), 0.0)

    for handle in range(SEQUENCES):
        core.handle(submit(handle=handle, request=generate_request([3 + handle] * 100, 100_000)))
    while len(scheduler.running) < SEQUENCES:
        step()

    async def run(count: int) -> None:
        for _ in range(-(-count // SEQUENCES)):
            step()
        core.pool.drain_events()

    yield run


def generate_request(prompt: list[int], max_tokens: int) -> Any:
    """A request at the engine port."""
    sampling = find("pdserve.messages.request:SamplingParams")(
        max_tokens=max_tokens, eos_token_ids=(2,)
    )
    make = find("pdserve.messages.request:GenerateRequest")
    return make(request_id="r", model="m", prompt=prompt, sampling=sampling)


# ---------------------------------------------------------------- bus and engine port


class EchoHandler:
    """Answers each request with its own body."""

    def __init__(self, echo: Any) -> None:
        self._echo = echo

    def on_link_up(self, link: Any) -> None: ...

    def on_link_down(self, link: Any, down: Any) -> None: ...

    def on_tell(self, link: Any, method: int, body: Any) -> None: ...

    def on_request(self, call: Any) -> None:
        call.reply(self._echo.decode_request(call.body))

    def on_stream(self, stream: Any, method: int, body: Any) -> None: ...


@contextlib.asynccontextmanager
async def bus() -> AsyncIterator[Run]:
    """Sends one request and its answer of 64 bytes over a link in memory, both ends included."""
    places = ("pdserve.net.transport.memory:MemoryWorld", "pdserve.net.memory:MemoryWorld")
    world = find(*places)(Random(1))
    settings = find("pdserve.net.settings:NetSettings")()
    echo = find("pdserve.wire.codec:Method")(1, "echo", bytes, bytes)
    identity = find("pdserve.wire.handshake:Identity", "pdserve.net.base:Identity")
    node = find("pdserve.ids:NodeId")
    ends = [
        find("pdserve.net.endpoint:Endpoint")(
            identity("bench", node(name), 1),
            EchoHandler(echo),
            world.network(name),
            keys=lambda: (b"a key for measurements, 32 bytes long",),
            entropy=os.urandom,
            settings=settings,
        )
        for name in ("server", "client")
    ]
    await ends[0].listen("server:7000")
    link = await ends[1].dial("server:7000")

    async def run(count: int) -> None:
        for _ in range(count):
            await link.request(echo, bytes(64), timeout=30.0)

    try:
        yield run
    finally:
        for end in ends:
            await end.close()


class FirstDelta:
    """A sink that waits for the end of a request of one token."""

    def __init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()

    def on_delta(self, delta: Any) -> None:
        self.done.set_result(None)

    def on_error(self, error: Exception) -> None:
        self.done.set_exception(error)


def write_model(folder: Path) -> None:
    """The two files that the instant engine reads."""
    config = {"vocab_size": 100_000, "max_position_embeddings": 1 << 20}
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"word{chr(97 + number)}": 50_000 + number for number in range(26)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": words}}))


@contextlib.asynccontextmanager
async def engine_port() -> AsyncIterator[Run]:
    """Measures from submit to first delta, both ends included: the instant engine in a thread,
    behind its socket."""
    launcher = find(
        "pdserve.testing.thread_launcher:ThreadLauncher", "pdserve.engine.carrier:ThreadCarrier"
    )
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        spec = find("pdserve.messages.engine:EngineSpec")(engine="instant", model=folder)
        make_client = find("pdserve.engine.client:CoreClient")
        parameters = inspect.signature(make_client).parameters
        name = "make_launcher" if "make_launcher" in parameters else "make_carrier"
        client = make_client(spec, **{name: launcher})
        await client.start()

    async def run(count: int) -> None:
        for _ in range(count):
            sink = FirstDelta()
            client.submit(generate_request([1, 2, 3], 1), sink)
            await sink.done

    try:
        yield run
    finally:
        await client.stop()


OPERATIONS: dict[str, Callable[[], AbstractAsyncContextManager[Run]]] = {
    "frontend_request": frontend_request,
    "frontend_token": frontend_token,
    "router": route,
    "scheduler": schedule,
    "bus": bus,
    "engine_port": engine_port,
}


async def measure(name: str, count: int) -> float:
    """CPU seconds of this process per operation, after a warm-up of a tenth."""
    async with OPERATIONS[name]() as run:
        await run(-(-count // 10))
        gc.collect()
        begin = time.process_time()
        await run(count)
        return (time.process_time() - begin) / count


def main() -> None:
    """Answer commands until the input ends."""
    for line in sys.stdin:
        name, count = line.split()
        print(uvloop.run(measure(name, int(count))), flush=True)


if __name__ == "__main__":
    main()
