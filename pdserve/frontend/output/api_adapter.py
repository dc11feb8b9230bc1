"""Defines how answers are written for APIs other than OpenAI's chat and completions.

A request of such an API becomes a chat request. Its plan carries an `ApiAdapter`, which turns
output parts into that API's events and a whole answer into its object. One adapter serves one
request; it decides nothing about the output and touches no socket. Its bytes are
whole events of a stream, or empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.errors import PdserveError
    from pdserve.frontend.output.output_processor import OutputDelta
    from pdserve.frontend.plan import RequestPlan
    from pdserve.ids import Bytes
    from pdserve.protocols.completion_responses import ChatCompletion, FinishReason, Usage
    from pdserve.text.output_parts import OutputPart


class ApiAdapter(Protocol):
    """Words one answer. Of a stream: `begin`, any number of `parts`, then `finish` or
    `error`."""

    def repeats(self) -> Bytes:
        """How much of the request it holds, to tell it again."""
        ...

    def begin(self, plan: RequestPlan, usage: Usage) -> bytes:
        """The first token has come. `usage` knows the prompt."""
        ...

    def parts(self, parts: Sequence[OutputPart], piece: OutputDelta) -> bytes:
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
