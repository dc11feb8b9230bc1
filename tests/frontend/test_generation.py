"""Every way a request can end, and what is left behind: nothing."""

import asyncio
import contextlib
import json
import threading

import pytest

from pdserve.errors import Draining, NotReady, NoWorker, Overloaded
from pdserve.frontend.access.api_keys import parse_keys
from pdserve.frontend.output.streaming_response import StreamingResponseBuilder
from pdserve.frontend.placement import Placement
from pdserve.ids import NodeId
from tests.frontend.support import HELLO, MODEL, card, frontend, http, raw_connection, tokens, until
from tests.support.fake_backend import Script
from tests.support.metrics_page import find

CHAT = "/v1/chat/completions"
ENDLESS = Script(tokens=tokens("la "), interval=0.001)
SILENT = Script(silent_after=0)
PLACED = Script(
    silent_after=0,
    placement=Placement(
        worker=NodeId("w"),
        router=NodeId("r"),
        policy="ttft",
        attempts=1,
        overlap_tokens=0,
        predicted_ttft=None,
        held=0.0,
    ),
)
STUCK = Script(silent_after=2, tokens=tokens("la la la"))
HELD = Script(hold_open=60.0)


def outcome(client, word):
    ended = client.service.metrics.requests
    return sum(count.value for (_, each), count in ended if each == word)


async def start(client, writer, stream):
    """Post a request and wait until the backend has it."""
    body = json.dumps(HELLO | {"stream": stream}).encode()
    writer.write(http("POST", CHAT, body))
    await until(lambda: client.backend.requests)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [ENDLESS, SILENT, STUCK, HELD])
async def test_a_client_that_hangs_up_frees_its_work(script, stream):
    async with frontend(script) as client:
        async with raw_connection(client) as (_, writer):
            await start(client, writer, stream)
            await asyncio.sleep(0.01)
            writer.transport.abort()
        await until(lambda: client.service.active_requests == 0)
        assert client.backend.idle
        assert outcome(client, "cancelled") == 1


async def test_a_client_that_hangs_up_in_mid_body_frees_its_place():
    async with frontend() as client:
        async with raw_connection(client) as (_, writer):
            writer.write(http("POST", CHAT, headers="Content-Length: 100\r\n") + b"{")
            await until(lambda: client.service.active_requests == 1)
            writer.transport.abort()
        await until(lambda: client.service.active_requests == 0)
        assert outcome(client, "cancelled") == 1


@pytest.mark.parametrize(
    ("script", "stage"),
    [
        (SILENT, "waiting for a worker"),
        (PLACED, "waiting for the first token"),
        (HELD, "waiting for a worker"),
        (STUCK, "generating"),
    ],
)
async def test_a_request_out_of_time_says_where_it_was(script, stage):
    async with frontend(script, request_timeout=1.0) as client:
        status, _, answer = await client.post(CHAT, HELLO)
        assert status == 504
        assert stage in answer["error"]["message"]
        assert answer["error"]["code"] == "deadline_exceeded"
        assert outcome(client, "deadline") == 1
        assert client.backend.idle


async def test_a_stream_out_of_time_ends_with_an_error_event():
    async with frontend(ENDLESS, request_timeout=1.0) as client:
        events = await client.events(CHAT, HELLO | {"max_tokens": 4000})
        assert "it was generating" in json.loads(events[-1].data)["error"]["message"]
        assert outcome(client, "deadline") == 1
        assert client.backend.idle
        # A stream that has not begun still has its status to give.
        client.backend.script = SILENT
        status, _, _ = await client.post(CHAT, HELLO | {"stream": True})
        assert status == 504


async def test_a_batch_out_of_time_while_part_of_it_waits_for_a_worker():
    def script(request):
        return HELD if request.prompt_index else ENDLESS

    async with frontend(script, request_timeout=1.0) as client:
        body = {"prompt": ["a", "b"], "max_tokens": 4000}
        events = await client.events("/v1/completions", body)
        assert "waiting for a worker" in json.loads(events[-1].data)["error"]["message"]
        assert client.backend.idle


async def test_a_long_answer_is_put_together_off_the_event_loop():
    script = Script(tokens=tokens("hello world "), burst=100)
    async with frontend(script) as client:
        pool = client.service._pool
        await client.chat(max_tokens=50)
        assert pool.stats().handed_over == 1  # the model's making
        many = {"max_tokens": 2000, "logprobs": True, "top_logprobs": 2}
        answer = await client.chat(**many)
        assert len(answer["choices"][0]["logprobs"]["content"]) == 2000
        assert pool.stats().handed_over == 2


async def test_a_request_out_of_time_while_its_answer_waits_to_be_put_together():
    script = Script(tokens=tokens("hello world "), burst=100)
    release = threading.Event()
    async with frontend(script, request_timeout=1.0) as client:
        pool = client.service._pool
        pool.inline_chars = 1000
        busy = [asyncio.ensure_future(pool.run(1 << 20, release.wait)) for _ in range(2)]
        try:
            status, _, answer = await client.post(CHAT, HELLO | {"max_tokens": 2000})
        finally:
            release.set()
            await asyncio.gather(*busy)
        assert status == 504
        assert "putting the answer together" in answer["error"]["message"]
        assert outcome(client, "deadline") == 1


async def test_the_deadline_travels_with_the_request():
    async with frontend(request_timeout=7.0) as client:
        await client.chat()
        assert client.backend.requests[0].deadline == 7.0


async def test_one_request_too_many_is_told_to_come_back():
    async with frontend(SILENT, max_in_flight=2) as client:
        waiting = [asyncio.ensure_future(client.post(CHAT, HELLO)) for _ in range(2)]
        await until(lambda: len(client.backend.requests) == 2)
        status, headers, answer = await client.post(CHAT, HELLO)
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert int(headers["Retry-After"]) >= 1
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: client.service.active_requests == 0)
        client.backend.script = Script()
        await client.chat()


@pytest.mark.parametrize(
    ("error", "status"), [(NotReady("loading"), 503), (NoWorker("none"), 503), (Draining("x"), 503)]
)
async def test_a_backend_that_cannot_serve_is_a_503_with_retry_after(error, status):
    async with frontend(Script(refuse=error)) as client:
        got, headers, answer = await client.post(CHAT, HELLO)
    assert (got, answer["error"]["code"]) == (status, error.code)
    assert headers["Retry-After"] == "1"


async def test_while_nothing_is_loaded_requests_get_503_and_health_says_why():
    async with frontend(models={}, unready="loading weights") as client:
        status, headers, answer = await client.post(CHAT, HELLO)
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        assert "loading weights" in answer["error"]["message"]
        assert "Retry-After" in headers
        client.backend.models = {"tiny": card()}
        status, _, answer = await client.post(CHAT, HELLO)
        assert (status, answer["error"]["code"]) == (503, "not_ready")
        client.backend.unready = None
        await client.chat()


async def test_a_fault_of_the_server_is_a_500_without_details(caplog):
    def script(request):
        raise RuntimeError("secret detail")

    async with frontend(script) as client:
        status, _, answer = await client.post(CHAT, HELLO)
        assert status == 500
        assert "secret" not in str(answer)
        assert "secret detail" in caplog.text
        assert outcome(client, "error") == 1
        client.backend.script = Script()
        await client.chat()


async def test_a_fault_in_a_stream_that_has_begun_ends_its_connection(monkeypatch, caplog):
    # A second answer in the middle of the first would be read as its next chunk.
    def fault(answer):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(StreamingResponseBuilder, "finish", fault)
    async with frontend(Script(tokens=tokens("ab"))) as client:
        async with raw_connection(client) as (reader, writer):
            body = json.dumps(HELLO | {"stream": True, "max_tokens": 2}).encode()
            writer.write(http("POST", CHAT, body))
            raw = b""
            async with asyncio.timeout(20):
                with contextlib.suppress(ConnectionError):
                    while part := await reader.read(1 << 16):
                        raw += part
        assert raw.count(b"HTTP/1.1") == 1
        assert b"\r\n0\r\n\r\n" not in raw
        assert "secret detail" in caplog.text
        await until(lambda: outcome(client, "error") == 1)


async def test_a_model_that_cannot_be_made_is_the_operators_fault(caplog):
    broken = card(tokenizer_json=b"{}")
    async with frontend(models={"tiny": broken}) as client:
        for _ in range(2):
            status, _, answer = await client.post(CHAT, HELLO)
            assert (status, answer["error"]["code"]) == (500, "config_error")


async def test_models_are_found_by_name_alias_or_alone():
    tiny, big = card(), card(name="big", max_model_len=2048)
    async with frontend(models={"tiny": tiny}) as client:
        assert (await client.chat())["model"] == "tiny"
    async with frontend(models={"tiny": tiny, "gpt-4": tiny, "big": big}) as client:
        assert (await client.chat(model="gpt-4"))["model"] == "gpt-4"
        assert client.backend.requests[0].model == "tiny"
        status, _, answer = await client.post(CHAT, HELLO | {"model": "nobody"})
        assert (status, answer["error"]["param"]) == (404, "model")
        assert "big, gpt-4, tiny" in answer["error"]["message"]
        status, _, answer = await client.post(CHAT, HELLO)
        assert (status, answer["error"]["param"]) == (400, "model")


async def test_a_body_may_name_its_request():
    async with frontend() as client:
        body = HELLO | {"request_id": "mine-1"}
        _, headers, answer = await client.post(CHAT, body, {"x-request-id": "header-1"})
        assert headers["x-request-id"] == "mine-1"
        assert answer["id"] == "chatcmpl-mine-1"
        assert client.backend.requests[0].request_id == "mine-1"
        body = HELLO | {"request_id": "a\nb"}
        status, headers, answer = await client.post(CHAT, body, {"x-request-id": "header-1"})
        assert (status, answer["error"]["param"]) == (400, "request_id")
        assert headers["x-request-id"] == "header-1"


async def test_the_seed_that_was_used_is_told_in_a_header():
    async with frontend() as client:
        _, headers, _ = await client.post(CHAT, HELLO)
        seed = int(headers["x-pdserve-seed"])
        assert seed == client.backend.requests[0].sampling.seed
        _, headers, _ = await client.post(CHAT, HELLO | {"seed": 5})
        assert headers["x-pdserve-seed"] == "5"
        _, headers, _ = await client.post(CHAT, HELLO)
        assert int(headers["x-pdserve-seed"]) != seed


async def test_key_limits_hold_over_http(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text(
        '[[key]]\nkey = "sk-12345678"\ntenant = "t"\nmodels = ["tiny"]\n'
        "[key.limits]\nrequests_per_minute = 3\ntokens_per_minute = 60\n"
    )
    file.chmod(0o600)
    parse_keys(file.read_bytes(), "x")
    models = {"tiny": card(), "big": card(name="big")}
    auth = {"Authorization": "Bearer sk-12345678"}
    async with frontend(models=models, api_keys_file=file) as client:
        status, headers, _ = await client.post(CHAT, HELLO)
        assert status == 401
        assert headers["WWW-Authenticate"].startswith("Bearer")
        status, _, answer = await client.post(CHAT, HELLO | {"model": "big"}, auth)
        assert (status, answer["error"]["code"]) == (403, "forbidden")
        long = {"model": "tiny", "prompt": [5] * 50, "max_tokens": 1}
        status, _, _ = await client.post("/v1/completions", long, auth)
        assert status == 200
        status, headers, answer = await client.post("/v1/completions", long, auth)
        assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(headers["Retry-After"]) > 10
        assert "tokens per minute" in answer["error"]["message"]
        status, _, answer = await client.post("/v1/completions", long, auth)
        assert status == 429
        assert "requests per minute" in answer["error"]["message"]


async def test_keys_can_be_read_again(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nkey = "sk-12345678"\ntenant = "t"\n')
    file.chmod(0o600)
    async with frontend(api_keys_file=file) as client:
        status, _, _ = await client.post(CHAT, HELLO, {"Authorization": "Bearer sk-87654321"})
        assert status == 401
        file.write_text('[[key]]\nkey = "sk-87654321"\ntenant = "t"\n')
        file.chmod(0o600)
        client.service.reload_api_keys()
        status, _, _ = await client.post(CHAT, HELLO, {"Authorization": "Bearer sk-87654321"})
        assert status == 200
        status, _, _ = await client.post(CHAT, HELLO, {"Authorization": "Bearer sk-12345678"})
        assert status == 401


async def test_unknown_fields_are_counted_logged_once_or_refused(caplog):
    async with frontend() as client:
        for _ in range(2):
            await client.chat(temprature=1)
        assert client.service.metrics.unknown_fields.labels("temprature").value == 2
        assert caplog.text.count("temprature") == 1
    async with frontend(strict_api=True) as client:
        status, _, answer = await client.post(CHAT, HELLO | {"temprature": 1})
        assert (status, answer["error"]["param"]) == (400, "temprature")


async def test_models_that_clients_invent_are_no_labels():
    async with frontend(Script(tokens=tokens("abc"))) as client:
        for number in range(100):
            status, _, _ = await client.post(CHAT, HELLO | {"model": f"invented-{number}"})
            assert status == 404
        status, _, _ = await client.post(CHAT, HELLO | {"max_tokens": 10**6})
        assert status == 400
        ended = client.service.metrics.requests
        assert {labels: count.value for labels, count in ended} == {
            ("", "invalid"): 100,
            (MODEL, "invalid"): 1,
        }


async def test_what_a_request_cost_is_measured():
    async with frontend(Script(tokens=tokens("abc"))) as client:
        await client.chat(max_tokens=3)
        await client.chunks(max_tokens=3)
        await client.chunks(max_tokens=3, logprobs=True)
        metrics = client.service.metrics.of_model(MODEL)
        assert outcome(client, "completed") == 3
        assert metrics.time_to_first_token.count == 3
        assert metrics.inter_token_latency.count == 6
        assert metrics.request_generation_tokens.sum == 9
        assert metrics.request_queue.count == 3
        _, _, page = await client.get("/metrics")
    assert find(page.decode(), "pdserve_time_to_first_token_seconds_count") == 3
    assert b'pdserve_http_responses_total{route="/v1/chat/completions",status="200"} 3.0' in page


async def test_a_client_that_closes_its_half_is_gone():
    async with frontend(ENDLESS) as client:
        async with raw_connection(client) as (_, writer):
            await start(client, writer, True)
            writer.write_eof()
            await until(lambda: client.service.active_requests == 0)
        assert outcome(client, "cancelled") == 1


async def test_prompts_of_a_batch_do_not_wait_for_each_other():
    """A router may hold any of them for as long as it takes."""
    opened = []

    def script(request):
        opened.append(request.prompt_index)
        return HELD

    async with frontend(script, request_timeout=1.0) as client:
        status, _, _ = await client.post("/v1/completions", {"prompt": ["a", "b", "c"]})
        assert status == 504
        assert opened == [0, 1, 2]
        assert client.backend.idle


async def test_a_prompt_that_is_refused_ends_its_batch():
    def script(request):
        refused = Script(refuse=Overloaded("full", retry_after=3.0))
        return refused if request.prompt_index == 1 else HELD

    async with frontend(script) as client:
        status, headers, _ = await client.post("/v1/completions", {"prompt": ["a", "b", "c"]})
        assert status == 429
        assert headers["Retry-After"] == "3"
        assert client.backend.idle
