import asyncio
import json
import threading

import anthropic
import pytest

from pdserve import __version__
from pdserve.frontend.preprocess import input_processor as prompts_module
from tests.frontend.support import TOKENIZER, card, frontend, tokens


async def read(client, path):
    status, _, body = await client.get(path)
    return status, json.loads(body)


async def test_models_are_listed_with_their_aliases():
    tiny = card()
    models = {"tiny": tiny, "org/alias": tiny}
    async with frontend(models=models) as client:
        status, listing = await read(client, "/v1/models")
        assert status == 200
        assert [(model["id"], model["root"]) for model in listing["data"]] == [
            ("tiny", "tiny"),
            ("org/alias", "tiny"),
        ]
        assert listing["data"][0]["object"] == "model"
        assert listing["data"][0]["max_model_len"] == 4096
        for path in ("/v1/models/org/alias", "/v1/models/org%2Falias"):
            status, model = await read(client, path)
            assert (status, model["id"], model["created"]) == (200, "org/alias", 1_700_000_000)
        status, error = await read(client, "/v1/models/nobody")
        assert (status, error["error"]["code"]) == (404, "model_not_found")


async def test_anthropics_client_reads_the_models_and_that_there_is_none():
    models = {"tiny": card(aliases=("b", "a"))}
    models |= dict.fromkeys(("a", "b"), models["tiny"])
    async with (
        frontend(models=models) as client,
        anthropic.AsyncAnthropic(base_url=client.url, api_key="x", max_retries=0) as api,
    ):
        listing = await api.models.list()
        assert [model.id for model in listing.data] == ["tiny", "b", "a"]  # the operator's order
        assert (listing.has_more, listing.first_id, listing.last_id) == (False, "tiny", "a")
        model = await api.models.retrieve("a")
        assert (model.type, model.display_name, model.max_input_tokens) == ("model", "a", 4096)
        assert int(model.created_at.timestamp()) == 1_700_000_000
        with pytest.raises(anthropic.NotFoundError) as caught:
            await api.models.retrieve("nope")
    assert caught.value.type == "not_found_error"
    assert "is not served here" in caught.value.message


async def test_metrics_have_vllms_names_for_who_asks():
    async with frontend() as client:
        await client.chat(max_tokens=1)
        status, headers, page = await client.get("/metrics?names=vllm")
        assert (status, headers["Content-Encoding"]) == (200, "gzip")
        assert b'vllm:e2e_request_latency_seconds_count{engine="0",model_name="tiny"} 1.0' in page
        assert b"pdserve_requests_total{" not in page
        status, error = await read(client, "/metrics?names=other")
        assert (status, error["error"]["param"]) == (400, "names")


async def test_text_becomes_tokens_and_tokens_text():
    async with frontend() as client:
        _, _, answer = await client.post(
            "/tokenize", {"prompt": "naïve 👍", "return_token_strs": True}
        )
        ids = answer["tokens"]
        assert ids == tokens("naïve 👍")
        assert answer["count"] == len(ids)
        assert answer["max_model_len"] == 4096
        assert answer["token_strs"] == [TOKENIZER.token_name(token) for token in ids]
        assert "Ġ" in "".join(answer["token_strs"])
        _, _, answer = await client.post("/tokenize", {"prompt": "a"})
        assert answer["token_strs"] is None
        _, _, answer = await client.post("/detokenize", {"tokens": [0, *ids]})
        assert answer == {"prompt": "<s>naïve 👍"}
        _, _, answer = await client.post("/detokenize", {"tokens": []})
        assert answer == {"prompt": ""}


async def test_a_text_is_bounded_beyond_what_the_context_takes(monkeypatch):
    monkeypatch.setattr(prompts_module, "_MAX_CHARS", 10)
    limit = 8 * card().max_model_len
    async with frontend() as client:
        status, _, answer = await client.post("/tokenize", {"prompt": "a" * limit})
        assert (status, answer["count"]) == (200, limit)
        status, _, answer = await client.post("/tokenize", {"prompt": "a" * (limit + 1)})
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert f"{limit + 1} characters" in answer["error"]["message"]


async def test_token_texts_of_a_long_text_are_gathered_off_the_event_loop():
    async with frontend() as client:
        pool = client.service._pool
        before = pool.stats().handed_over
        body = {"prompt": "ab " * 24_000, "return_token_strs": True}
        _, _, answer = await client.post("/tokenize", body)
        assert "".join(answer["token_strs"]) == "abĠ" * 24_000
        assert pool.stats().handed_over == before + 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "ab " * 24_000}),
        ("/detokenize", {"tokens": [5] * 2000}),
    ],
)
async def test_text_work_has_a_deadline(path, body):
    release = threading.Event()
    async with frontend(request_timeout=0.25) as client:
        pool = client.service._pool
        busy = [asyncio.ensure_future(pool.run(1 << 20, release.wait, 10)) for _ in range(2)]
        try:
            status, _, answer = await client.post(path, body)
        finally:
            release.set()
            await asyncio.gather(*busy)
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


async def test_conversations_become_tokens_too():
    async with frontend() as client:
        messages = [{"role": "user", "content": "hi"}]
        _, _, answer = await client.post("/tokenize", {"messages": messages})
        assert TOKENIZER.decode(answer["tokens"], skip_special_tokens=False) == (
            "<s>user: hi</s><s>assistant: "
        )


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"messages": [{"role": "assistant"}], "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10_000]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_bad_requests_are_named(path, body, param):
    async with frontend() as client:
        status, _, answer = await client.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_health_tells_what_a_balancer_and_a_person_want():
    async with frontend() as client:
        status, health = await read(client, "/health")
        assert (status, health["status"], health["reason"]) == (200, "ok", None)
        assert health["version"] == __version__
        assert health["active_requests"] == 0
        assert health["memory_bytes"] > 1 << 20
        assert health["uptime_seconds"] >= 0
        client.backend.unready = "the engine is restarting"
        status, health = await read(client, "/health")
        assert (status, health["status"]) == (503, "unavailable")
        assert health["reason"] == "the engine is restarting"
        client.backend.models = {}
        assert (await read(client, "/health"))[1]["status"] == "loading"
        assert (await client.get("/live"))[0] == 200


async def test_version_schema_and_metrics_are_served():
    async with frontend() as client:
        assert (await read(client, "/version"))[1] == {"version": __version__}
        status, document = await read(client, "/openapi.json")
        assert (status, document["openapi"]) == (200, "3.1.0")
        status, headers, page = await client.get("/metrics")
        assert (status, headers["Content-Type"].split(";")[0]) == (200, "text/plain")
        assert b"pdserve_http_connections 1.0" in page
