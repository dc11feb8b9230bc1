"""Every operation of `/openapi.json` under made-up data, right and wrong, against a real server.

What is described is what comes: status, content type, headers and body. Nothing is an error of the
server's own, nothing hangs, and its memory does not grow from round to round. Schemathesis makes
data that fit the document and data that do not; making one takes twenty times as long as asking the
server, so each is asked in several forms: a few of its fields, next to fields that ask for
something, or with a value of another kind somewhere within.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from schemathesis.core.failures import FailureGroup

from pdserve.protocols import completion_responses
from pdserve.protocols.ollama import answers as ollama
from pdserve.protocols.openai_errors import ErrorBody
from pdserve.protocols.openapi import document
from pdserve.protocols.sse import SseDecoder
from tests.e2e.server import Server, serving
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from schemathesis import Case

DOCUMENT = document("0")
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS: dict[str, Any] = {
    operation.label: operation
    for operation in (found.ok() for found in SCHEMA.get_all_operations())  # type: ignore[union-attr]
}
BASES, FORMS = (40, 15) if is_long() else (5, 12)
"""Data by schemathesis per operation and kind, and forms in which each is asked besides."""
PATIENCE = 20.0
"""Seconds for an answer."""
GROWTH = 48 << 20
"""Bytes that a round may add to the server, which fills caches of bounded size meanwhile."""
EVENTS = {
    "ChatChunk": completion_responses.ChatChunk,
    "Completion": completion_responses.Completion,
}
LINES: dict[str, Any] = {
    "OllamaChatAnswer": ollama.OllamaChatAnswer,
    "OllamaGenerateAnswer": ollama.OllamaGenerateAnswer,
}
ODD: list[Any] = [None, True, 0, -1, 2**31, 2**63, 1.5, 1e308, "", "\x00", [], {}, [[]], "a" * 3000]
AS_DESCRIBED: list[Any] = [
    getattr(CHECKS.get_one(name), "func", CHECKS.get_one(name))
    for name in (
        "status_code_conformance",
        "content_type_conformance",
        "response_headers_conformance",
        "response_schema_conformance",
    )
]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    """One whose answers are short."""
    engine = "torch" if is_long() else "instant"
    flags: tuple[str, ...] = (
        "--engine",
        engine,
        "--max-model-len",
        "192",
        "--max-choices",
        "4",
        "--threads",
        "1",
    )
    flags += ("--pooling", "mean") if is_long() else ()
    with serving(tiny_model, "--served-model-name", "tiny", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.headers["Connection"] = "close"
        session.trust_env = False
        yield session


class Asked:
    """Asks one server, and looks at each answer."""

    def __init__(self, server: Server, session: requests.Session) -> None:
        self._server = server
        self._session = session
        self.count = 0
        self.statuses: Counter[int] = Counter()

    def ask(self, case: Case) -> None:
        self.count += 1
        said = json.dumps({"path": case.path_parameters, "body": _shown(case.body)})[:2000]
        answer = case.call(
            base_url=self._server.url, session=self._session, timeout=PATIENCE
        )  # a time-out is an error, and so is a connection that was cut
        try:
            self._look(case, answer)
        except (AssertionError, FailureGroup) as error:
            told = f"{error}\n{getattr(error, 'exceptions', '')}"
            raise AssertionError(
                f"{case.operation.label} with {said}\nwas answered {answer.status_code} "
                f"{answer.content[:1000]!r}:\n{told}"
            ) from None

    def _look(self, case: Case, answer: Any) -> None:
        status = answer.status_code
        self.statuses[status] += 1
        # Ollama's errors are a sentence, and have no code.
        bare = case.path.startswith("/api/")
        assert status < 500 or (status == 503 and (bare or answer.json()["error"]["code"]))
        if status == 400:
            error = answer.json()["error"]
            assert error if bare else error["message"]
        kind = (answer.headers.get("content-type") or [""])[0]
        if kind.startswith("text/event-stream"):
            _look_at_events(case, answer.content)
        elif kind == "application/x-ndjson":
            _look_at_lines(case, answer.content)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about what it did not think of itself
                case.validate_response(answer, checks=AS_DESCRIBED)


def _shown(value: Any) -> Any:
    return value if isinstance(value, dict | list | str | int | float | None) else repr(value)


def _look_at_events(case: Case, body: bytes) -> None:
    """A stream is whole, and each of its events what the document says."""
    described = DOCUMENT["paths"][case.path][case.method.lower()]["responses"]["200"]["content"]
    name = described["text/event-stream"].get("x-event-schema", {}).get("$ref", "").split("/")[-1]
    events = SseDecoder().feed(body)
    assert events
    for event in events:
        if not event.done:
            wanted = EVENTS.get(name)
            found = msgspec.json.decode(event.data)
            if wanted is not None:
                msgspec.convert(found, wanted | ErrorBody if "error" in found else wanted)


def _look_at_lines(case: Case, body: bytes) -> None:
    """A stream of JSON lines is whole, and each line what the document says of whole answers."""
    described = DOCUMENT["paths"][case.path][case.method.lower()]["responses"]["200"]["content"]
    record = LINES[described["application/json"]["schema"]["$ref"].split("/")[-1]]
    lines = [msgspec.json.decode(line, type=record) for line in body.splitlines()]
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]


def forms(body: Any, required: set[str], random: Random, path: str) -> Iterator[Any]:
    """Bodies near to this one. Many fields at once are nearly always refused for one of them."""
    if not isinstance(body, dict):
        return
    for number in range(FORMS):
        near = {name: body[name] for name in required if name in body}
        others = sorted(set(body) - required)
        for name in random.sample(others, min(len(others), random.randrange(4))):
            near[name] = body[name]
        if random.random() < 0.7:  # what is right by itself, so that the rest is looked at
            sound = {name: SOUND[name] for name in sorted(required) if name in SOUND}
            near.update(sound or EITHER.get(path, {"prompt": "hi"}))
            near.update(random.choice(ASKING))
            near["model"] = "tiny"
        near = copy.deepcopy(near)
        if number % 3 == 2:
            _spoil(near, random)
        yield near


SOUND: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "query": "hi",
    "documents": ["hi", "ho"],
    "tokens": [5, 6],
    "max_tokens": 5,
    "model": "tiny",
}
EITHER: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hi"},
    "/v1/score": {"text_1": "hi", "text_2": ["hi", "ho"]},
    "/score": {"queries": ["hi", "ho"], "documents": ["hi", "ho"]},
}
"""What is right where no field is required by itself."""
ASKING: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}, "stream_interval": 3},
    {"max_tokens": 5, "n": 2, "logprobs": 1},
    {"max_tokens": 5, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
    {"max_tokens": 1, "prompt_logprobs": 1, "truncate_prompt_tokens": -1},
    {"max_tokens": 0, "echo": True, "logprobs": 0},
    {"bad_words": ["a"], "allowed_token_ids": [5, 6], "temperature": 0},
    {"response_format": {"type": "json_object"}},
    {"structured_outputs": {"choice": ["a", "b"]}},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"},
]


def _spoil(value: Any, random: Random) -> None:
    """Put something else in some place within."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = random.choice(keys)
        inner = value[key]
        if isinstance(inner, dict | list) and inner and random.random() < 0.7:
            value = inner
            continue
        value[key] = random.choice(ODD)
        return


def rounds(label: str, asked: Asked, seed: int, bases: int = BASES) -> None:
    """One operation, once through."""
    operation = OPERATIONS[label]
    kinds = [GenerationMode.POSITIVE]
    if operation.body:
        kinds.append(GenerationMode.NEGATIVE)
    for kind in kinds:

        @seeded(seed)
        @settings(
            max_examples=bases,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(case=operation.as_strategy(kind), number=st.integers(0, 2**32))
        def ask(case: Case, number: int) -> None:
            asked.ask(case)
            for body in forms(case.body, _required(case), Random(number), case.path):
                case.body = body
                asked.ask(case)

        ask()


def _required(case: Case) -> set[str]:
    described = DOCUMENT["paths"][case.path][case.method.lower()]
    if "requestBody" not in described:
        return set()
    schema = described["requestBody"]["content"]["application/json"]["schema"]
    names = [one["$ref"] for one in schema.get("anyOf", [schema])]
    records = [DOCUMENT["components"]["schemas"][name.split("/")[-1]] for name in names]
    return set(records[0].get("required", ()))


@pytest.mark.timeout(3600 if is_long() else 120)
@pytest.mark.parametrize("label", OPERATIONS)
def test_an_operation_answers_as_it_is_described(
    label: str, server: Server, session: requests.Session, seed: int
) -> None:
    asked = Asked(server, session)
    rounds(label, asked, seed)
    assert asked.statuses
    print(f"{label}: {asked.count} cases, {dict(asked.statuses)}")


@pytest.mark.timeout(3600 if is_long() else 120)
def test_memory_does_not_grow_with_what_is_asked(
    server: Server, session: requests.Session, seed: int
) -> None:
    """All that is cached is bounded: a second round of the same size adds next to nothing."""
    asked = Asked(server, session)
    process = psutil.Process(server.process.pid)
    labels = [label for label in OPERATIONS if label.startswith("POST")]
    labels = labels if is_long() else labels[:2]
    sizes = []
    for number in range(3):
        for label in labels:
            rounds(label, asked, seed + number, BASES // 4 + 1)
        sizes.append(process.memory_info().rss)
    assert sizes[2] - sizes[1] < GROWTH, sizes
    assert server.metric("pdserve_http_requests_in_flight") == 0
