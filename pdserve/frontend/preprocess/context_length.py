"""Computes how many output tokens fit into a model's context, and the error if too few do.

Clients do not read an error's `code`: LiteLLM and the agents recognize these errors by OpenAI's
sentence, so it comes first and the advice follows. Anthropic's sentences are in
`api/adapters/anthropic_request.py`. Plain functions.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from pdserve.errors import ContextLengthExceeded, Overrun

if TYPE_CHECKING:
    from pdserve.messages.card import ModelCard

_CODE = "(context_length_exceeded)"
"""LangChain looks for the code in the sentence, which is all that OpenAI's client shows of an
error."""


class ContextFit(enum.Enum):
    """What happens to a request for more output than the context leaves room for."""

    ANY = enum.auto()
    """The output is cut to the room there is; `/v1/messages` and `/v1/responses` can report
    that."""
    WITHIN = enum.auto()
    """Like the above, but the request is refused if the output would not fit without a prompt
    either, as in vLLM."""
    STRICT = enum.auto()
    """The request is refused, as by OpenAI."""


def max_output_tokens(
    asked: int, field: str, prompt_tokens: int, card: ModelCard, fit: ContextFit = ContextFit.WITHIN
) -> int:
    """Returns the most output tokens, when `field` asks for `asked`.

    Errors: `ContextLengthExceeded`.
    """
    context = card.max_model_len
    room = context - prompt_tokens
    if asked <= room:
        return asked
    if fit is ContextFit.STRICT or (fit is ContextFit.WITHIN and asked > context):
        raise ContextLengthExceeded(
            f"{_sentence(card)} However, you requested {prompt_tokens + asked} tokens "
            f"({prompt_tokens} in the prompt, {asked} in the completion). Shorten the prompt or "
            f"lower '{field}' to {room}. {_CODE}",
            param=field,
            overrun=Overrun(prompt_tokens, asked, context),
        )
    return room


def check_prompt_length(prompt_tokens: int, card: ModelCard, field: str, why: str = "") -> None:
    """Checks that a prompt leaves room for one token. `why`: how the number is known, if it was not
    counted.

    Errors: `ContextLengthExceeded`.
    """
    if prompt_tokens >= card.max_model_len:
        raise ContextLengthExceeded(
            f"{_sentence(card)} However, your {field.partition('[')[0]} resulted in "
            f"{prompt_tokens} tokens{why}, and the output needs room, too. Shorten '{field}', or "
            f"have it cut by 'truncate_prompt_tokens'. {_CODE}",
            param=field,
            overrun=Overrun(prompt_tokens, 0, card.max_model_len),
        )


def _sentence(card: ModelCard) -> str:
    return f"This model's maximum context length is {card.max_model_len} tokens."
