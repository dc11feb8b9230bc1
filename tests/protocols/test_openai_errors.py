import msgspec

from pdserve.errors import ContextLengthExceeded
from pdserve.protocols.openai_errors import ErrorBody, ErrorDetail, error_body


def test_an_error_has_openais_four_fields():
    error = ContextLengthExceeded("too long", param="messages")
    assert msgspec.json.decode(error_body(error), type=ErrorBody) == ErrorBody(
        error=ErrorDetail(
            message="too long",
            type="invalid_request_error",
            param="messages",
            code="context_length_exceeded",
        )
    )


def test_absent_param_and_code_are_null():
    raw = msgspec.json.decode(error_body(ContextLengthExceeded("x")))
    assert raw["error"]["param"] is None
