"""How much output fits, and that clients recognise the refusals."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.errors import ContextLengthExceeded
from pdserve.frontend.preprocess.context_length import (
    ContextFit,
    check_prompt_length,
    max_output_tokens,
)
from tests.frontend.support import HELLO, MODEL, card, frontend

CARD = card(max_model_len=100)
SENTENCE = "This model's maximum context length is 100 tokens. However, "
"""By its beginning LiteLLM tells that another model should be asked, and so do others."""


def test_an_output_that_fits_is_as_long_as_asked_for():
    for fit in ContextFit:
        assert max_output_tokens(90, "max_tokens", 10, CARD, fit) == 90


@pytest.mark.parametrize(
    ("fit", "asked", "granted"),
    [
        (ContextFit.ANY, 91, 90),
        (ContextFit.ANY, 32_000, 90),
        (ContextFit.WITHIN, 91, 90),
        (ContextFit.WITHIN, 100, 90),
        (ContextFit.WITHIN, 101, None),
        (ContextFit.STRICT, 91, None),
    ],
)
def test_a_longer_one_is_cut_or_refused(fit: ContextFit, asked: int, granted: int | None):
    if granted is not None:
        assert max_output_tokens(asked, "max_tokens", 10, CARD, fit) == granted
        return
    with pytest.raises(ContextLengthExceeded) as caught:
        max_output_tokens(asked, "max_tokens", 10, CARD, fit)
    error = caught.value
    assert error.message.startswith(f"{SENTENCE}you requested {10 + asked} tokens")
    assert "lower 'max_tokens' to 90" in error.message
    assert (error.code, error.param) == ("context_length_exceeded", "max_tokens")
    assert error.message.endswith(f"({error.code})")
    assert error.overrun == (10, asked, 100)


def test_a_prompt_leaves_room_for_one_token():
    check_prompt_length(99, CARD, "messages")
    with pytest.raises(ContextLengthExceeded) as caught:
        check_prompt_length(100, CARD, "prompt[1]")
    assert caught.value.message.startswith(f"{SENTENCE}your prompt resulted in 100 tokens")
    assert caught.value.message.endswith("(context_length_exceeded)")
    assert caught.value.param == "prompt[1]"


@pytest.mark.parametrize("words", [200, 20_000])
async def test_a_prompt_that_is_too_long_says_so_counted_or_not(words: int):
    async with frontend(models={MODEL: card(max_model_len=100)}) as client:
        for path, field in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * words}]}),
            ("/v1/completions", {"prompt": "x " * words}),
        ):
            status, _, answer = await client.post(path, field)
            assert status == 400
            assert answer["error"]["message"].startswith(SENTENCE)
            assert answer["error"]["code"] == "context_length_exceeded"


async def test_a_chat_is_cut_unless_the_api_is_strict():
    models = {MODEL: card(max_model_len=100)}
    async with frontend(models=models) as client:
        await client.chat(max_tokens=100)
        asked = client.backend.requests[-1]
        assert len(asked.prompt) + asked.sampling.max_tokens == 100
        status, _, _ = await client.post("/v1/chat/completions", HELLO | {"max_tokens": 101})
        assert status == 400
    async with frontend(models=models, strict_api=True) as client:
        status, _, answer = await client.post("/v1/chat/completions", HELLO | {"max_tokens": 100})
        assert status == 400
        assert answer["error"]["param"] == "max_tokens"


async def test_what_is_cut_does_not_count_for_the_size_of_an_answer():
    asked: dict[str, Any] = {"prompt": [5] * 50, "max_tokens": 100, "logprobs": 0}
    async with frontend(models={MODEL: card(max_model_len=100)}, max_answer=10_000) as client:
        await client.complete(**asked)  # 50 tokens; a hundred would be 13,600 bytes
        status, _, answer = await client.post("/v1/completions", asked | {"logprobs": 5})
    assert status == 400
    assert "alternatives" in answer["error"]["message"]
