"""Writes the JSON of stream chunks from bytes that are prepared once per stream.

A token's chunk is `head + text + tail`: everything but the text is known when the stream begins.
The output decodes as `ChatChunk` or `Completion` of `completion_responses.py`. Text arrives escaped
for the inside of a JSON string. It does not know HTTP, tokens or when a chunk is due.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.protocols.completion_responses import FinishReason, Usage

_json = msgspec.json.Encoder().encode

NULL = b"null"
_NO_REASONING = b'"reasoning":null,"reasoning_content":null,'


@dataclass(frozen=True, slots=True)
class ChunkTemplate:
    """The constant parts of one choice's chunks, as whole events."""

    head: bytes
    """Up to the opening quote of the text."""
    tail: bytes
    """From the closing quote on, for a chunk that carries text alone."""
    bare: bytes
    """Instead of `head` and text, where there is no text."""
    after_text: bytes
    """From the closing quote to the value of `logprobs`."""


@dataclass(frozen=True, slots=True)
class ChunkExtras:
    """What a chunk may carry beyond its text; each value is JSON."""

    logprobs: bytes = NULL
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None
    usage: Usage | None = None


class ChunkWriter:
    """Chunks of one stream."""

    def __init__(
        self,
        *,
        chat: bool,
        answer_id: str,
        created: int,
        model: str,
        fingerprint: str | None,
        usage_field: bool,
        reasons: bool = False,
    ) -> None:
        """Args: `usage_field` puts a `usage` on every chunk, as OpenAI does if the client asks for
        usage; `reasons`: deltas without reasoning have null fields for it, because clients read the
        field of each delta.
        """
        self._chat = chat
        self._silence = _NO_REASONING if reasons else b""
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._start = b'data: {"id":%s,"object":"%s","created":%d,"model":%s,' % (
            _json(answer_id),
            kind.encode(),
            created,
            _json(model),
        ) + b'"system_fingerprint":%s,"choices":[' % _json(fingerprint)
        self._usage_field = usage_field
        self._end = b',"usage":null}\n\n' if usage_field else b"}\n\n"

    def form(self, index: int) -> ChunkTemplate:
        """The constant parts for choice `index`."""
        start = self._start + b'{"index":%d,' % index
        silence = self._silence
        text, bare, close = (
            (b'"delta":{%s"content":"' % silence, b'"delta":{%s}' % silence[:-1], b'"}')
            if self._chat
            else (b'"text":"', b'"text":""', b'"')
        )
        return ChunkTemplate(
            head=start + text,
            tail=close + b',"logprobs":null,"finish_reason":null}]' + self._end,
            bare=start + bare + b',"logprobs":',
            after_text=close + b',"logprobs":',
        )

    def role(
        self,
        index: int,
        prompt_token_ids: Sequence[int] | None = None,
        *,
        content: bytes = b'""',
        usage: Usage | None = None,
    ) -> bytes:
        """The first chunk of a chat choice. `content` is `null` if perhaps no text follows."""
        ids = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + _json(prompt_token_ids)
        delta = b'"delta":{"role":"assistant",%s"content":%s}' % (self._silence, content)
        rest = b',"logprobs":null,"finish_reason":null}]'
        end = self._ending(usage)
        return b"".join((self._start, b'{"index":%d,' % index, delta, rest, ids, end))

    def full(self, form: ChunkTemplate, text: bytes, extras: ChunkExtras) -> bytes:
        """A chunk of any content."""
        return self._chunk(form.head + text + form.after_text if text else form.bare, extras)

    def delta(self, index: int, delta: bytes, extras: ChunkExtras, *, reasoning: bool) -> bytes:
        """A chat's chunk whose `delta` is this JSON object, with `reasoning` in it or not."""
        if not reasoning and self._silence:
            rest = delta[1:]
            delta = b"{" + (self._silence[:-1] if rest == b"}" else self._silence) + rest
        opening = b'%s{"index":%d,"delta":%s,"logprobs":' % (self._start, index, delta)
        return self._chunk(opening, extras)

    def _chunk(self, opening: bytes, extras: ChunkExtras) -> bytes:
        reason = NULL if extras.finish_reason is None else b'"%s"' % extras.finish_reason.encode()
        parts = [opening, extras.logprobs, b',"finish_reason":', reason]
        if extras.finish_reason is not None:
            parts += (b',"stop_reason":', _json(extras.stop_reason))
        if extras.token_ids is not None:
            parts += (b',"token_ids":', _json(extras.token_ids))
        if extras.prompt_token_ids is not None:
            parts += (b',"prompt_token_ids":', _json(extras.prompt_token_ids))
        parts.append(b"}]")
        parts.append(self._ending(extras.usage))
        return b"".join(parts)

    def _ending(self, usage: Usage | None) -> bytes:
        return self._end if usage is None else b',"usage":%s}\n\n' % _json(usage)

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that ends a stream whose client asked for its usage."""
        return b'%s],"usage":%s}\n\n' % (self._start, _json(usage))
