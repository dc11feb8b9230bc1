"""Logprobs in the API's two shapes: chat's list of objects, completions' parallel lists.

Bytes are exact even where a token is no whole character. It does not decide which tokens are told,
nor when.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.openai.responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.request import TokenLogprob
    from pdserve.text.tokenizer import Tokenizer

FLOOR = -9999.0
"""What stands for minus infinity, which JSON cannot say; vLLM uses the same."""


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """One entry per token; `top_logprobs` as many as were asked for."""
    return ChatLogprobs(content=[_chat_entry(tokenizer, logprob) for logprob in logprobs])


def _chat_entry(tokenizer: Tokenizer, logprob: TokenLogprob) -> ChatLogprob:
    return ChatLogprob(
        token=tokenizer.token_text(logprob.token),
        logprob=max(logprob.logprob, FLOOR),
        bytes=list(tokenizer.token_bytes(logprob.token)),
        top_logprobs=[
            TopLogprob(
                token=tokenizer.token_text(token),
                logprob=max(value, FLOOR),
                bytes=list(tokenizer.token_bytes(token)),
            )
            for token, value in logprob.top
        ],
    )


def completion_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], offsets: Sequence[int]
) -> CompletionLogprobs:
    """Parallel lists; each token's own logprob is among its `top_logprobs`."""
    return CompletionLogprobs(
        tokens=[legacy_token(tokenizer, logprob.token) for logprob in logprobs],
        token_logprobs=[max(logprob.logprob, FLOOR) for logprob in logprobs],
        top_logprobs=[_top(tokenizer, logprob) for logprob in logprobs],
        text_offset=list(offsets),
    )


def prompt_logprobs(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    echo: str,
    logprobs: Sequence[TokenLogprob],
    skip_special_tokens: bool,
) -> CompletionLogprobs:
    """The echoed prompt's part: its first token has no logprob, for nothing comes before it.

    Args: `echo` is the prompt's text in the answer, which the offsets count in.
    """
    offsets = _offsets_in(echo, tokenizer, prompt, skip_special_tokens)
    rest = completion_logprobs(tokenizer, logprobs, offsets[1:])
    return CompletionLogprobs(
        tokens=[legacy_token(tokenizer, prompt[0]), *rest.tokens],
        token_logprobs=[None, *rest.token_logprobs],
        top_logprobs=[None, *rest.top_logprobs],
        text_offset=offsets,
    )


def _offsets_in(
    echo: str, tokenizer: Tokenizer, prompt: Sequence[int], skip_special_tokens: bool
) -> list[int]:
    """Per token of the prompt, the characters of `echo` before it.

    A prompt sent as text is echoed as it came: with the special tokens it spells, without those
    that the tokenizer put around it. So `echo` is looked for in the text of all tokens.
    """
    whole, offsets = _text_and_offsets(tokenizer, prompt, False)
    place = whole.rfind(echo)
    if place < 0:  # ids were sent and special tokens left out, or the tokenizer changes text
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
    """The prompt's part, if there is one, before the output's."""
    if first is None:
        return then
    return CompletionLogprobs(
        tokens=first.tokens + then.tokens,
        token_logprobs=first.token_logprobs + then.token_logprobs,
        top_logprobs=first.top_logprobs + then.top_logprobs,
        text_offset=first.text_offset + then.text_offset,
    )


def _top(tokenizer: Tokenizer, logprob: TokenLogprob) -> dict[str, float]:
    top = {legacy_token(tokenizer, token): max(value, FLOOR) for token, value in logprob.top}
    top.setdefault(legacy_token(tokenizer, logprob.token), max(logprob.logprob, FLOOR))
    return top


def legacy_token(tokenizer: Tokenizer, token: int) -> str:
    """The token's text, or `bytes:\\xe2\\x82` for bytes that are no whole character.

    As OpenAI writes them: in this shape tokens are keys, and U+FFFD would make many equal.
    """
    raw = tokenizer.token_bytes(token)
    try:
        raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return tokenizer.token_text(token)
