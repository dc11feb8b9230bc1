"""Builds answers that are not streamed: collects tokens and writes one JSON object at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.frontend.output.chat_parts import chat_message
from pdserve.frontend.output.logprobs import (
    best_of,
    chat_logprobs,
    completion_logprobs,
    concatenate,
    prompt_logprobs,
    scored_prompt,
)
from pdserve.frontend.output.output_processor import (
    ChoiceOutputProcessor,
    OutputDelta,
    choice_output_processor,
    merge_deltas,
)
from pdserve.frontend.output.response_builder import ChoiceSink, ResponseBuilder
from pdserve.frontend.output.response_memory import delta_bytes
from pdserve.messages.request import Finish, TokenDelta
from pdserve.protocols.completion_responses import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
)
from pdserve.text.output_parts import ContentDelta

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.frontend.output.response_memory import ResponseMemory
    from pdserve.frontend.plan import Prompt, RequestPlan
    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.request import TokenLogprob
    from pdserve.observe.instruments import Histogram
    from pdserve.observe.metrics import ModelMetrics
    from pdserve.protocols.completion_responses import ScoredToken

_encode = msgspec.json.Encoder().encode

_LOGPROB_WORK = 10
"""Cost of writing one logprob, in characters of text to tokenize; a token's text costs one."""

_PARSING_WORK = 16
"""Cost of parsing one token's text, in the same unit."""


class BufferedChoice:
    """Collects one choice. Text is detokenized on the way only if that may end the choice."""

    __slots__ = (
        "_grow",
        "_pace",
        "_pieces",
        "_plan",
        "_prompt_logprobs",
        "_text",
        "_tokens",
        "completion_tokens",
        "done",
        "finish_reason",
        "first",
        "index",
        "last",
        "prompt",
        "reasoning_tokens",
        "stop_reason",
    )

    def __init__(
        self,
        plan: RequestPlan,
        index: int,
        prompt: Prompt,
        pace: Histogram,
        grow: Callable[[Bytes], None],
    ) -> None:
        """`grow` gets the bytes of each delta with logprobs."""
        self._plan = plan
        self._grow = grow
        self._pace = pace
        self.first: Seconds | None = None
        self.last: Seconds | None = None
        self._tokens: list[int] = []
        self._pieces: list[OutputDelta] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._text = None if plan.plain else choice_output_processor(plan, prompt)
        self.index = index
        self.prompt = prompt
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        """Known after `output` was called."""
        self.done = False
        self.finish_reason: FinishReason = "stop"
        self.stop_reason: int | str | None = None

    def on_delta(self, delta: TokenDelta, now: Seconds) -> None:
        if self.last is None:
            self.first = now
        elif delta.tokens:
            self._pace.observe((now - self.last) / len(delta.tokens), len(delta.tokens))
        self.last = now
        if delta.logprobs:
            self._grow(delta_bytes(delta))
        if delta.prompt_logprobs:
            self._prompt_logprobs += delta.prompt_logprobs
        if self._text is None:
            self._gather(delta)
        else:
            self._look(self._text, delta)

    def _gather(self, delta: TokenDelta) -> None:
        self._tokens += delta.tokens
        self.completion_tokens += len(delta.tokens)
        if delta.finish is not None:
            self.done = True
            self.finish_reason = delta.finish.reason
            self.stop_reason = delta.finish.stop_reason

    def _look(self, text: ChoiceOutputProcessor, delta: TokenDelta) -> None:
        self._pieces += text.feed(delta)
        self.completion_tokens = text.completion_tokens
        if text.finish_reason is not None:
            self.done = True
            self.finish_reason, self.stop_reason = text.finish_reason, text.stop_reason

    def output(self) -> OutputDelta:
        """The whole choice as one piece; may change `finish_reason`. To be called once."""
        if self._plan.scores_only:
            return OutputDelta("")
        if self._text is None and self._plan.parser is not None:
            self._read(choice_output_processor(self._plan, self.prompt))
        if self._text is not None:
            piece = merge_deltas(self._pieces)
            self.reasoning_tokens = piece.reasoning_tokens
            return piece
        detokenizer = self._plan.detokenizer(self.prompt)
        return OutputDelta(detokenizer.feed_many(self._tokens) + detokenizer.flush(), self._tokens)

    def _read(self, text: ChoiceOutputProcessor) -> None:
        """Parses the tokens that were collected without a parser."""
        finish = Finish(reason=self.finish_reason, stop_reason=self.stop_reason)  # type: ignore[arg-type]
        self._text = text
        self._look(text, TokenDelta(0, 0, self._tokens, finish))

    def echoed_logprobs(self) -> CompletionLogprobs | None:
        """Logprobs of the prompt, if it is echoed with logprobs."""
        if not (self._plan.echo and self._plan.logprobs):
            return None
        return prompt_logprobs(
            self._plan.model.tokenizer,
            self.prompt.tokens,
            self.prompt.echo,
            best_of(self._prompt_logprobs, self._plan.alternatives),
            self._plan.skip_special_tokens,
            self._plan.tokens_as_ids,
        )

    def scores(self) -> list[ScoredToken] | None:
        """The prompt's logprobs by token id, if they are sent beside the output."""
        most = self._plan.prompt_logprobs
        if most is None:
            return None
        return scored_prompt(self._plan.model.tokenizer, best_of(self._prompt_logprobs, most))


class FullResponseBuilder(ResponseBuilder):
    """Collects all choices; `body` is the answer once `finished` is set."""

    choices: list[BufferedChoice]  # type: ignore[assignment]  # `_choice` makes no other kind

    def __init__(
        self,
        plan: RequestPlan,
        metrics: ModelMetrics,
        arrival: Seconds,
        time: Callable[[], Seconds],
        gathered: ResponseMemory,
    ) -> None:
        """`gathered` limits its memory; the builder removes itself from it at the end."""
        self._gathered = gathered
        super().__init__(plan, metrics, arrival, time)

    def cancel(self) -> None:
        super().cancel()
        self._gathered.forget(self)

    def _choice(self, index: int, prompt: Prompt) -> ChoiceSink:
        pace = self.metrics.inter_token_latency
        return BufferedChoice(self.plan, index, prompt, pace, self._grow)

    def _grow(self, more: Bytes) -> None:
        self._gathered.grow(self, more)

    @property
    def work(self) -> int:
        """Cost of `body`, in characters of text to tokenize."""
        plan = self.plan
        tokens = self.completion_tokens
        if plan.parser is not None:
            tokens *= _PARSING_WORK
        sampling = plan.requests[0].sampling
        if plan.logprobs:
            tokens *= _LOGPROB_WORK * (1 + (sampling.logprobs or 0))
        if sampling.prompt_logprobs is not None:
            scores = plan.n * plan.prompt_tokens * (1 + sampling.prompt_logprobs)
            tokens += _LOGPROB_WORK * scores
        return tokens

    def body(self) -> bytes:
        """The answer as JSON. Thread-safe, because a finished answer no longer changes."""
        if self.plan.adapter is not None:
            return self.plan.adapter.whole(self._chat())
        return _encode(self._chat() if self.plan.chat else self._completion())

    def _chat(self) -> ChatCompletion:
        plan = self.plan
        choices = [self._chat_choice(choice) for choice in self.choices]
        answer = ChatCompletion(
            id=plan.answer_id,
            created=plan.created,
            model=plan.model_name,
            system_fingerprint=plan.model.fingerprint,
            choices=choices,
            usage=self.usage(last=True),
        )
        if plan.token_ids:
            answer.prompt_token_ids = plan.prompts[0].tokens.tolist()
        answer.prompt_logprobs = self.choices[0].scores()
        return answer

    def _chat_choice(self, choice: BufferedChoice) -> ChatChoice:
        plan, output = self.plan, choice.output()
        answer = ChatChoice(
            index=choice.index,
            message=self._message(choice.prompt.echo, output),
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if plan.logprobs:
            tokenizer = plan.model.tokenizer
            answer.logprobs = chat_logprobs(
                tokenizer, output.logprobs, plan.tokens_as_ids, own=plan.tells_chosen
            )
        if plan.token_ids:
            answer.token_ids = output.tokens
        return answer

    def _message(self, echo: str, output: OutputDelta) -> AssistantMessage:
        if self.plan.parser is None:
            return AssistantMessage(content=echo + output.text)
        parts = [ContentDelta(echo), *output.parts] if echo else output.parts
        return chat_message(parts, self.plan.call_id, reasons=self.plan.reasons)

    def _completion(self) -> Completion:
        plan = self.plan
        return Completion(
            id=plan.answer_id,
            created=plan.created,
            model=plan.model_name,
            system_fingerprint=plan.model.fingerprint,
            choices=[self._completion_choice(choice) for choice in self.choices],
            usage=self.usage(last=True),
        )

    def _completion_choice(self, choice: BufferedChoice) -> CompletionChoice:
        plan, output = self.plan, choice.output()
        answer = CompletionChoice(
            index=choice.index,
            text=choice.prompt.echo + output.text,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )
        if plan.logprobs:
            own = completion_logprobs(
                plan.model.tokenizer, output.logprobs, output.offsets, plan.tokens_as_ids
            )
            answer.logprobs = concatenate(choice.echoed_logprobs(), own)
        if plan.token_ids:
            answer.token_ids = output.tokens
            answer.prompt_token_ids = choice.prompt.tokens.tolist()
        answer.prompt_logprobs = choice.scores()
        return answer
