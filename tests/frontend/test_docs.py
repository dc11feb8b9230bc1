"""docs/api.md and docs/api-keys.md name what the code has, and nothing that it has not."""

import dataclasses
import re
from pathlib import Path

from pdserve import errors
from pdserve.frontend.access.api_keys import _ENTRY, KeyLimits, parse_keys
from pdserve.frontend.api.adapters.responses_tools import MAX_DESCRIPTIONS, MAX_FUNCTIONS
from pdserve.frontend.preprocess.output_parsers import MAX_TOOLS
from pdserve.messages.grammar_limits import MAX_GRAMMAR
from pdserve.protocols.anthropic_messages import REFUSED_BY_MESSAGES, MessagesRequest
from pdserve.protocols.completion_requests import MAX_STOPS, ChatRequest, CompletionRequest
from pdserve.protocols.embeddings import EmbeddingRequest
from pdserve.protocols.ollama.requests import (
    REFUSED_BY_OLLAMA_CHAT,
    REFUSED_BY_OLLAMA_GENERATE,
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaOptions,
    OllamaShowRequest,
)
from pdserve.protocols.openapi import document
from pdserve.protocols.request_decoder import MAX_STRUCTURE, MAX_VALUES
from pdserve.protocols.responses_api import REFUSED_BY_RESPONSES, ResponsesRequest
from pdserve.protocols.scoring import (
    REFUSED_BY_RERANK,
    REFUSED_BY_SCORE,
    RerankRequest,
    ScoreRequest,
)
from pdserve.protocols.unsupported_fields import (
    OF_OTHER_SERVERS,
    REFUSED_BY_CHAT,
    REFUSED_BY_COMPLETIONS,
    WITHOUT_EFFECT,
)
from pdserve.text.chat.chat_messages import MAX_NESTING
from pdserve.text.text_pool import INLINE_CHARS, INLINE_FAST
from pdserve.text.tool_parsers import python_literals
from pdserve.text.tool_parsers.schema_budget import MAX_STEPS
from pdserve.text.tool_parsers.typed_values import MAX_PARAMETER_STEPS

DOCS = Path(__file__).parents[2] / "docs"
API = (DOCS / "api.md").read_text()
KEYS = (DOCS / "api-keys.md").read_text()
NAMED = set(re.findall(r"`([^`]+)`", re.sub("``.*?``", "", API)))


def test_every_field_of_a_request_is_named():
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    fields |= set(EmbeddingRequest.__struct_fields__)
    fields |= {*RerankRequest.__struct_fields__, *ScoreRequest.__struct_fields__}
    nested = {"stream_options"}  # by its own fields
    assert fields - nested <= NAMED


def test_every_refused_field_is_named():
    refused = {*REFUSED_BY_CHAT, *REFUSED_BY_COMPLETIONS, *REFUSED_BY_SCORE, *REFUSED_BY_RERANK}
    assert {name for name in refused if not name.startswith("guided_")} <= NAMED
    assert "guided_*" in NAMED


def test_every_field_without_effect_is_named():
    assert WITHOUT_EFFECT <= NAMED


def test_every_field_of_the_other_apis_is_named():
    fields = {*ResponsesRequest.__struct_fields__, *MessagesRequest.__struct_fields__}
    nested = {"text", "reasoning", "output_config"}  # by their own fields
    assert fields - nested <= NAMED
    assert {*REFUSED_BY_RESPONSES, *REFUSED_BY_MESSAGES} - OF_OTHER_SERVERS.keys() <= NAMED


def test_every_field_of_ollamas_api_is_named():
    records = (OllamaChatRequest, OllamaGenerateRequest, OllamaEmbedRequest, OllamaOptions)
    for record in (*records, OllamaShowRequest):
        assert set(record.__struct_fields__) <= NAMED
    assert {*REFUSED_BY_OLLAMA_CHAT, *REFUSED_BY_OLLAMA_GENERATE} <= NAMED


def test_every_endpoint_is_named():
    for path in document("0")["paths"]:
        assert path in API


def subclasses(kind):
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_every_code_a_client_can_get_is_named_with_its_status():
    kinds = subclasses(errors.RequestError) - {errors.RequestError} | {
        *(errors.Overloaded, errors.RateLimited, errors.NotReady, errors.Draining),
        *(errors.NoWorker, errors.NoRouter, errors.WorkerLost, errors.EngineDied),
        *(errors.DeadlineExceeded, errors.EngineError),
    }
    for kind in kinds:
        rows = [row for row in API.splitlines() if row.startswith(f"| {kind.http_status} |")]
        assert any(f"`{kind.code}`" in row for row in rows), kind


def test_the_example_of_a_key_file_is_one():
    block = re.search(r"\n\n((?:    .*\n|\n)+)", KEYS)
    assert block is not None
    text = block[1].replace("\n    ", "\n")
    ring = parse_keys(text.lstrip().encode(), "example")
    assert ring.authenticate("Bearer sk-research-4f1d2c").tenant == "research"
    assert len(ring) == 2


def test_every_field_of_a_key_is_named():
    limits = {f"limits.{field.name}" for field in dataclasses.fields(KeyLimits)}
    assert limits | set(_ENTRY) - {"limits"} <= set(re.findall(r"`([^`]+)`", KEYS))


def test_the_bounds_on_structure_are_those_of_the_code():
    page = (DOCS / "limits.md").read_text()
    section = page.split("## What a client's structure may cost")[1].split("\n## ")[0]
    numbers = (
        *(MAX_STRUCTURE, MAX_VALUES, MAX_STEPS, MAX_TOOLS, MAX_PARAMETER_STEPS, MAX_NESTING),
        *(MAX_STOPS, python_literals.MAX_STRUCTURE, INLINE_CHARS, MAX_GRAMMAR >> 10, MAX_FUNCTIONS),
    )
    for number in numbers:
        assert f"{number:,}" in section or str(number) in section, number
    assert f"{MAX_DESCRIPTIONS >> 20} Mi" in section
    assert f"{INLINE_FAST * INLINE_CHARS >> 10} KiB" in section
