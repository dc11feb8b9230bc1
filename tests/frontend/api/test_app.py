import json

import pytest

from pdserve.observe.logs import TextFormatter
from tests.frontend.support import HELLO, frontend, http, raw_connection, read_answer, tokens
from tests.support.fake_backend import Script

CHAT = "/v1/chat/completions"
PATHS = [
    CHAT,
    "/v1/completions",
    "/v1/models",
    "/v1/models/tiny",
    "/tokenize",
    "/detokenize",
    "/health",
    "/live",
    "/metrics",
    "/version",
    "/openapi.json",
]
POST_ONLY = [CHAT, "/v1/completions", "/tokenize", "/detokenize"]


@pytest.mark.parametrize(
    "path", ["/v", "/v1", "/v1/models/", "/v1/chat/completions/", "//", "/ü%ff"]
)
async def test_an_unknown_path_is_a_404_in_openais_shape(path):
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(http("GET", path.replace("ü", "%C3%BC")))
        status, _, body = await read_answer(reader)
    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "did you mean '/v1/chat/completions'?"),
        ("/v1/v1/completions", "did you mean '/v1/completions'?"),
        ("/v1/chat/completions/", "did you mean '/v1/chat/completions'?"),
        ("/healthz", "did you mean '/health'?"),
        ("/v1/edits", "see /openapi.json"),
        ("/" + "x" * 5000, "see /openapi.json"),
    ],
)
async def test_an_unknown_path_is_told_the_nearest_one(path, hint):
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(http("GET", path))
        _, _, body = await read_answer(reader)
    assert json.loads(body)["error"]["message"].endswith(f"'; {hint}")


@pytest.mark.parametrize("path", PATHS)
async def test_a_wrong_method_is_a_405_that_says_what_is_right(path):
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(http("PUT", path))
        status, head, body = await read_answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (405, "method_not_allowed")
        right = "POST" if path in POST_ONLY else "GET"
        assert right in head.split("Allow: ")[1].split("\r\n")[0]


@pytest.mark.parametrize("path", PATHS)
async def test_head_is_get_without_a_body_and_options_lists_methods(path):
    async with frontend() as client, raw_connection(client) as (reader, writer):
        writer.write(http("HEAD", path))
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.split()[1] == ("405" if path in POST_ONLY else "200")
        writer.write(http("OPTIONS", path))
        status, head, body = await read_answer(reader)
        assert (status, body) == (204, b"")
        assert "Allow: " in head
        assert "Access-Control" not in head


async def test_every_answer_carries_the_requests_id():
    async with frontend(Script(tokens=tokens("ab"))) as client:
        asked = {"x-request-id": "mine 1"}
        for path in PATHS:
            _, headers, _ = await client.get(path, asked)
            assert headers["x-request-id"] == "mine 1"
        body = json.dumps(HELLO | {"stream": True, "max_tokens": 1}).encode()
        async with client.http.post(client.url + CHAT, data=body, headers=asked) as answer:
            assert answer.headers["x-request-id"] == "mine 1"
        _, headers, _ = await client.get("/live", {"x-request-id": "x" * 200})
        assert headers["x-request-id"].startswith("req-")


async def test_log_lines_of_a_request_carry_its_id(caplog):
    caplog.handler.setFormatter(TextFormatter())
    async with frontend() as client:
        await client.post(CHAT, HELLO | {"zzz": 1}, {"x-request-id": "find-me"})
    (line,) = [line for line in caplog.text.splitlines() if "zzz" in line]
    assert line.endswith("[find-me]")


async def test_without_a_key_only_the_process_endpoints_answer(tmp_path):
    file = tmp_path / "keys.toml"
    file.write_text('[[key]]\nkey = "sk-12345678"\ntenant = "t"\nmodels = ["other"]\n')
    file.chmod(0o600)
    async with frontend(api_keys_file=file) as client:
        for path in ["/health", "/live", "/metrics", "/version", "/openapi.json"]:
            assert (await client.get(path))[0] == 200
        for path in ["/v1/models", "/v1/models/tiny"]:
            assert (await client.get(path))[0] == 401
        for path in POST_ONLY:
            status, _, answer = await client.post(path, {})
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        auth = {"Authorization": "Bearer sk-12345678"}
        _, _, body = await client.get("/v1/models", auth)
        assert json.loads(body)["data"] == []
        assert (await client.get("/v1/models/tiny", auth))[0] == 403
        status, _, _ = await client.post("/tokenize", {"prompt": "x"}, auth)
        assert status == 403


async def test_browsers_of_configured_origins_may_call():
    async with frontend(cors_origins=("https://a.example",)) as client:
        mine, other = {"Origin": "https://a.example"}, {"Origin": "https://b.example"}
        status, headers, _ = await client.post(CHAT, HELLO, mine)
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://a.example")
        status, headers, answer = await client.post(CHAT, HELLO, other)
        assert (status, answer["error"]["code"]) == (403, "forbidden")
        assert "--cors-origins=https://b.example" in answer["error"]["message"]
        assert "Access-Control-Allow-Origin" not in headers
        async with client.http.options(client.url + CHAT, headers=mine) as answer:
            assert "authorization" in answer.headers["Access-Control-Allow-Headers"]
        _, headers, _ = await client.post(CHAT, {}, mine)  # an error can be read, too
        assert headers["Access-Control-Allow-Origin"] == "https://a.example"
