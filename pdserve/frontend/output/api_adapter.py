"""Defines how answers are written for APIs other than OpenAI's chat and completions.

A request of such an API becomes a chat request. Its plan carries an `ApiAdapter`, which turns
output parts into that API's events and a whole answer into its object. One adapter serves one
request; it decides nothing about the output and touches no socket. Its bytes are
whole events (or lines) of a stream, or empty.
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
    """Writes one answer in an API's format. For a stream: `begin`, any number of `parts`, then
    `finish` or `error`."""

    @property
    def stream_type(self) -> bytes:
        """Content-Type of a stream."""
        ...

    def waiting(self) -> bytes:
        """What a stream sends before `begin` if that takes long; clients skip it."""
        ...

    def repeats(self) -> Bytes:
        """Bytes of the request that it holds in order to repeat them in the answer."""
        ...

    def begin(self, plan: RequestPlan, usage: Usage) -> bytes:
        """Called with the first token. `usage` has the number of prompt tokens."""
        ...

    def parts(self, parts: Sequence[OutputPart], piece: OutputDelta) -> bytes:
        """Takes more of the answer; `parts` may be empty. `piece` has the tokens and logprobs of
        `parts`, including those of parts that the client does not want to see."""
        ...

    def finish(
        self, finish_reason: FinishReason, stop_reason: int | str | None, usage: Usage
    ) -> bytes:
        """Ends the answer; writes everything that follows the last part."""
        ...

    def error(self, error: PdserveError) -> bytes:
        """Ends a failed stream; `begin` may not have been called. No call follows."""
        ...

    def whole(self, answer: ChatCompletion) -> bytes:
        """Returns an answer that is not streamed, as JSON."""
        ...
