"""The JSON of a stream's chunks, put together from bytes that are made once per stream.

A token's chunk is `head + text + tail`: everything but the text is known when the stream begins.
What comes out decodes as `ChatChunk` or `Completion` of `responses.py`. Text arrives escaped for
the inside of a JSON string. It knows nothing of HTTP, tokens or when a chunk is due.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.openai.responses import FinishReason, Usage

_json = msgspec.json.Encoder().encode

NULL = b"null"


@dataclass(frozen=True, slots=True)
class ChunkForm:
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
class Extras:
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
    ) -> None:
        """Args: `usage_field` puts a `usage` on every chunk, as OpenAI does when asked for it."""
        self._chat = chat
        kind = "chat.completion.chunk" if chat else "text_completion"
        self._start = b'data: {"id":%s,"object":"%s","created":%d,"model":%s,' % (
            _json(answer_id),
            kind.encode(),
            created,
            _json(model),
        ) + b'"system_fingerprint":%s,"choices":[' % _json(fingerprint)
        self._usage_field = usage_field
        self._end = b',"usage":null}\n\n' if usage_field else b"}\n\n"

    def form(self, index: int) -> ChunkForm:
        """The constant parts for choice `index`."""
        start = self._start + b'{"index":%d,' % index
        text, bare, close = (
            (b'"delta":{"content":"', b'"delta":{}', b'"}')
            if self._chat
            else (b'"text":"', b'"text":""', b'"')
        )
        return ChunkForm(
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
    ) -> bytes:
        """The first chunk of a chat choice. `content` is `null` where perhaps none will follow."""
        ids = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + _json(prompt_token_ids)
        delta = b'"delta":{"role":"assistant","content":%s}' % content
        rest = b',"logprobs":null,"finish_reason":null}]'
        return b"".join((self._start, b'{"index":%d,' % index, delta, rest, ids, self._end))

    def full(self, form: ChunkForm, text: bytes, extras: Extras) -> bytes:
        """A chunk of any content."""
        return self._chunk(form.head + text + form.after_text if text else form.bare, extras)

    def delta(self, index: int, delta: bytes, extras: Extras) -> bytes:
        """A chat's chunk whose `delta` is this JSON object."""
        opening = b'%s{"index":%d,"delta":%s,"logprobs":' % (self._start, index, delta)
        return self._chunk(opening, extras)

    def _chunk(self, opening: bytes, extras: Extras) -> bytes:
        reason = NULL if extras.finish_reason is None else b'"%s"' % extras.finish_reason.encode()
        parts = [opening, extras.logprobs, b',"finish_reason":', reason]
        if extras.finish_reason is not None:
            parts += (b',"stop_reason":', _json(extras.stop_reason))
        if extras.token_ids is not None:
            parts += (b',"token_ids":', _json(extras.token_ids))
        if extras.prompt_token_ids is not None:
            parts += (b',"prompt_token_ids":', _json(extras.prompt_token_ids))
        parts.append(b"}]")
        parts.append(
            self._end if extras.usage is None else b',"usage":%s}\n\n' % _json(extras.usage)
        )
        return b"".join(parts)

    def usage(self, usage: Usage) -> bytes:
        """The chunk without choices that ends a stream whose client asked for its usage."""
        return b'%s],"usage":%s}\n\n' % (self._start, _json(usage))
