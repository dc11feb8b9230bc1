"""One choice's tokens on their way to text: what can be shown after each one, and how it ended.

Plain decisions over the detokeniser and the stop matcher. A piece carries the logprobs and ids of
all tokens since the piece before, so that however text is held back, every token is told exactly
once, in order, up to and including the one that ended the choice. Whether pieces become chunks of a
stream or one answer is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.request import Finish, TokenDelta, TokenLogprob
    from pdserve.openai.responses import FinishReason
    from pdserve.text.incremental import Detokenizer
    from pdserve.text.stop import StopMatcher


@dataclass(slots=True)
class Piece:
    """Text that became final, and the tokens told with it."""

    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Per token, the characters of the choice's text before it."""


class ChoiceText:
    """Text state of one choice. Owned by the request's answer, fed on the event loop's thread."""

    __slots__ = (
        "_chars",
        "_detokenizer",
        "_matcher",
        "_pending",
        "completion_tokens",
        "finish_reason",
        "stop_reason",
    )

    def __init__(
        self, detokenizer: Detokenizer, matcher: StopMatcher | None, start: int = 0
    ) -> None:
        """Args: `start` is the length of the text before the output (an echoed prompt)."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._chars = start
        self._pending = Piece("")
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        """Set with the last piece."""
        self.stop_reason: int | str | None = None

    def feed(self, delta: TokenDelta) -> list[Piece]:
        """The pieces that a delta makes final: one per token that shows text.

        The last piece of the choice may be without text; `finish_reason` is set then. Tokens after
        the one that completed a stop string are dropped.
        """
        pieces: list[Piece] = []
        logprobs = delta.logprobs or ()
        for index, token in enumerate(delta.tokens):
            text = self._token(token, logprobs[index] if logprobs else None)
            if self._matcher is not None and self._matcher.matched is not None:
                self.finish_reason, self.stop_reason = "stop", self._matcher.matched
                pieces.append(self._take(text))
                return pieces
            if text:
                pieces.append(self._take(text))
        if delta.finish is not None:
            self._finish(delta.finish, pieces)
        return pieces

    def _token(self, token: int, logprob: TokenLogprob | None) -> str:
        pending = self._pending
        pending.tokens.append(token)
        if logprob is not None:
            pending.logprobs.append(logprob)
            pending.offsets.append(self._chars)
        self.completion_tokens += 1
        text = self._detokenizer.feed(token)
        self._chars += len(text)
        return text if self._matcher is None else self._matcher.feed(text)

    def _finish(self, finish: Finish, pieces: list[Piece]) -> None:
        rest = self._detokenizer.flush()
        matched = None
        if self._matcher is not None:
            rest = self._matcher.feed(rest, 0)
            matched = self._matcher.matched
            rest += self._matcher.flush()
        self.finish_reason = "stop" if matched is not None else finish.reason
        self.stop_reason = matched if matched is not None else finish.stop_reason
        last = self._take(rest)
        if pieces and not last.tokens:
            pieces[-1].text += rest
        else:
            pieces.append(last)

    def _take(self, text: str) -> Piece:
        piece, self._pending = self._pending, Piece("")
        piece.text = text
        return piece


def join(pieces: Sequence[Piece]) -> Piece:
    """All of them as one."""
    return Piece(
        "".join([piece.text for piece in pieces]),
        [token for piece in pieces for token in piece.tokens],
        [logprob for piece in pieces for logprob in piece.logprobs],
        [offset for piece in pieces for offset in piece.offsets],
    )
