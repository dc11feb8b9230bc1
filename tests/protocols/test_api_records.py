"""The records of `/v1/responses` and `/v1/messages`."""

import json

import pytest

from pdserve import errors
from pdserve.errors import InvalidRequest
from pdserve.protocols.anthropic_messages import COUNT_TOKENS, MESSAGES, messages_error_body
from pdserve.protocols.completion_requests import ChatRequest
from pdserve.protocols.extensions import Extensions, extensions_of
from pdserve.protocols.responses_api import RESPONSES


def test_every_extension_is_a_field_of_a_chat():
    assert set(Extensions.__struct_fields__) <= set(ChatRequest.__struct_fields__)
    request = RESPONSES.decode(b'{"input": "x", "top_k": 3}').request
    chat = ChatRequest(messages=[], **extensions_of(request))
    assert chat.top_k == 3


def test_a_body_of_messages_can_be_counted():
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "temperature": 1}
    whole = MESSAGES.decode(json.dumps(body).encode()).request
    counted = COUNT_TOKENS.decode(json.dumps(body).encode()).request
    assert counted.messages == whole.messages
    del body["max_tokens"]
    assert COUNT_TOKENS.decode(json.dumps(body).encode()).request.max_tokens is None
    with pytest.raises(InvalidRequest, match="'max_tokens' is required"):
        MESSAGES.decode(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (errors.InvalidRequest("x"), "invalid_request_error"),
        (errors.Unauthorized("x"), "authentication_error"),
        (errors.Forbidden("x"), "permission_error"),
        (errors.ModelNotFound("x"), "not_found_error"),
        (errors.MethodNotAllowed("x"), "invalid_request_error"),
        (errors.RequestTimeout("x"), "timeout_error"),
        (errors.PayloadTooLarge("x"), "request_too_large"),
        (errors.RateLimited("x"), "rate_limit_error"),
        (errors.EngineError("x"), "api_error"),
        (errors.NoWorker("x"), "overloaded_error"),
        (errors.DeadlineExceeded("x"), "timeout_error"),
    ],
)
def test_the_type_of_an_error_follows_from_its_status(error, kind):
    body = json.loads(messages_error_body(error, "req-1"))
    assert body == {
        "type": "error",
        "error": {
            "type": kind,
            "message": "x",
            "details": {"error_code": error.code, "param": None},
        },
        "request_id": "req-1",
    }
