"""What routers are asked."""

from __future__ import annotations

import math

import pytest
from msgspec import structs

from pdserve.errors import ProtocolError
from pdserve.messages.handoff import EnqueueItem, PrefillItem
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.messages.routing import RouteRequest
from pdserve.token_ids import token_ids
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
    question = RouteRequest(request_id="r", model="m", prompt_tokens=1, max_tokens=1)
    assert decoder(RouteRequest)(encode(question)) == question
    with pytest.raises(ProtocolError):
        decoder(RouteRequest)(encode(structs.replace(question, **wrong)))


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_neither_does_a_request_nor_its_item(wrong: float) -> None:
    asked = GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids([1]),
        sampling=SamplingParams(max_tokens=1),
        deadline=2.0,
    )
    item = EnqueueItem(PrefillItem(request=1, round=0, model="m", prompt_tokens=1, deadline=-0.5))
    assert decoder(GenerateRequest)(encode(asked)) == asked
    assert decoder(EnqueueItem)(encode(item)) == item
    with pytest.raises(ProtocolError):
        decoder(GenerateRequest)(encode(structs.replace(asked, deadline=wrong)))
    with pytest.raises(ProtocolError):
        decoder(EnqueueItem)(encode(EnqueueItem(structs.replace(item.item, deadline=wrong))))
