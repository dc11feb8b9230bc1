"""How an answer is worded for an API that is neither OpenAI's chat nor its completions.

A request of such an API becomes a chat request; its plan carries a `Dialect`, which turns parts
into that API's events and a whole answer into its object. It is made for one request, decides
nothing about the output and touches no socket. Bytes are whole events of a stream, or nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import PdserveError
    from pdserve.frontend.output import Piece
    from pdserve.frontend.plan import Plan
    from pdserve.openai.responses import ChatCompletion, FinishReason, Usage
    from pdserve.text.parts import Part


class Dialect(Protocol):
    """Words one answer. Of a stream: `begin`, any number of `parts`, then `finish` or `error`."""

    def begin(self, plan: Plan, usage: Usage) -> bytes:
        """The first token has come. `usage` knows the prompt."""
        ...

    def parts(self, parts: Sequence[Part], piece: Piece) -> bytes:
        """More of the answer; perhaps no parts at all, only tokens. `piece` has the tokens and
        logprobs behind `parts`, which leave out what the client does not want to see."""
        ...

    def finish(
        self, finish_reason: FinishReason, stop_reason: int | str | None, usage: Usage
    ) -> bytes:
        """The end, with everything that stands behind the last part."""
        ...

    def error(self, error: PdserveError) -> bytes:
        """The stream cannot go on: `begin` may not have been called. Nothing follows."""
        ...

    def whole(self, answer: ChatCompletion) -> bytes:
        """An answer that is not streamed, as JSON."""
        ...
