"""Builds the `/v1/embeddings` answer from the vectors of a plan's inputs."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from pdserve.frontend.output.response_builder import ChoiceSink, ResponseBuilder
from pdserve.protocols.embeddings import Embedding, EmbeddingList

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.frontend.output.embedding_format import EmbeddingFormat
    from pdserve.frontend.output.response_memory import ResponseMemory
    from pdserve.frontend.plan import Prompt, RequestPlan
    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.request import TokenDelta
    from pdserve.observe.metrics import ModelMetrics

__all__ = ["EmbeddingChoice", "EmbeddingResponseBuilder"]

_encode_json = msgspec.json.Encoder().encode


class EmbeddingChoice:
    """Waits for one input's vector."""

    def __init__(self, index: int, shape: EmbeddingFormat, grow: Callable[[Bytes], None]) -> None:
        self._shape = shape
        self._grow = grow
        self.index = index
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.first: Seconds | None = None
        self.last: Seconds | None = None
        self.finish_reason = "stop"
        self.vector = b""
        self.done = False
        """True once the vector has arrived."""
        self.over = asyncio.Event()
        """Set when `done` is."""

    def on_delta(self, delta: TokenDelta, now: Seconds) -> None:
        """Takes the input's vector and sets `done`. Errors: `EngineError` for a delta without a
        valid vector."""
        finish = delta.finish
        self.vector = self._shape.checked(b"" if finish is None else finish.embedding)
        self._grow(len(self.vector))
        self.done = True
        self.over.set()


class EmbeddingResponseBuilder(ResponseBuilder):
    """Collects the vectors of all inputs; `body` is the answer once `finished` is set."""

    choices: list[EmbeddingChoice]  # type: ignore[assignment]  # `_choice` makes no other kind

    def __init__(
        self,
        plan: RequestPlan,
        metrics: ModelMetrics,
        arrival: Seconds,
        time: Callable[[], Seconds],
        gathered: ResponseMemory,
    ) -> None:
        """`gathered` limits its memory; the builder removes itself from it at the end."""
        assert plan.vectors is not None
        self._shape = plan.vectors
        self._gathered = gathered
        super().__init__(plan, metrics, arrival, time)

    def begin(self, now: Seconds) -> None:
        """Does nothing: a vector is not a first token, so no time to first token is measured."""
        self.first_token = now

    def cancel(self) -> None:
        super().cancel()
        self._gathered.forget(self)

    @property
    def stage(self) -> str:
        placed = any(sink.course.placement is not None for sink in self.sinks)
        if self.first_token is None and not placed:
            return "waiting for a worker"
        done = sum(choice.done for choice in self.choices)
        return f"computing vectors, {done} of {len(self.choices)} done"

    def _choice(self, index: int, prompt: Prompt) -> ChoiceSink:
        return EmbeddingChoice(index, self._shape, self._grow)

    def _grow(self, more: Bytes) -> None:
        self._gathered.grow(self, more)

    @property
    def work(self) -> int:
        """Cost of `body`, in characters of text to tokenize; writing one number costs as much."""
        return self._shape.kept * len(self.choices)

    def body(self) -> bytes:
        """The answer as JSON. Thread-safe, because a finished answer no longer changes."""
        written = self._shape.written
        write_vectors = self.plan.write_vectors
        if write_vectors is not None:
            vectors = [self._shape.numbers(choice.vector) for choice in self.choices]
            return write_vectors(self.plan, vectors, self.usage(last=True))
        return _encode_json(
            EmbeddingList(
                data=[
                    Embedding(index=choice.index, embedding=written(choice.vector))
                    for choice in self.choices
                ],
                model=self.plan.model_name,
                usage=self.usage(last=True),
            )
        )
