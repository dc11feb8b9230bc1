"""Formats logprobs in the API's two formats: chat's list of objects, completions' parallel lists.

Bytes are exact even where a token is not a whole character. Does not decide which tokens are
reported, or when.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.protocols.completion_responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    TopLogprob,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.messages.request import TokenLogprob
    from pdserve.protocols.completion_responses import ScoredToken
    from pdserve.text.tokenization.tokenizer import Tokenizer

FLOOR = -9999.0
"""Replaces minus infinity, which JSON cannot express; vLLM uses the same value."""


def chat_logprobs(
    tokenizer: Tokenizer,
    logprobs: Sequence[TokenLogprob],
    as_ids: bool = False,
    *,
    own: bool = False,
) -> ChatLogprobs:
    """One entry per token, with as many `top_logprobs` as requested.

    Args: `as_ids` names tokens by their ids, which is unambiguous, and leaves `bytes` unchanged;
    `own`: each token is among its `top_logprobs`.
    """
    name = named_by_id if as_ids else tokenizer.token_text
    if own:
        logprobs = [replace(logprob, top=_with_own(logprob)) for logprob in logprobs]
    return ChatLogprobs(content=[_chat_entry(tokenizer, logprob, name) for logprob in logprobs])


def _chat_entry(
    tokenizer: Tokenizer, logprob: TokenLogprob, name: Callable[[int], str]
) -> ChatLogprob:
    return ChatLogprob(
        token=name(logprob.token),
        logprob=max(logprob.logprob, FLOOR),
        bytes=list(tokenizer.token_bytes(logprob.token)),
        top_logprobs=[
            TopLogprob(
                token=name(token),
                logprob=max(value, FLOOR),
                bytes=list(tokenizer.token_bytes(token)),
            )
            for token, value in logprob.top
        ],
    )


def _with_own(logprob: TokenLogprob) -> list[tuple[int, float]]:
    """The alternatives with the token's own logprob first."""
    own = logprob.token, logprob.logprob
    return [own, *(each for each in logprob.top if each[0] != logprob.token)]


def completion_logprobs(
    tokenizer: Tokenizer,
    logprobs: Sequence[TokenLogprob],
    offsets: Sequence[int],
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Parallel lists. Each token's own logprob is the first of its `top_logprobs`."""
    name = _namer(tokenizer, as_ids)
    return CompletionLogprobs(
        tokens=[name(logprob.token) for logprob in logprobs],
        token_logprobs=[max(logprob.logprob, FLOOR) for logprob in logprobs],
        top_logprobs=[_top(name, logprob) for logprob in logprobs],
        text_offset=list(offsets),
    )


def prompt_logprobs(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    echo: str,
    logprobs: Sequence[TokenLogprob],
    skip_special_tokens: bool,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Logprobs of the echoed prompt; its first token has none, since no token comes before it.

    Args: `echo` is the prompt's text in the answer, to which the offsets refer.
    """
    offsets = _offsets_in(echo, tokenizer, prompt, skip_special_tokens)
    rest = completion_logprobs(tokenizer, logprobs, offsets[1:], as_ids)
    return CompletionLogprobs(
        tokens=[_namer(tokenizer, as_ids)(prompt[0]), *rest.tokens],
        token_logprobs=[None, *rest.token_logprobs],
        top_logprobs=[None, *rest.top_logprobs],
        text_offset=offsets,
    )


def _offsets_in(
    echo: str, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool
) -> list[int]:
    """Per prompt token, the number of characters of `echo` before it.

    A prompt sent as text is echoed as it was sent: with the special tokens in it, but without those
    that the tokenizer added around it. So `echo` is searched for in the text of all tokens.
    """
    whole, offsets = _text_and_offsets(tokenizer, prompt, False)
    place = whole.rfind(echo)
    if place < 0:
        # The prompt came as ids and shows no special tokens, or the tokenizer changes text.
        place = 0
        _, offsets = _text_and_offsets(tokenizer, prompt, skip_special_tokens)
    return [min(max(0, offset - place), len(echo)) for offset in offsets]


def _text_and_offsets(
    tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool
) -> tuple[str, list[int]]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    parts, offsets, chars = [], [], 0
    for token in prompt:
        offsets.append(chars)
        parts.append(detokenizer.feed(token))
        chars += len(parts[-1])
    parts.append(detokenizer.flush())
    return "".join(parts), offsets


def concatenate(first: CompletionLogprobs | None, then: CompletionLogprobs) -> CompletionLogprobs:
    """Joins the prompt's logprobs, if any, and the output's."""
    if first is None:
        return then
    return CompletionLogprobs(
        tokens=first.tokens + then.tokens,
        token_logprobs=first.token_logprobs + then.token_logprobs,
        top_logprobs=first.top_logprobs + then.top_logprobs,
        text_offset=first.text_offset + then.text_offset,
    )


def best_of(logprobs: Sequence[TokenLogprob], count: int) -> list[TokenLogprob]:
    """Returns the logprobs with at most `count` alternatives each; two fields may have requested
    different numbers."""
    return [
        logprob if len(logprob.top) <= count else replace(logprob, top=logprob.top[:count])
        for logprob in logprobs
    ]


def scored_prompt(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[ScoredToken]:
    """A prompt's logprobs by token id, in vLLM's format. The first token has none."""
    return [None, *(_scored(tokenizer, logprob) for logprob in logprobs)]


def _scored(tokenizer: Tokenizer, logprob: TokenLogprob) -> dict[str, PromptLogprob]:
    own = logprob.token, logprob.logprob, logprob.rank
    best = [(token, value, rank) for rank, (token, value) in enumerate(logprob.top, 1)]
    found: dict[str, PromptLogprob] = {}
    for token, value, rank in (own, *best):
        found.setdefault(
            str(token),
            PromptLogprob(
                logprob=max(value, FLOOR), rank=rank, decoded_token=tokenizer.token_text(token)
            ),
        )
    return found


def _top(name: Callable[[int], str], logprob: TokenLogprob) -> dict[str, float]:
    top: dict[str, float] = {}
    for token, value in _with_own(logprob):
        top.setdefault(name(token), max(value, FLOOR))
    return top


def named_by_id(token: int) -> str:
    """A name for a token that no other token has."""
    return f"token_id:{token}"


def _namer(tokenizer: Tokenizer, as_ids: bool) -> Callable[[int], str]:
    return named_by_id if as_ids else partial(legacy_token, tokenizer)


def legacy_token(tokenizer: Tokenizer, token: int) -> str:
    """The token's text, or `bytes:\xe2\x82` for bytes that are not a whole character.

    This is OpenAI's format: tokens are keys here, and U+FFFD would make many of them equal.
    """
    raw = tokenizer.token_bytes(token)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return tokenizer.token_text(token)
