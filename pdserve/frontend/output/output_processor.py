"""Turns one choice's tokens into text: what can be shown after each token, and how it ended.

Text passes through the detokenizer, the stop matcher and, if the model's markup is parsed, a parser
of `text.output_parts`, in this order. A piece carries the logprobs and ids of all tokens since the
piece before, so every token is reported exactly once and in order, including the last one. Does not
know whether pieces become stream chunks or one answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from pdserve.text.output_parts import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_parts,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.frontend.plan import Prompt, RequestPlan
    from pdserve.messages.request import TokenDelta, TokenLogprob
    from pdserve.protocols.completion_responses import FinishReason
    from pdserve.text.output_parts import OutputParser, OutputPart
    from pdserve.text.repetition import RepetitionDetector
    from pdserve.text.stop_matcher import StopMatcher
    from pdserve.text.tokenization.detokenizer import Detokenizer

REPETITION = "repetition_detected"
"""The `stop_reason` of an output that repeated itself; vLLM's word."""


@dataclass(slots=True)
class OutputDelta:
    """Text that became final, with its tokens."""

    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    """Per token, the characters of the choice's text before it."""
    parts: list[OutputPart] = field(default_factory=list)
    """What a parser made of the text; `text` is empty then."""
    reasoning_tokens: int = 0
    """Number of `tokens` that are reasoning, including its start and end marks."""

    @property
    def shown(self) -> list[OutputPart]:
        """The parts, also if no parser has read the text."""
        return [ContentDelta(self.text)] if self.text else self.parts

    @property
    def size(self) -> int:
        """Number of characters of text."""
        return len(self.text) + sum(map(_length, self.parts))


class ChoiceOutputProcessor:
    """Text state of one choice. Owned by the request's answer; used on the event loop's thread."""

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
        parser: OutputParser | None = None,
        *,
        one_call: bool = False,
        hides_reasoning: bool = False,
        repetition: RepetitionDetector | None = None,
    ) -> None:
        """Args: `start` is the length of the text before the output (an echoed prompt); `one_call`:
        a second tool call is dropped and ends the choice; `repetition` detects repetition, which
        ends it too."""
        self._hides_reasoning = hides_reasoning
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._parser = parser
        self._calls = ToolCallTracker(one_call)
        self._repetition = repetition
        self._chars = start
        self._pending = OutputDelta("")
        self.completion_tokens = 0
        self.finish_reason: FinishReason | None = None
        """Set with the last piece."""
        self.stop_reason: int | str | None = None

    @property
    def settled(self) -> bool:
        """True if all further output is plain content, so that `pass_on` is enough."""
        return (
            self._parser is not None
            and self._parser.settled
            and self._matcher is None
            and not self._pending.tokens
        )

    def pass_on(self, tokens: Sequence[int]) -> bytes:
        """The text of tokens, once `settled`, escaped for a JSON string."""
        self.completion_tokens += len(tokens)
        return self._detokenizer.feed_json(tokens)

    def feed(self, delta: TokenDelta) -> list[OutputDelta]:
        """The pieces that a delta makes final: one per token that shows something.

        The last piece of the choice may be empty; `finish_reason` is set then. Tokens after the one
        that completed a stop string, or began a surplus tool call, are dropped.
        """
        pieces: list[OutputDelta] = []
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

    def _parse(self, parser: OutputParser, text: str) -> None:
        """Parses the text of one token. The tokens that contain the start and the end mark both
        count as reasoning."""
        before = parser.in_reasoning
        if text:
            self._pending.parts += self._told(parser.feed(text))
        if before or parser.in_reasoning:
            self._pending.reasoning_tokens += 1

    def _told(self, parts: list[OutputPart]) -> list[OutputPart]:
        """The parts that the client gets."""
        parts = self._calls.told(parts)
        if not self._hides_reasoning:
            return parts
        return [part for part in parts if not isinstance(part, ReasoningDelta)]

    def _show(self, text: str, pieces: list[OutputDelta]) -> None:
        if self._parser is None:
            self._pending.text = text
        elif not self._pending.parts:
            return
        self._take(pieces)

    def _finish(
        self, reason: FinishReason, stop_reason: int | str | None, pieces: list[OutputDelta]
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
        pieces: list[OutputDelta],
    ) -> None:
        """Adds the last piece; text left without a token is added to the piece before."""
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

    def _take(self, pieces: list[OutputDelta]) -> None:
        pieces.append(self._pending)
        self._pending = OutputDelta("")


def choice_output_processor(plan: RequestPlan, prompt: Prompt) -> ChoiceOutputProcessor:
    """New text state for one choice of `prompt`."""
    return ChoiceOutputProcessor(
        plan.detokenizer(prompt),
        plan.matcher(),
        len(prompt.echo),
        None if plan.parser is None else plan.parser(),
        one_call=plan.one_call,
        hides_reasoning=not plan.include_reasoning,
        repetition=None if plan.repetition is None else plan.repetition(),
    )


class ToolCallTracker:
    """The tool calls of one choice: whether one is complete, and whether there are too many."""

    __slots__ = ("_arguments", "_one", "too_many")

    def __init__(self, one: bool) -> None:
        self._one = one
        self._arguments: list[list[str]] = []
        self.too_many = False
        """True once a second call has begun although one is allowed."""

    def told(self, parts: list[OutputPart]) -> list[OutputPart]:
        """The parts that do not belong to a surplus call."""
        if self.too_many:
            return []
        for place, part in enumerate(parts):
            if isinstance(part, ToolCallArguments):
                self._arguments[part.index].append(part.text)
            elif isinstance(part, ToolCallStart):
                if self._one and self._arguments:
                    self.too_many = True
                    return parts[:place]
                self._arguments.append([])
        return parts

    @property
    def complete(self) -> bool:
        """True if the arguments of some call are complete JSON."""
        return any(_is_json("".join(texts)) for texts in self._arguments)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.MsgspecError:
        return False
    return True


def _length(part: OutputPart) -> int:
    return len(part.name if isinstance(part, ToolCallStart) else part.text)


def merge_deltas(pieces: Sequence[OutputDelta]) -> OutputDelta:
    """Merges all pieces into one."""
    return OutputDelta(
        "".join([piece.text for piece in pieces]),
        [token for piece in pieces for token in piece.tokens],
        [logprob for piece in pieces for logprob in piece.logprobs],
        [offset for piece in pieces for offset in piece.offsets],
        merge_parts([part for piece in pieces for part in piece.parts]),
        sum(piece.reasoning_tokens for piece in pieces),
    )
