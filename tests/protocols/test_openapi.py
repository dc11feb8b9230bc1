import json
import re

import msgspec

from pdserve.protocols.completion_requests import ChatRequest
from pdserve.protocols.openapi import document

DOCUMENT = document("1.2.3")


def test_it_is_plain_json_of_version_3_1():
    assert json.loads(msgspec.json.encode(DOCUMENT)) == DOCUMENT
    assert DOCUMENT["openapi"] == "3.1.0"
    assert DOCUMENT["info"]["version"] == "1.2.3"


def test_every_reference_leads_somewhere():
    text = json.dumps(DOCUMENT)
    for section, name in re.findall(r'"#/components/(\w+)/(\w+)"', text):
        assert name in DOCUMENT["components"][section], name


def test_every_operation_has_answers_with_descriptions():
    for path, item in DOCUMENT["paths"].items():
        for method in ("get", "post"):
            for code, answer in item.get(method, {}).get("responses", {}).items():
                assert "$ref" in answer or "description" in answer, (path, method, code)


def test_every_request_field_is_described():
    properties = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    assert set(properties) == set(ChatRequest.__struct_fields__)


def test_streams_and_errors_are_described():
    post = DOCUMENT["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert "text/event-stream" in post["200"]["content"]
    assert {"400", "401", "404", "429", "503", "504"} <= set(post)


def test_ollamas_api_streams_lines_and_has_errors_of_its_own():
    answers = DOCUMENT["paths"]["/api/chat"]["post"]["responses"]
    assert answers["400"] == {"$ref": "#/components/responses/OllamaError400"}
    assert set(answers["200"]["content"]) == {"application/json", "application/x-ndjson"}
    assert set(DOCUMENT["paths"]["/api/delete"]) == {"delete"}


def test_both_other_apis_are_described_in_their_own_words():
    paths = DOCUMENT["paths"]
    for path, error in (("/v1/responses", "Error400"), ("/v1/messages", "MessagesError400")):
        answers = paths[path]["post"]["responses"]
        assert answers["400"] == {"$ref": f"#/components/responses/{error}"}
        assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
        assert "504" in answers
    assert set(paths["/v1/responses/{id}"]["get"]["responses"]) == {"401", "404"}
