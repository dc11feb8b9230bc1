"""What routers are asked."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from pdserve.errors import ProtocolError
from pdserve.messages.routing import Route
from pdserve.wire.codec import decoder, encode


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": 1e-300},
        {"weight": math.inf},
        {"waited": math.inf},
        {"deadline": math.nan},
        {"deadline": math.inf},
        {"slo_ttft": math.inf},
    ],
)
def test_a_question_bears_no_number_that_cannot_be_compared(wrong: dict[str, float]) -> None:
    """Queues are sorted by them."""
    question = Route(request_id="r", model="m", prompt_tokens=1, max_tokens=1)
    assert decoder(Route)(encode(question)) == question
    with pytest.raises(ProtocolError):
        decoder(Route)(encode(structs.replace(question, **wrong)))
