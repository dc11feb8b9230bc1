"""What clients say of routing, and what they hear of it."""

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from pdserve.errors import EngineDied, Overloaded
from pdserve.frontend.placement import Placement
from pdserve.ids import NodeId
from pdserve.messages.routing import Candidate, RoutingPreview
from pdserve.messages.tiers import CachedSource, KvSource
from tests.frontend.support import HELLO, frontend, http, raw_connection, tokens, until
from tests.support.fake_backend import Script

CHAT = "/v1/chat/completions"
PLACED = Placement(
    worker=NodeId("w1"),
    router=NodeId("r1"),
    policy="ttft",
    attempts=2,
    overlap_tokens=96,
    predicted_ttft=0.25,
    held=0.5,
)
SCRIPT = Script(tokens=tokens("one two "), cached_tokens=64, placement=PLACED)
KNOWN = {
    "x-pdserve-worker": "w1",
    "x-pdserve-router": "r1",
    "x-pdserve-policy": "ttft",
    "x-pdserve-attempts": "2",
    "x-pdserve-overlap-tokens": "96",
    "x-pdserve-predicted-ttft-ms": "250.0",
    "x-pdserve-held-ms": "500.0",
}
STREAM = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 4}
EXPLAINED = RoutingPreview(
    policy="ttft",
    worker=NodeId("a"),
    held=3,
    predicted_ttft=0.5,
    candidates=(
        Candidate(
            worker=NodeId("a"),
            standing="sound",
            chosen=True,
            overlap_blocks=2,
            terms={"cost": 0.5, "prefill": 0.25},
            sources={"device": 2, "host": 3},
        ),
        Candidate(worker=NodeId("b"), standing="draining"),
    ),
    kv_sources=(KvSource(NodeId("b"), 1, 8, 5),),
)


def ours(headers):
    """Without the id of a trace: one request in a hundred is drawn for one."""
    found = {name.lower(): value for name, value in headers.items()}
    found.pop("x-pdserve-trace-id", None)
    return {name: v for name, v in found.items() if name.startswith("x-pdserve-")}


async def stream(client, body, headers=None):
    """Headers, events without their `data: `, of a stream that begins in order."""
    async with client.http.post(client.url + CHAT, json=body, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        text = (await answer.read()).decode()
    return answer.headers, [e.removeprefix("data: ") for e in text.split("\n\n") if e]


# ---------------------------------------------------------------------- what is told


async def test_a_whole_answer_says_who_served_it():
    async with frontend(SCRIPT) as client:
        status, headers, answer = await client.post(CHAT, HELLO | {"max_tokens": 4})
    assert status == 200
    found = ours(headers)
    assert KNOWN.items() <= found.items()
    assert found["x-pdserve-cached-tokens"] == "64"
    told = answer["usage"]["pdserve"]
    assert (told["worker"], told["router"], told["policy"]) == ("w1", "r1", "ttft")
    assert (told["overlap_tokens"], told["cached_tokens"], told["attempts"]) == (96, 64, 2)
    assert float(found["x-pdserve-ttft-ms"]) == told["ttft_ms"] > 0
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


async def test_an_answer_says_where_its_cached_tokens_were():
    sources = (CachedSource("host", 16), CachedSource("peer", 32, "w2"))
    async with frontend(replace(SCRIPT, sources=sources)) as client:
        status, headers, answer = await client.post(CHAT, HELLO | {"max_tokens": 4})
        counted = dict(client.service.metrics.request_cached_tokens)
    assert status == 200
    where = "device=16; host=16; peer=32; node=w2"
    assert ours(headers)["x-pdserve-cached"] == answer["usage"]["pdserve"]["cached"] == where
    assert ours(headers)["x-pdserve-cached-tokens"] == "64"
    found = {source: count.value for (_, source), count in counted.items()}
    assert found == {"device": 16, "host": 16, "peer": 32}


async def test_an_answer_says_what_its_prefill_worker_had():
    script = replace(SCRIPT, prefill_cached=96, prefill_sources=(CachedSource("disk", 64),))
    async with frontend(script) as client:
        _, headers, answer = await client.post(CHAT, HELLO | {"max_tokens": 4})
    where = "device=64; prefill-device=32; prefill-disk=64"
    assert ours(headers)["x-pdserve-cached"] == answer["usage"]["pdserve"]["cached"] == where
    assert ours(headers)["x-pdserve-cached-tokens"] == "64"


async def test_a_stream_says_it_before_its_first_token_and_again_at_its_end():
    async with frontend(SCRIPT) as client:
        headers, events = await stream(client, HELLO | STREAM)
    found = ours(headers)
    assert KNOWN.items() <= found.items()
    *chunks, end = events
    assert end == "[DONE]"
    told = json.loads(chunks[-1])["usage"]["pdserve"]
    assert told["worker"] == "w1"
    assert told["ttft_ms"] == float(found["x-pdserve-ttft-ms"])
    assert all("pdserve" not in (json.loads(c)["usage"] or {}) for c in chunks[:-1])


async def test_running_usage_says_it_once():
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with frontend(SCRIPT) as client:
        _, events = await stream(client, HELLO | STREAM | {"stream_options": options})
    told = ["pdserve" in (json.loads(event).get("usage") or {}) for event in events[:-1]]
    assert told == [False] * (len(told) - 1) + [True]


async def test_prompts_of_one_request_are_told_together():
    def script(request):
        placed = Placement(
            worker=NodeId(f"w{request.prompt_index}"),
            router=NodeId("r1"),
            policy="ttft",
            attempts=1 + request.prompt_index,
            overlap_tokens=32,
            predicted_ttft=None,
            held=0.0,
        )
        return replace(SCRIPT, placement=placed)

    async with frontend(script) as client:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 2}
        _, headers, answer = await client.post("/v1/completions", body)
    assert headers["x-pdserve-worker"] == "w0,w1,w2"
    assert headers["x-pdserve-attempts"] == "3"
    told = answer["usage"]["pdserve"]
    assert (told["worker"], told["overlap_tokens"]) == ("w0,w1,w2", 96)
    assert (told["cached_tokens"], told["predicted_ttft_ms"]) == (192, None)


async def test_browsers_may_read_it():
    async with frontend(SCRIPT, cors_origins=("https://a.example",)) as client:
        origin = {"Origin": "https://a.example"}
        _, headers, _ = await client.post(CHAT, HELLO, origin)
    exposed = headers["Access-Control-Expose-Headers"].split(", ")
    assert set(ours(headers)) <= set(exposed)


# ---------------------------------------------------------------------- waiting


async def test_headers_wait_for_the_first_token_but_not_for_ever():
    script = replace(SCRIPT, interval=1.2)
    async with frontend(script, header_wait=0.5) as client:
        headers, events = await stream(client, HELLO | STREAM | {"max_tokens": 1})
    found = ours(headers)
    assert KNOWN.items() <= found.items()
    assert "x-pdserve-cached-tokens" not in found
    assert "x-pdserve-ttft-ms" not in found
    comments = [event for event in events if event.startswith(":")]
    assert comments
    assert events[: len(comments)] == comments, "none among the tokens"
    last = json.loads(events[-2])
    assert last["usage"]["pdserve"]["cached_tokens"] == 64
    assert events[-1] == "[DONE]"


async def test_headers_that_go_out_before_a_worker_is_found_say_nothing_of_it():
    async with frontend(replace(SCRIPT, hold_open=0.3), header_wait=0.05) as client:
        headers, events = await stream(client, HELLO | STREAM)
    assert set(ours(headers)) == {"x-pdserve-seed"}
    assert json.loads(events[-2])["usage"]["pdserve"]["worker"] == "w1"


@pytest.mark.parametrize("held", [False, True])
async def test_an_error_has_a_status_unless_the_headers_are_out(held):
    error = Overloaded("all workers are busy", retry_after=7.0)
    script = Script(refuse=error, hold_open=0.3 if held else 0.0)
    async with frontend(script, header_wait=0.1 if held else 10.0) as client:
        body = HELLO | STREAM
        if held:
            _, events = await stream(client, body)
            *comments, last = events
            assert comments
            assert all(comment.startswith(":") for comment in comments)
            assert json.loads(last)["error"]["message"] == "all workers are busy"
        else:
            status, headers, answer = await client.post(CHAT, body)
            assert (status, headers["Retry-After"]) == (429, "7")
            assert answer["error"]["message"] == "all workers are busy"
            assert answer["error"]["code"] == "overloaded"


async def test_an_engine_that_fails_before_the_first_token_is_a_status():
    async with frontend(Script(fail=EngineDied("it is gone"))) as client:
        status, headers, _ = await client.post(CHAT, HELLO | STREAM)
    assert status == 503
    assert "Retry-After" in headers


@pytest.mark.parametrize("streamed", [{}, STREAM])
async def test_an_error_names_the_worker_that_had_the_request(streamed):
    gone = EngineDied("it is gone")
    async with frontend(replace(SCRIPT, tokens=[], fail=gone)) as client:
        status, headers, _ = await client.post(CHAT, HELLO | streamed)
    assert (status, ours(headers)["x-pdserve-worker"]) == (503, "w1")
    async with frontend(replace(SCRIPT, refuse=Overloaded("busy"))) as client:
        status, headers, _ = await client.post(CHAT, HELLO | streamed)
    assert (status, ours(headers)) == (429, {}), "no worker has taken it"


async def test_a_client_that_hangs_up_while_it_is_told_to_wait_frees_everything():
    async with frontend(Script(silent_after=0), header_wait=0.05) as client:
        body = json.dumps(HELLO | STREAM).encode()
        async with raw_connection(client) as (reader, writer):
            writer.write(http("POST", CHAT, body))
            await reader.readuntil(b": waiting for the first token\n\n")
            writer.transport.abort()
        await until(lambda: client.service.active_requests == 0)
        assert client.backend.idle


# ---------------------------------------------------------------------- what is asked


async def test_wishes_reach_the_backend(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text(
        '[[key]]\nkey = "sk-12345678"\ntenant = "research"\nweight = 2.0\nmax_priority = 3\n'
    )
    keys.chmod(0o600)
    headers = {
        "Authorization": "Bearer sk-12345678",
        "x-pdserve-worker": "a,b,!c",
        "x-pdserve-slo-ttft-ms": "1500",
    }
    async with frontend(SCRIPT, api_keys_file=keys) as client:
        await client.post(CHAT, HELLO | {"session_id": "talk", "priority": 3}, headers)
    (hints,), (request,) = client.backend.hints, client.backend.requests
    assert (hints.tenant, hints.weight, hints.session_id) == ("research", 2.0, "talk")
    assert (hints.allowed, hints.denied, hints.slo_ttft) == (("a", "b"), ("c",), 1.5)
    assert 0 <= hints.waited < 60
    assert request.priority == 3


@pytest.mark.parametrize(
    ("name", "value"), [("x-pdserve-slo-ttft-ms", "soon"), ("x-pdserve-worker", "a b")]
)
async def test_a_wish_that_is_not_understood_is_refused(name, value):
    async with frontend(SCRIPT) as client:
        status, _, answer = await client.post(CHAT, HELLO, {name: value})
        assert client.backend.requests == []
    assert (status, answer["error"]["param"]) == (400, name)
    assert name in answer["error"]["message"]


async def test_a_session_id_is_short():
    async with frontend(SCRIPT) as client:
        status, _, answer = await client.post(CHAT, HELLO | {"session_id": "x" * 257})
    assert (status, answer["error"]["param"]) == (400, "session_id")


# ---------------------------------------------------------------------- POST /route


@pytest.mark.parametrize("body", [HELLO, {"prompt": "hello there"}, {"prompt": [5, 6, 7]}])
async def test_a_route_is_explained(body):
    async with frontend(SCRIPT) as client:
        client.backend.explained = EXPLAINED
        status, _, answer = await client.post("/route", body, {"x-pdserve-worker": "!b"})
        assert client.backend.requests == []
        (hints,) = client.backend.hints
        assert client.service.active_requests == 0
    assert status == 200
    assert hints.denied == ("b",)
    assert answer.pop("prompt_tokens") > 0
    assert answer == {
        "object": "route",
        "model": "tiny",
        "router": "router",
        "policy": "ttft",
        "worker": "a",
        "refusal": None,
        "held": 3,
        "predicted_ttft_ms": 500.0,
        "candidates": [
            {
                "worker": "a",
                "standing": "sound",
                "chosen": True,
                "overlap_tokens": 64,
                "terms": {"cost": 0.5, "prefill": 0.25},
                "reused_tokens": {"device": 64, "host": 96},
            },
            {
                "worker": "b",
                "standing": "draining",
                "chosen": False,
                "overlap_tokens": 0,
                "terms": {},
                "reused_tokens": {},
            },
        ],
        "kv_sources": [{"worker": "b", "tokens": 256, "device_tokens": 160, "kept": True}],
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (HELLO | {"prompt": "x"}, "prompt"),
        ({}, "prompt"),
        ({"prompt": None, "messages": None}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": 7}, "messages"),
        ({"prompt": "x", "temperature": 9}, "temperature"),
        (b"[]", None),
        (b"\xff", None),
        (b'{"prompt": "x", "prompt": "y"}', "prompt"),
    ],
)
async def test_a_body_that_is_no_request_is_refused(body, param):
    async with frontend(SCRIPT) as client:
        client.backend.explained = EXPLAINED
        status, _, answer = await client.post("/route", body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_without_a_router_nothing_is_explained():
    async with frontend(SCRIPT) as client:
        status, headers, answer = await client.post("/route", HELLO)
    assert (status, answer["error"]["code"]) == (503, "no_router")
    assert headers["Retry-After"] == "1"


async def test_an_explanation_needs_a_key(tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nkey = "sk-12345678"\ntenant = "research"\n')
    keys.chmod(0o600)
    async with frontend(SCRIPT, api_keys_file=keys) as client:
        client.backend.explained = EXPLAINED
        assert (await client.post("/route", HELLO))[0] == 401
        known = {"Authorization": "Bearer sk-12345678"}
        assert (await client.post("/route", HELLO, known))[0] == 200


async def test_the_official_client_skips_what_keeps_its_connection_open():
    async with (
        frontend(replace(SCRIPT, interval=0.5), header_wait=0.1) as client,
        openai.AsyncOpenAI(
            base_url=f"{client.url}/v1",
            api_key="none",
            max_retries=0,
            default_headers={"Connection": "close"},
        ) as official,
    ):
        messages: Any = HELLO["messages"]
        stream = await official.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=1,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert "x-pdserve-ttft-ms" not in stream.response.headers, "they did not wait"
        chunks: list[Any] = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.pdserve["worker"] == "w1"
