"""One choice's tokens on their way to text: what can be shown after each one, and how it ended.

Plain decisions over the detokeniser, the stop matcher and, where the model's markup is read, the
parser of `text.parts`; text reaches them in this order. A piece carries the logprobs and ids of
all tokens since the piece before, so that however text is held back, every token is told exactly
once, in order, up to and including the one that ended the choice. Whether pieces become chunks of a
stream or one answer is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pdserve.text.parts import CallArguments, CallBegin, Content, Reasoning, merged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.messages.request import TokenDelta, TokenLogprob
    from pdserve.openai.responses import FinishReason
    from pdserve.text.incremental import Detokenizer
    from pdserve.text.parts import Part, PartParser
    from pdserve.text.repetition import Repetition
    from pdserve.text.stop import StopMatcher

REPETITION = "repetition_detected"
"""The `stop_reason` of an output that said the same over and over; vLLM's word."""


@dataclass(slots=True)
class Piece:
    """Text that became final, and the tokens told with it."""

    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Per token, the characters of the choice's text before it."""
    parts: list[Part] = field(default_factory=list)
    """What a parser made of the text, which is empty then."""
    reasoning_tokens: int = 0
    """Of `tokens`, those of the model's reasoning, its marks included."""

    @property
    def shown(self) -> list[Part]:
        """The parts, whether a parser has read the text or not."""
        return [Content(self.text)] if self.text else self.parts

    @property
    def size(self) -> int:
        """Characters of text."""
        return len(self.text) + sum(map(_length, self.parts))


class ChoiceText:
    """Text state of one choice. Owned by the request's answer, fed on the event loop's thread."""

    __slots__ = (
        "_calls",
        "_chars",
        "_detokenizer",
        "_hides_reasoning",
        "_matcher",
        "_parser",
        "_pending",
        "_repetition",
        "completion_tokens",
        "finish_reason",
        "stop_reason",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None,
        start: int = 0,
        parser: PartParser | None = None,
        *,
        one_call: bool = False,
        hides_reasoning: bool = False,
        repetition: Repetition | None = None,
    ) -> None:
        """Args: `start` is the length of the text before the output (an echoed prompt);
        `one_call`: a second call of a tool is not told, and ends the choice; `repetition` ends it,
        too.
        """
        self._hides_reasoning = hides_reasoning
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._parser = parser
        self._calls = Calls(one_call)
        self._repetition = repetition
        self._chars = start
        self._pending = Piece("")
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        """Set with the last piece."""
        self.stop_reason: int | str | None = None

    @property
    def settled(self) -> bool:
        """Whatever comes before the end is content as it stands: `pass_on` is enough."""
        return (
            self._parser is not None
            and self._parser.settled
            and self._matcher is None
            and not self._pending.tokens
        )

    def pass_on(self, tokens: Sequence[int]) -> bytes:
        """The content of tokens, once `settled`, for the inside of a JSON string."""
        self.completion_tokens += len(tokens)
        return self._detokenizer.feed_json(tokens)

    def feed(self, delta: TokenDelta) -> list[Piece]:
        """The pieces that a delta makes final: one per token that shows something.

        The last piece of the choice may be empty; `finish_reason` is set then. Tokens after the one
        that completed a stop string, or began a call too many, are dropped.
        """
        pieces: list[Piece] = []
        logprobs = delta.logprobs or ()
        for index, token in enumerate(delta.tokens):
            text = self._token(token, logprobs[index] if logprobs else None)
            if self._matcher is not None and self._matcher.matched is not None:
                self._end(text, "stop", self._matcher.matched, pieces)
                return pieces
            if text:
                self._show(text, pieces)
            if self._calls.too_many:
                self._end("", "stop", None, pieces)
                return pieces
            more = delta.finish is None or index + 1 < len(delta.tokens)
            if self._repetition is not None and self._repetition.feed(token) and more:
                self._finish("repetition", REPETITION, pieces)
                return pieces
        if delta.finish is not None:
            self._finish(delta.finish.reason, delta.finish.stop_reason, pieces)
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
        if self._matcher is not None:
            text = self._matcher.feed(text)
        if self._parser is not None:
            self._parse(self._parser, text)
        return text

    def _parse(self, parser: PartParser, text: str) -> None:
        """Both marks count as reasoning: the token before and the one after the border."""
        before = parser.in_reasoning
        if text:
            self._pending.parts += self._told(parser.feed(text))
        if before or parser.in_reasoning:
            self._pending.reasoning_tokens += 1

    def _told(self, parts: list[Part]) -> list[Part]:
        """Those that the client is to see."""
        parts = self._calls.told(parts)
        if not self._hides_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, Reasoning)]

    def _show(self, text: str, pieces: list[Piece]) -> None:
        if self._parser is None:
            self._pending.text = text
        elif not self._pending.parts:
            return
        self._take(pieces)

    def _finish(
        self, reason: FinishReason, stop_reason: int | str | None, pieces: list[Piece]
    ) -> None:
        rest = self._detokenizer.flush()
        matched = None
        if self._matcher is not None:
            rest = self._matcher.feed(rest, 0)
            matched = self._matcher.matched
            rest += self._matcher.flush()
        if self._parser is not None and rest:
            self._pending.parts += self._told(self._parser.feed(rest))
        if matched is not None:
            self._end(rest, "stop", matched, pieces)
        else:
            self._end(rest, reason, stop_reason, pieces)

    def _end(
        self,
        rest: str,
        reason: FinishReason,
        stop_reason: int | str | None,
        pieces: list[Piece],
    ) -> None:
        """The last piece; a rest of text that no token was told with joins the one before."""
        if self._parser is None:
            self._pending.text = rest
        else:
            self._pending.parts += self._told(self._parser.finish())
            if reason == "stop" and self._calls.complete:
                reason = "tool_calls"
        self.finish_reason, self.stop_reason = reason, stop_reason
        if pieces and not self._pending.tokens:
            pieces[-1].text += self._pending.text
            pieces[-1].parts += self._pending.parts
        else:
            self._take(pieces)

    def _take(self, pieces: list[Piece]) -> None:
        pieces.append(self._pending)
        self._pending = Piece("")


class Calls:
    """The calls of tools in one choice: whether there is a complete one, and when it is enough."""

    __slots__ = ("_arguments", "_one", "too_many")

    def __init__(self, one: bool) -> None:
        self._one = one
        self._arguments: list[list[str]] = []
        self.too_many = False
        """A second one has begun where one is wanted."""

    def told(self, parts: list[Part]) -> list[Part]:
        """Those of `parts` that do not belong to a call too many."""
        if self.too_many:
            return []
        for place, part in enumerate(parts):
            if isinstance(part, CallArguments):
                self._arguments[part.index].append(part.text)
            elif isinstance(part, CallBegin):
                if self._one and self._arguments:
                    self.too_many = True
                    return parts[:place]
                self._arguments.append([])
        return parts

    @property
    def complete(self) -> bool:
        """Some call's arguments are whole."""
        return any(_is_json("".join(texts)) for texts in self._arguments)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return False
    return True


def _length(part: Part) -> int:
    return len(part.name if isinstance(part, CallBegin) else part.text)


def join(pieces: Sequence[Piece]) -> Piece:
    """All of them as one."""
    return Piece(
        "".join([piece.text for piece in pieces]),
        [token for piece in pieces for token in piece.tokens],
        [logprob for piece in pieces for logprob in piece.logprobs],
        [offset for piece in pieces for offset in piece.offsets],
        merged([part for piece in pieces for part in piece.parts]),
        sum(piece.reasoning_tokens for piece in pieces),
    )
