"""`/invocations`: the body says which endpoint answers it; and `/ping`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import InvalidRequest
from pdserve.frontend.api.request_kinds import (
    CHAT_KIND,
    COMPLETION_KIND,
    EMBEDDING_KIND,
    RERANK_KIND,
    SCORE_KIND,
    kind_of_body,
)
from tests.frontend.support import HELLO, MODEL, card, frontend
from tests.support.fake_backend import Script

PATH = "/invocations"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": HELLO | {"max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/embeddings": {"input": "a"},
    "/v1/rerank": {"query": "a", "documents": ["b", "c"]},
    "/v1/score": {"text_1": "a", "text_2": "b"},
}


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (BODIES["/v1/chat/completions"], CHAT_KIND),
        (BODIES["/v1/completions"], COMPLETION_KIND),
        (BODIES["/v1/embeddings"], EMBEDDING_KIND),
        (BODIES["/v1/rerank"], RERANK_KIND),
        (BODIES["/v1/score"], SCORE_KIND),
        ({"queries": "a", "documents": "b"}, SCORE_KIND),
        ({"queries": "a", "items": "b"}, SCORE_KIND),
        ({"data_1": "a", "data_2": "b"}, SCORE_KIND),
        ({"data_1": "a", "text_1": "b"}, SCORE_KIND),
        ({"input": None, "prompt": "a"}, COMPLETION_KIND),
    ],
)
def test_a_kind_is_known_by_its_field(body: dict[str, Any], kind: object) -> None:
    assert kind_of_body(json.dumps(body).encode()) is kind


@pytest.mark.parametrize("body", [{}, {"input": "a", "prompt": "b"}, {"documents": ["a"]}])
def test_a_body_of_no_kind_or_of_several_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="send exactly one of 'messages', 'prompt'"):
        kind_of_body(json.dumps(body).encode())


async def test_an_answer_is_that_of_the_endpoint() -> None:
    makes = {"pooling": "last", "embedding_size": 1, "features": ("embeddings",)}
    script = Script(tokens=[5], vector=lambda request: b"\0\0\x80?")
    async with frontend(script, {MODEL: card(**makes)}) as client:
        for path, body in BODIES.items():
            answers = [await client.post(each, body) for each in (path, PATH)]
            for status, _, answer in answers:
                assert status == 200, answer
                for name in ("id", "created", "usage"):
                    answer.pop(name, None)
            assert answers[0][2] == answers[1][2]
        events = await client.events(PATH, BODIES["/v1/completions"])
        assert events[-1].done
        _, _, page = await client.get("/metrics")
        assert f'route="{PATH}"' in page.decode()
        for raw in (b"[]", b"{", b'{"prompt": ', b'{"prompt": "a", "prompt": "b"}'):
            status, _, answer = await client.post(PATH, raw)
            assert (status, answer["error"]["code"]) == (400, "invalid_value")


async def test_ping_says_whether_requests_can_be_served() -> None:
    async with frontend() as client:
        for ask in (client.get, lambda path: client.post(path, {"a": 1})):
            status, _, _ = await ask("/ping")
            assert status == 200
    async with frontend(unready="no worker") as client:
        status, headers, _ = await client.get("/ping")
        assert (status, headers["Retry-After"]) == (503, "1")
