"""Traces of HTTP requests: which have one, what the root says, and what a client hears of it."""

from __future__ import annotations

import asyncio
import gc
import struct
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from pdserve.errors import EngineError, NoWorker, Overloaded
from pdserve.frontend.active_requests import ActiveRequest
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.http.http_request import HttpRequest
from pdserve.frontend.request_traces import RequestTraces
from pdserve.frontend.service import FrontendService
from pdserve.messages.trace import Trace
from pdserve.observe.metrics import Metrics
from pdserve.tracing.phases import RequestPhases
from tests.frontend.support import HELLO, MODEL, Client, card, tokens, until
from tests.support.fake_backend import FakeBackend, Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pdserve.messages.card import ModelCard

CHAT = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Kept(list[Trace]):
    """A sink that keeps all."""

    def add(self, trace: Trace) -> None:
        self.append(trace)


@asynccontextmanager
async def traced(
    script: Script | Any = None, served: ModelCard | None = None, **config: Any
) -> AsyncIterator[tuple[Client, Kept, Metrics]]:
    """A frontend whose traces are kept in a list."""
    kept, metrics = Kept(), Metrics()
    backend = FakeBackend({MODEL: served or card()}, script if script is not None else Script())
    config = {"port": 0, "trace_sample": 1.0} | config
    service = FrontendService(FrontendConfig(**config), backend, metrics, traces=kept)
    await service.start()
    await service._models.prepare()
    try:
        async with aiohttp.ClientSession() as http:
            yield Client(service, backend, http), kept, metrics
    finally:
        await service.stop(0)


async def test_a_whole_answer_has_a_trace():
    async with traced(Script(tokens=tokens("hello"))) as (client, kept, metrics):
        status, headers, answer = await client.post(CHAT, HELLO | {"seed": 7})
        await until(lambda: kept)
    (trace,) = kept
    assert (status, trace.kept, trace.model) == (200, ("head",), MODEL)
    assert headers["x-pdserve-trace-id"] == trace.trace_id.hex()
    assert headers["x-request-id"] == trace.request_id
    root, tokenize = trace.spans
    assert (root.name, root.kind, root.error) == (f"POST {CHAT}", "server", "")
    usage = answer["usage"]
    about = {
        "http.request.method": "POST",
        "http.route": CHAT,
        "url.path": CHAT,
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pdserve",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stream": False,
        "gen_ai.response.id": answer["id"],
        "gen_ai.response.model": MODEL,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": (answer["choices"][0]["finish_reason"],),
    }
    assert about.items() <= root.attributes.items()
    assert [event.name for event in root.events] == ["body_read", "first_token"]
    assert tokenize.name == "pdserve.tokenize"
    assert tokenize.attributes == {"pdserve.prompt_tokens": usage["prompt_tokens"]}
    assert metrics.traces_kept.labels("head").value == 1


async def test_a_stream_has_one_with_the_stop_string_that_ended_it():
    async with traced(Script(tokens=tokens("one two three"))) as (client, kept, _):
        await client.chunks(stop=["two"])
        await until(lambda: kept)
    names = [event.name for event in kept[0].spans[0].events]
    assert names[:2] == ["body_read", "first_token"]
    assert "stop_string" in names
    assert kept[0].spans[0].attributes["gen_ai.response.finish_reasons"] == ("stop",)


async def test_the_callers_trace_goes_on():
    async with traced(trace_sample=0.0) as (client, kept, _):
        headers = {"traceparent": PARENT, "tracestate": "a=1,b=2"}
        async with client.http.post(client.url + CHAT, json=HELLO, headers=headers) as answer:
            assert answer.headers["x-pdserve-trace-id"] == PARENT.split("-")[1]
        await until(lambda: kept)
    (trace,) = kept
    assert (trace.kept, trace.tracestate) == (("parent",), "a=1,b=2")
    assert trace.trace_id.hex() == PARENT.split("-")[1]
    assert trace.spans[0].parent_id.hex() == PARENT.split("-")[2]


async def test_two_parents_are_none():
    async with traced() as (client, kept, _):
        headers = [("traceparent", PARENT), ("traceparent", PARENT.replace("0a", "0b"))]
        async with client.http.post(client.url + CHAT, json=HELLO, headers=headers) as answer:
            assert answer.status == 200
        await until(lambda: kept)
    (trace,) = kept
    assert (trace.kept, trace.spans[0].parent_id) == (("head",), b"")


@pytest.mark.parametrize(
    ("host", "address", "port"),
    [
        ("127.0.0.1:8000", "127.0.0.1", 8000),
        ("localhost", "localhost", None),
        ("[::1]:443", "::1", 443),
        ("[::1]", "::1", None),
        ("localhost:eighty", "localhost", None),
        ("localhost:" + "9" * 300, "localhost", None),
    ],
)
async def test_the_server_is_named_without_its_port(
    host: str, address: str, port: int | None
) -> None:
    async with traced() as (client, kept, _):
        await client.post(CHAT, HELLO, headers={"Host": host})
        await until(lambda: kept)
    root = kept[0].spans[0].attributes
    assert (root["server.address"], root.get("server.port")) == (address, port)


async def test_a_malformed_parent_is_no_reason_to_refuse():
    async with traced() as (client, kept, _):
        headers = {"traceparent": "00-" + "0" * 32 + "-b7ad6b7169203331-01"}
        async with client.http.post(client.url + CHAT, json=HELLO, headers=headers) as answer:
            assert answer.status == 200
        await until(lambda: kept)
    assert kept[0].kept == ("head",)
    assert any(kept[0].trace_id)
    assert kept[0].spans[0].parent_id == b""


async def test_without_a_reason_nothing_is_kept_or_said():
    async with traced(trace_sample=0.0) as (client, kept, metrics):
        _, headers, _ = await client.post(CHAT, HELLO)
        assert "x-pdserve-trace-id" not in headers
        await asyncio.sleep(0.01)
    assert not kept
    assert not list(metrics.traces_kept)


async def test_an_error_of_the_server_is_kept_and_a_clients_is_not():
    refused = Script(refuse=NoWorker("nobody is there", retry_after=1.0))
    async with traced(refused, trace_sample=0.0) as (client, kept, metrics):
        status, _, _ = await client.post(CHAT, HELLO)
        assert status == 503
        await client.post(CHAT, HELLO | {"temperature": "hot"})
        await client.post("/v1/nothing", HELLO)
        await until(lambda: kept)
        await asyncio.sleep(0.01)
    (trace,) = kept
    root = trace.spans[0]
    assert (trace.kept, root.error) == (("error",), "nobody is there")
    assert root.attributes["http.response.status_code"] == 503
    assert root.attributes["error.type"] == "NoWorker"
    assert metrics.traces_kept.labels("error").value == 1


async def test_refusals_have_a_root_if_they_are_kept():
    refused = Script(refuse=Overloaded("full", retry_after=1.0))
    async with traced(refused) as (client, kept, _):
        await client.post(CHAT, HELLO)
        await client.post(CHAT, HELLO | {"temperature": "hot"})
        client.service._active_requests.draining = True
        await client.post(CHAT, HELLO)
        await until(lambda: len(kept) == 3)
    found = [
        (t.spans[0].attributes["http.response.status_code"], t.spans[0].attributes["error.type"])
        for t in kept
    ]
    assert found == [(429, "Overloaded"), (400, "InvalidRequest"), (503, "Draining")]
    assert [t.spans[0].error for t in kept] == ["", "", "the server is shutting down"]


async def test_a_stream_that_breaks_off_is_an_error_with_status_200():
    script = Script(tokens=tokens("one two three"), fail=EngineError("broken"), fail_after=2)
    async with traced(script, trace_sample=0.0) as (client, kept, _):
        await client.events(CHAT, HELLO)
        await until(lambda: kept)
    root = kept[0].spans[0]
    assert root.attributes["http.response.status_code"] == 200
    assert kept[0].kept == ("error",)
    assert root.error


async def test_a_slow_first_token_is_kept():
    script = Script(tokens=tokens("hello"))
    async with traced(script, trace_sample=0.0, slo_ttft={"": 1e-6}) as (client, kept, _):
        await client.post(CHAT, HELLO)
        await until(lambda: kept)
    assert kept[0].kept == ("slo_ttft",)


async def test_a_clients_own_limit_keeps_no_trace():
    """Else each client could have all its requests kept, past the limit of `--trace-parent`."""
    scripts = iter([Script(tokens=tokens("hello")), Script(fail=EngineError("broken"))])
    async with traced(lambda request: next(scripts), trace_sample=0.0) as (client, kept, _):
        headers = {"x-pdserve-slo-ttft-ms": "0.001"}
        async with client.http.post(client.url + CHAT, json=HELLO, headers=headers) as answer:
            assert answer.status == 200
        await client.post(CHAT, HELLO)
        await until(lambda: kept)
    assert [trace.kept for trace in kept] == [("error",)]


async def test_a_client_that_leaves_is_no_error():
    async with traced(Script(tokens=tokens("la "), interval=0.01)) as (client, kept, _):
        asking = asyncio.ensure_future(client.post(CHAT, HELLO | {"max_tokens": 4000}))
        await until(lambda: client.backend.streams and client.backend.streams[0]._outputs[0])
        asking.cancel()
        await until(lambda: kept)
    root = kept[0].spans[0]
    assert root.attributes["http.response.status_code"] == 499
    assert root.attributes["error.type"] == "Cancelled"
    assert root.error == ""


async def test_with_a_rate_of_0_nothing_is_recorded():
    async with traced(trace_rate=0.0) as (client, kept, _):
        await client.post(CHAT, HELLO)
        assert client.service.tracer.begin() is None
    assert not kept


async def test_endpoints_that_generate_nothing_have_no_trace():
    async with traced() as (client, kept, _):
        await client.post("/tokenize", {"prompt": "hello"})
        async with client.http.get(client.url + "/v1/models") as answer:
            assert answer.status == 200
        await asyncio.sleep(0.01)
    assert not kept


async def test_several_prompts_have_a_record_each():
    async with traced(Script(tokens=tokens("hello"))) as (client, kept, _):
        await client.post("/v1/completions", {"prompt": ["a", "b", "c"]})
        await until(lambda: kept)
    names = [span.name for span in kept[0].spans]
    assert names.count("pdserve.prompt") == 3
    assert kept[0].spans[0].attributes["gen_ai.operation.name"] == "text_completion"


@pytest.mark.parametrize(
    ("path", "body", "operation", "prompts"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}, "embeddings", 2),
        ("/api/embed", {"model": MODEL, "input": ["a"]}, "embeddings", 1),
        ("/v1/rerank", {"query": "q", "documents": ["a", "b"]}, "score", 3),
        ("/v1/score", {"text_1": "q", "text_2": "a"}, "score", 2),
    ],
)
async def test_vectors_and_scores_have_traces(
    path: str, body: dict[str, Any], operation: str, prompts: int
) -> None:
    makes = {"pooling": "mean", "embedding_size": 4, "features": ("embeddings",)}
    script = Script(vector=lambda request: struct.pack("<4f", 1, 2, 3, 4))
    async with traced(script, card(**makes)) as (client, kept, _):
        status, _, answer = await client.post(path, body)
        assert status == 200, answer
        await until(lambda: kept)
    (trace,) = kept
    root = trace.spans[0]
    assert (root.name, root.attributes["http.route"]) == (f"POST {path}", path)
    assert root.attributes["gen_ai.operation.name"] == operation
    assert root.attributes["gen_ai.usage.output_tokens"] == 0
    around = [span for span in trace.spans if span.name == "pdserve.prompt"]
    assert len(around) == (prompts if prompts > 1 else 0)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", HELLO | {"max_tokens": 5}),
        ("/v1/responses", {"input": "hello", "model": MODEL}),
        ("/api/chat", HELLO | {"stream": False, "model": MODEL}),
        ("/api/generate", {"prompt": "hello", "model": MODEL, "stream": False}),
        ("/invocations", HELLO),
    ],
)
async def test_the_other_apis_have_traces(path: str, body: dict[str, Any]) -> None:
    async with traced(Script(tokens=tokens("hello"), fail_after=3, end="stop")) as made:
        client, kept, _ = made
        status, _, answer = await client.post(path, body)
        assert status == 200, answer
        await until(lambda: kept)
    root = kept[0].spans[0]
    assert root.name == f"POST {path}"
    assert root.attributes["gen_ai.response.finish_reasons"]


async def test_a_watch_keeps_all_requests_of_a_model():
    async with traced(trace_sample=0.0) as (client, kept, _):
        tracer = client.service.tracer
        tracer.watches.begin(MODEL, 60.0, tracer.time())
        await client.post(CHAT, HELLO)
        await until(lambda: kept)
    assert kept[0].kept == ("watch",)


async def test_the_models_objectives_are_rules_too():
    script = Script(tokens=tokens("one two three"), interval=0.005)
    async with traced(script, trace_sample=0.0, slo_itl={MODEL: 0.001}) as (client, kept, _):
        await client.post(CHAT, HELLO | {"max_tokens": 5})
        await until(lambda: kept)
    assert kept[0].kept == ("slo_itl",)


async def test_a_client_that_reads_too_slowly_is_an_event():
    script = Script(tokens=tokens("one two three"), interval=0.01)
    async with traced(script) as (client, kept, _):
        asking = asyncio.ensure_future(client.chunks(max_tokens=20))
        await until(lambda: client.backend.streams and client.backend.streams[0]._outputs[0])
        (connection,) = client.service._server._open
        connection.pause_writing()
        connection.resume_writing()
        await asking
        await until(lambda: kept)
    names = {event.name for event in kept[0].spans[0].events}
    assert names == {"body_read", "first_token", "client_slow"}


# ---------------------------------------------------------------- defects


@pytest.mark.parametrize(
    ("broken", "stream"),
    [
        ("frontend.request_traces.request_facts", False),
        ("frontend.request_traces.root_attributes", True),
        ("frontend.request_traces.content_attributes", False),
        ("tracing.tracer.build_trace", True),
    ],
)
async def test_a_trace_that_cannot_be_made_costs_no_answer(
    broken: str, stream: bool, monkeypatch: Any, caplog: Any
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(f"pdserve.{broken}", fails)
    script = Script(tokens=tokens("one two"), fail_after=8, end="stop")
    async with traced(script, trace_content=True) as (client, kept, metrics):
        for _ in range(3):
            end = (await client.chunks())[-1] if stream else await client.chat()
            assert end["choices"][0]["finish_reason"] == "stop"
        await until(lambda: metrics.traces_lost.value == 3)
    assert not kept
    assert caplog.text.count("the trace of a request could not be made") == 1


async def test_a_client_that_leaves_is_told_no_defect(monkeypatch: Any) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr("pdserve.frontend.request_traces.root_attributes", fails)
    script = Script(tokens=tokens("la "), interval=0.01)
    async with traced(script) as (client, _, metrics):
        asking = asyncio.ensure_future(client.post(CHAT, HELLO | {"max_tokens": 4000}))
        await until(lambda: client.backend.streams and client.backend.streams[0]._outputs[0])
        asking.cancel()
        await until(lambda: metrics.traces_lost.value)
        assert client.backend.streams[0].cancelled
        assert not client.service.active_requests


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_trace_keeps_no_request_in_memory(leaves: bool, stream: bool) -> None:
    """What the trace was made of is gone with the request, without the garbage collector."""
    kinds = (ActiveRequest, HttpRequest, RequestPhases)
    script = Script(tokens=tokens("la "), interval=0.001 if leaves else 0.0)
    async with traced(script, trace_content=True) as (client, kept, _):
        gc.collect()
        # What a test before this one has left is not this one's.
        others = [each for each in gc.get_objects() if type(each) in kinds]
        known = {id(each) for each in others}
        gc.disable()
        try:
            body = HELLO | {"stream": stream, "max_tokens": 4000 if leaves else 5}
            asking = asyncio.ensure_future(client.http.post(client.url + CHAT, json=body))
            if leaves:
                await until(lambda: client.backend.streams and client.backend.streams[0]._outputs)
                asking.cancel()
            else:
                await (await asking).read()
            await until(lambda: kept)
            await asyncio.sleep(0.01)
            kept_on = [each for each in gc.get_objects() if type(each) in kinds]
            assert not [each for each in kept_on if id(each) not in known]
        finally:
            gc.enable()


# ---------------------------------------------------------------- text

SECRET = "a secret that nobody but the model may know"


def everything(trace: Trace) -> str:
    """All that a trace says, as text."""
    return repr(trace)


KEYS = """
[[key]]
key = "sk-told-0123456789"
tenant = "told"
trace_content = true

[[key]]
key = "sk-kept-0123456789"
tenant = "kept"
"""


async def text_of_traces(tmp_path: Any, *, content: bool, key: str) -> str:
    """What the traces of all kinds of requests say; `key`: empty without a file of keys."""
    config: dict[str, Any] = {"trace_content": content}
    headers = {}
    if key:
        config["api_keys_file"] = file = tmp_path / "keys.toml"
        file.write_text(KEYS)
        file.chmod(0o600)
        headers = {"Authorization": f"Bearer sk-{key}-0123456789"}
    asked = {"messages": [{"role": "user", "content": SECRET}]}
    bodies = (
        (CHAT, asked),
        (CHAT, asked | {"stream": True, "stop": [SECRET]}),
        (CHAT, asked | {"temperature": SECRET}),
        ("/v1/completions", {"prompt": [SECRET, SECRET]}),
        ("/v1/responses", {"input": SECRET, "model": MODEL}),
    )
    async with traced(Script(tokens=tokens("answer")), **config) as (client, kept, _):
        for path, body in bodies:
            async with client.http.post(client.url + path, json=body, headers=headers) as answer:
                await answer.read()
        await until(lambda: len(kept) == len(bodies))
        return "\n".join(map(everything, kept))


async def test_traces_have_no_text(tmp_path: Any) -> None:
    assert SECRET not in await text_of_traces(tmp_path, content=False, key="")
    assert SECRET not in await text_of_traces(tmp_path, content=False, key="told")


async def test_text_needs_the_keys_permission(tmp_path: Any) -> None:
    assert SECRET not in await text_of_traces(tmp_path, content=True, key="kept")
    told = await text_of_traces(tmp_path, content=True, key="told")
    assert SECRET in told
    assert "answer" in told


async def test_without_keys_the_operators_word_is_enough(tmp_path: Any) -> None:
    assert SECRET in await text_of_traces(tmp_path, content=True, key="")


async def test_text_without_permission_is_noticed(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(RequestTraces, "_may_tell", lambda self, call: True)
    with pytest.raises(AssertionError):
        await test_text_needs_the_keys_permission(tmp_path)


async def test_text_is_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr("pdserve.frontend.request_traces._MOST_TEXT", 20)
    long = {"prompt": ["word " * 20] * 6, "max_tokens": 1}
    async with traced(trace_content=True) as (client, kept, _):
        await client.post("/v1/completions", long)
        await until(lambda: kept)
    texts = kept[0].spans[0].attributes["pdserve.content.prompt"]
    assert isinstance(texts, tuple)
    assert [len(text) for text in texts] == [20] * 4
