"""Reads a streamed answer: typed chunks, their text, and the final usage and finish reason.

The request is sent at the first read. Leaving early closes the connection, which tells the server
to stop: at the end of `async with`, or when Python frees the iterator of a bare `async for`.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import aiohttp
import msgspec

from pdserve.client.errors import BadAnswer, StreamBroken, Timeout, detail_of, event_error
from pdserve.client.transport import why
from pdserve.protocols.completion_responses import ChatChunk, Completion
from pdserve.protocols.sse import EventTooLarge, SseDecoder

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
    from typing import Self

    from pdserve.client.errors import APIError
    from pdserve.client.transport import Answered
    from pdserve.protocols.completion_responses import Usage

__all__ = ["ChatStream", "CompletionStream", "Stream"]

C = TypeVar("C", ChatChunk, Completion)
_AFTERMATH = 1.0
"""Seconds that the connection's own end may take after the stream's, to be used again."""


class Stream(ABC, Generic[C]):
    """One streamed answer; iterate over it once."""

    def __init__(self, record: type[C], ask: Callable[[], Awaitable[Answered]]) -> None:
        self._decode: Callable[[str], C] = msgspec.json.Decoder(record).decode
        self._sse = SseDecoder()
        self._waiting: deque[str] = deque()
        self._ask = ask
        self._answered: Answered | None = None
        self._held = False
        self._text: list[str] = []
        self.length = 0
        """Characters of all choices, of their reasoning and of their calls so far."""
        self.usage: Usage | None = None
        """The last that came: of the whole answer at its end, if the server sends it."""
        self.finish_reason: str | None = None
        """Finish reason of the first choice; None: it has not ended."""
        self.done = False
        """True if the stream has ended normally."""

    @property
    def text(self) -> str:
        """The first choice's text so far."""
        return "".join(self._text)

    @property
    def headers(self) -> Mapping[str, str]:
        """The answer's headers, such as `x-request-id` and `x-pdserve-worker`; empty before it
        begins."""
        return {} if self._answered is None else self._answered.response.headers

    @property
    def request_id(self) -> str | None:
        """The request id in the server's logs."""
        if self._answered is None:
            return None
        return self.headers.get("x-request-id", self._answered.request_id)

    @property
    def attempts(self) -> int:
        """Number of attempts until an answer began."""
        return 0 if self._answered is None else self._answered.attempts

    async def open(self) -> Self:
        """Send the request, once. Errors: any `ClientError`."""
        if self._answered is None:
            self._answered = await self._ask()
        return self

    def close(self) -> None:
        """Close the connection; the server stops unfinished work."""
        if self._answered is not None:
            self._answered.release()

    async def __aenter__(self) -> Self:
        self._held = True
        return await self.open()

    async def __aexit__(self, *exception: object) -> None:
        self.close()

    async def __aiter__(self) -> AsyncGenerator[C, None]:
        """Chunks as they come. Errors: `StreamBroken`, `Timeout`, `BadAnswer`."""
        try:
            await self.open()
            while not self.done:
                while self._waiting:
                    event = self._waiting.popleft()
                    if event == "[DONE]":
                        self.done = True
                        await self._finish()
                        return
                    chunk = self._chunk(event)
                    self._note(chunk)
                    yield chunk
                await self._read()
        finally:
            if not self._held:
                self.close()

    async def texts(self) -> AsyncGenerator[str, None]:
        """Yield the first choice's text as it arrives."""
        chunks = self.__aiter__()
        try:
            async for chunk in chunks:
                for choice in chunk.choices:
                    if choice.index == 0 and (text := self._text_of(chunk)):
                        yield text
        finally:
            await chunks.aclose()

    async def _read(self) -> None:
        """Wait for more events. Errors: `StreamBroken` if there are no more."""
        assert self._answered is not None
        try:
            data = await self._answered.within(self._answered.response.content.readany())
            self._waiting += [event.data for event in self._sse.feed(data)]
        except Timeout as error:
            error.text = self.text
            error.request_id = self.request_id
            error.attempts = self.attempts
            raise
        except EventTooLarge as error:
            raise BadAnswer(str(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise self._break(f"the connection broke: {why(error)}") from None
        if not data:
            raise self._break("the connection ended before the answer did")

    async def _finish(self) -> None:
        """Read the end of the HTTP message, so that the connection can serve the next request."""
        assert self._answered is not None
        content = self._answered.response.content
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(_AFTERMATH):
                while not content.at_eof():
                    await content.readany()

    def _chunk(self, event: str) -> C:
        try:
            return self._decode(event)
        except (msgspec.MsgspecError, UnicodeError) as error:
            detail = detail_of(event)
            if detail is None:
                raise BadAnswer(f"a chunk does not follow the OpenAI API: {error}") from None
            said = event_error(detail, self.request_id)
            raise self._break(f"the server failed: {detail.message}", said) from None

    def _break(self, message: str, error: APIError | None = None) -> StreamBroken:
        broken = StreamBroken(message, self.text, error)
        broken.attempts, broken.request_id = self.attempts, self.request_id
        return broken

    def _note(self, chunk: C) -> None:
        if chunk.usage is not None:
            self.usage = chunk.usage
        self.length += self._length_of(chunk)
        for choice in chunk.choices:
            if choice.index == 0:
                self._text.append(self._text_of(chunk))
                self.finish_reason = choice.finish_reason or self.finish_reason

    @abstractmethod
    def _text_of(self, chunk: C) -> str:
        """What it adds to the first choice's text."""

    @abstractmethod
    def _length_of(self, chunk: C) -> int:
        """What it adds, over all choices, in characters."""


class ChatStream(Stream[ChatChunk]):
    """The result of `Client.chat_stream`."""

    def __init__(self, ask: Callable[[], Awaitable[Answered]]) -> None:
        super().__init__(ChatChunk, ask)

    def _text_of(self, chunk: ChatChunk) -> str:
        return "".join(c.delta.content or "" for c in chunk.choices if c.index == 0)

    def _length_of(self, chunk: ChatChunk) -> int:
        length = 0
        for choice in chunk.choices:
            delta = choice.delta
            length += len(delta.content or "") + len(delta.reasoning or "")
            length += sum(len(call.function.arguments or " ") for call in delta.tool_calls or ())
        return length


class CompletionStream(Stream[Completion]):
    """The result of `Client.complete_stream`."""

    def __init__(self, ask: Callable[[], Awaitable[Answered]]) -> None:
        super().__init__(Completion, ask)

    def _text_of(self, chunk: Completion) -> str:
        return "".join(c.text for c in chunk.choices if c.index == 0)

    def _length_of(self, chunk: Completion) -> int:
        return sum(len(choice.text) for choice in chunk.choices)
