"""One line per finished request: its fields, its size, and nothing that a user wrote."""

from __future__ import annotations

import json
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from pdserve.errors import EngineError, Overloaded
from pdserve.frontend.config import FrontendConfig
from pdserve.frontend.service import FrontendService
from pdserve.observe.logs import JsonFormatter, TextFormatter
from pdserve.observe.metrics import Metrics
from tests.frontend.support import HELLO, MODEL, Client, card, tokens, until
from tests.support.fake_backend import FakeBackend, Script

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CHAT = "/v1/chat/completions"
SECRET = "the prompt nobody may read"


class Lines(logging.Handler):
    """Formats as collectors and people read it."""

    def __init__(self) -> None:
        super().__init__()
        self.json: list[dict[str, Any]] = []
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.json.append(json.loads(JsonFormatter({"node": "f1"}).format(record)))
        self.texts.append(TextFormatter().format(record))


@asynccontextmanager
async def logged(script: Any = None, **config: Any) -> AsyncIterator[tuple[Client, Lines]]:
    """A frontend with `--log-requests`, and its lines."""
    log, lines = logging.getLogger("pdserve.requests"), Lines()
    backend = FakeBackend({MODEL: card()}, script if script is not None else Script())
    config = {"port": 0, "log_requests": True} | config
    service = FrontendService(FrontendConfig(**config), backend, Metrics())
    await service.start()
    await service._models.prepare()
    level = log.level
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    try:
        async with aiohttp.ClientSession() as http:
            yield Client(service, backend, http), lines
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
        await service.stop(0)


async def test_a_finished_request_has_one_line_with_all_of_it():
    async with logged(Script(tokens=tokens("hello")), trace_sample=1.0) as (client, lines):
        _, headers, answer = await client.post(CHAT, HELLO)
        await until(lambda: lines.json)
    (line,) = lines.json
    usage = answer["usage"]
    expected = {
        "logger": "pdserve.requests",
        "node": "f1",
        "request_id": headers["x-request-id"],
        "trace_id": headers["x-pdserve-trace-id"],
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "outcome": "completed",
        "model": MODEL,
        "stream": False,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "finish": answer["choices"][0]["finish_reason"],
    }
    assert expected.items() <= line.items()
    for name in ("total_ms", "body_ms", "tokenize_ms", "decode_ms"):
        assert 0 <= line[name] <= line["total_ms"], name
    assert line["message"] == f"POST {CHAT}: 200 in {line['total_ms']:g} ms"
    assert len(json.dumps(line)) < 900
    assert lines.texts[0].endswith(f"[{headers['x-request-id']}]")


async def test_no_line_has_what_a_user_wrote_or_was_answered():
    body = {"messages": [{"role": "user", "content": SECRET}], "user": SECRET, "stop": [SECRET]}
    async with logged(Script(tokens=tokens("hello"))) as (client, lines):
        await client.post(CHAT, body)
        await client.post(CHAT, body | {"temperature": SECRET})
        await until(lambda: len(lines.json) == 2)
    assert SECRET not in json.dumps(lines.json)
    assert "hello" not in json.dumps(lines.json)


async def test_failures_and_refusals_have_their_line():
    async with logged(Script(fail=EngineError("broken"))) as (client, lines):
        await client.post(CHAT, HELLO)
        await client.post(CHAT, {"messages": 3})
        await client.post("/v1/nothing", {})
        await until(lambda: len(lines.json) == 3)
    failed, invalid, nowhere = lines.json
    assert (failed["status"], failed["outcome"], failed["error"]) == (500, "error", "EngineError")
    assert failed["reason"] == "broken"
    assert (invalid["status"], invalid["outcome"]) == (400, "invalid")
    assert invalid["param"] == "messages"
    assert "reason" not in invalid
    assert (nowhere["status"], nowhere["route"]) == (404, "other")
    assert "outcome" not in nowhere


async def test_a_refused_request_has_its_line():
    async with logged(Script(refuse=Overloaded("full", retry_after=1.0))) as (client, lines):
        status, _, _ = await client.post(CHAT, HELLO)
        await until(lambda: lines.json)
    assert (status, lines.json[0]["status"], lines.json[0]["outcome"]) == (429, 429, "overloaded")


async def test_probes_and_scrapes_have_none():
    async with logged() as (client, lines):
        for path in ("/health", "/metrics", "/live"):
            await client.get(path)
        await client.get("/v1/models")
        await until(lambda: lines.json)
    assert [line["route"] for line in lines.json] == ["/v1/models"]


async def test_without_the_flag_there_are_none():
    async with logged(log_requests=False) as (client, lines):
        await client.post(CHAT, HELLO)
    assert lines.json == []
