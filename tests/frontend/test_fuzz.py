"""Whatever arrives, the frontend answers: never a 500, never a hang, and nothing is left behind."""

import asyncio
import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.service import FrontendService
from pdserve.protocols.completion_requests import ChatRequest, CompletionRequest
from pdserve.protocols.embeddings import EmbeddingRequest
from pdserve.protocols.ollama.requests import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from pdserve.protocols.scoring import RerankRequest, ScoreRequest
from pdserve.protocols.unsupported_fields import REFUSED_BY_CHAT
from tests.frontend.support import card, http, tokens
from tests.support.fake_backend import FakeBackend, Script
from tests.support.seeds import is_long

PATHS = [
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/score"),
    *("/invocations", "/ping", "/tokenize", "/detokenize", "/v1/models"),
    *("/api/chat", "/api/generate", "/api/embed", "/api/embeddings", "/api/show", "/api/tags"),
]
SPECS = settings(
    max_examples=2000 if is_long() else 60,
)

TEXT = st.text(max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 30)
    | st.floats(allow_nan=True)
    | TEXT
    | st.sampled_from(["user", "tiny", "text", "fox", "a" * 3000]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool"])},
        optional={
            "content": TEXT
            | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT})),
            "name": TEXT,
            "tool_calls": VALUES,
        },
    ),
    min_size=1,
    max_size=4,
)
NAMES = st.sampled_from(
    sorted(
        {
            *ChatRequest.__struct_fields__,
            *CompletionRequest.__struct_fields__,
            *EmbeddingRequest.__struct_fields__,
            *RerankRequest.__struct_fields__,
            *ScoreRequest.__struct_fields__,
            *OllamaChatRequest.__struct_fields__,
            *OllamaGenerateRequest.__struct_fields__,
            *OllamaEmbedRequest.__struct_fields__,
            *REFUSED_BY_CHAT,
            "x",
        }
        - {"messages", "prompt"}
    )
)
PROMPTS = TEXT | st.lists(st.integers(0, 500), max_size=5) | st.lists(TEXT, max_size=3) | VALUES
FIELDS = st.dictionaries(NAMES, VALUES, max_size=4)
TEXTS = TEXT | st.lists(TEXT | st.fixed_dictionaries({"text": TEXT}), max_size=3) | VALUES
BODIES = st.builds(
    lambda fields, messages, prompt: fields | {"messages": messages, "prompt": prompt},
    FIELDS,
    MESSAGES | VALUES,
    PROMPTS,
) | st.builds(
    lambda fields, names, one, two: fields | dict(zip(names, (one, two), strict=False)),
    FIELDS,
    st.sampled_from([("query", "documents"), ("text_1", "text_2"), ("input",), ("prompt",)]),
    TEXTS,
    TEXTS,
)
# Lone surrogates as escapes, other text as it is.
RAW = BODIES.map(lambda body: json.dumps(body).encode()) | st.binary(max_size=60)


class Harness:
    """One frontend for all examples of a test, on a loop of its own."""

    def __init__(self, template: str | None = None) -> None:
        self.runner = asyncio.Runner()
        changes: dict[str, Any] = {} if template is None else {"chat_template": template}
        changes |= {"pooling": "last", "embedding_size": 1, "features": ("embeddings",)}
        script = Script(tokens=[*tokens("The fox 👍 ran."), 1], vector=lambda request: bytes(4))
        self.backend = FakeBackend({"tiny": card(**changes)}, script)
        config = FrontendConfig(port=0, trust_request_chat_template=False, body_timeout=0.2)
        self.service = FrontendService(config, self.backend)
        self.runner.run(self.service.start())
        self.send(http("POST", "/tokenize", b'{"prompt": ""}', "Connection: close\r\n"))

    def send(self, raw: bytes, *, cut: bool = False) -> bytes:
        """Everything the server says to these bytes until it closes the connection."""
        return self.runner.run(self._send(raw, cut))

    async def _send(self, raw: bytes, cut: bool) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.service.port)
        try:
            writer.write(raw)
            if cut:
                await asyncio.sleep(0)
                writer.transport.abort()
                return b""
            async with asyncio.timeout(20):
                return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def check_empty(self) -> None:
        """Nothing in flight, nothing at the backend."""

        async def settle() -> None:
            async with asyncio.timeout(20):
                while self.service.active_requests or not self.backend.idle:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)

        self.runner.run(settle())

    def close(self) -> None:
        self.runner.run(self.service.stop(0))
        self.runner.close()


@pytest.fixture(scope="module")
def harness():
    harness = Harness()
    yield harness
    harness.close()


def statuses(answer: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3})", answer)]


def post(path: str, body: bytes, headers: str = "") -> bytes:
    return http("POST", path, body, f"{headers}Connection: close\r\n")


@SPECS
@given(st.sampled_from(PATHS), RAW)
def test_any_body_gets_an_answer(harness, path, body):
    answer = harness.send(post(path, body))
    (status,) = statuses(answer)
    assert status < 500, (body, answer)
    head, _, content = answer.partition(b"\r\n\r\n")
    if status >= 400:
        error = json.loads(content)["error"]
        assert error if path.startswith("/api/") else error["message"]
    elif b"event-stream" in head:
        assert content.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    elif b"ndjson" in head and b"chunked" in head:
        assert content.endswith(b"}\n\r\n0\r\n\r\n")
        assert b'"done":true' in content.splitlines()[-4]
    harness.check_empty()


@SPECS
@given(st.sampled_from(PATHS), RAW, st.integers(0, 400))
def test_a_client_may_go_at_any_byte(harness, path, body, length):
    harness.send(post(path, body)[:length], cut=True)
    harness.check_empty()


HEADER = st.builds(
    lambda name, value: name + b": " + value + b"\r\n",
    st.sampled_from(
        b"Content-Length Transfer-Encoding Content-Encoding Expect Connection Authorization "
        b"x-request-id Origin Upgrade Accept Host Cookie".split()
    )
    | st.binary(max_size=10),
    st.sampled_from(
        b"0 5 -1 1e3 chunked gzip br 100-continue close keep-alive upgrade websocket * \xff".split()
    )
    | st.just(b"Bearer x")
    | st.just(b"a" * 200)
    | st.binary(max_size=20),
)


@SPECS
@given(
    st.sampled_from([b"GET", b"POST", b"HEAD", b"OPTIONS", b"CONNECT", b"PRI", b"\xff"]),
    st.sampled_from([path.encode() for path in PATHS])
    | st.sampled_from([b"*", b"/", b"//", b"http://x/live", b"/%", b"/%ff", b"x:1", b"/?a=%00"])
    | st.binary(max_size=20),
    st.lists(HEADER, max_size=6),
    st.binary(max_size=40),
)
def test_any_head_gets_an_answer_or_a_close(harness, method, target, headers, body):
    raw = method + b" " + target + b" HTTP/1.1\r\n" + b"".join(headers)
    answer = harness.send(raw + b"Connection: close\r\n\r\n" + body + b"\r\n\r\n")
    assert all(status < 500 for status in statuses(answer)), answer
    harness.check_empty()


PIECES = st.sampled_from(
    """{{ messages[0].content }}
{{ messages[9].x.y }}
{% for m in messages %}
{% endfor %}
{{ raise_exception('no') }}
{{ 1/0 }}
{{ x }}
{{ messages | tojson }}
{% if
{{ messages[0]['__class__'] }}
{{ range(10**9) | list }}
{% set a = 1 %}
{{ bos_token }}
{{ ().__class__ }}
{{ 'a' * 10**9 }}
{{ strftime_now('%Y') }}
text""".splitlines()
)


@settings(SPECS, max_examples=400 if is_long() else 15)
@given(st.lists(PIECES, max_size=5).map("".join), MESSAGES)
def test_any_model_template_gets_an_answer(template, messages):
    harness = Harness(template)
    try:
        answer = harness.send(post(PATHS[0], json.dumps({"messages": messages}).encode()))
        (status,) = statuses(answer)
        code = json.loads(answer.partition(b"\r\n\r\n")[2]).get("error", {}).get("code")
        # A template that does not compile is the operator's mistake, not the client's.
        assert status < 500 or code == "config_error", answer
    finally:
        harness.close()
