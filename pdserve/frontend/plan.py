"""Defines a planned request: what the engine gets, and how the answer is written.

Records only. `frontend/preprocess/input_processor.py` makes them,
`frontend/output/full_response.py` and `frontend/output/streaming_response.py` use them.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.output.api_adapter import ApiAdapter
from pdserve.frontend.output.embedding_format import EmbeddingFormat
from pdserve.messages.request import GenerateRequest
from pdserve.protocols.completion_requests import Tool
from pdserve.text.output_parts import OutputParser
from pdserve.text.repetition import RepetitionDetector
from pdserve.text.stop_matcher import StopMatcher

if TYPE_CHECKING:
    from pdserve.text.tokenization.detokenizer import Detokenizer


def new_call_id() -> str:
    """An id as OpenAI writes them."""
    return f"call_{secrets.token_hex(12)}"


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request."""

    tokens: list[int]
    echo: str = ""
    """What the answer's text begins with; empty unless `echo` was asked for."""
    reasoning: bool = False
    """It has opened the model's reasoning: the output begins inside."""


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one request that is fixed before its first token."""

    chat: bool
    model: PreparedModel
    model_name: str
    """As the client wrote it: a name or an alias."""
    answer_id: str
    created: int
    prompts: list[Prompt]
    requests: list[GenerateRequest]
    """One per prompt, in order."""
    n: int
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    continues_text: bool = False
    """The output goes on where the prompt's text ended, rather than being a text of its own."""
    logprobs: bool = False
    alternatives: int = 0
    """Of an echoed prompt's tokens, told with their logprobs."""
    echo: bool = False
    scores_only: bool = False
    """The one token that the engine makes is not told."""
    token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tools: tuple[Tool, ...] = ()
    """Those that may be called; empty: calls are not looked for."""
    one_call: bool = False
    """At most one is."""
    parser: Callable[[], OutputParser] | None = None
    """A fresh one for each choice; None: the output is text as it stands."""
    keep: frozenset[int] = frozenset()
    """Special tokens that the parser has to see."""
    call_id: Callable[[], str] = new_call_id
    """An id for a call of a tool."""
    reasons: bool = False
    """The parser tells reasoning apart."""
    include_reasoning: bool = True
    repetition: Callable[[], RepetitionDetector] | None = None
    """A fresh detector for each choice; None: an output may repeat itself."""
    prompt_logprobs: int | None = None
    """Told beside the output, with so many alternatives each; None: they are not."""
    tokens_as_ids: bool = False
    """Logprobs name tokens by their ids."""
    stream_interval: int = 1
    """Tokens per chunk of a stream."""
    vectors: EmbeddingFormat | None = None
    """The prompts become vectors that look so; None: they are answered with text."""
    left_out: tuple[str, ...] = ()
    """What the request asks for and does not get, without being refused: types of tools."""
    dialect: ApiAdapter | None = None
    """Words the answer for another API than OpenAI's chat and completions; `n` is 1 then."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def tells_chosen(self) -> bool:
        """Whether alternatives are those of `logprob_token_ids`, which the sampled token joins."""
        return bool(self.requests[0].sampling.logprob_token_ids)

    @property
    def plain(self) -> bool:
        """Whether text is all that a token adds: nothing to look for, nothing to tell beside it."""
        return not (
            self.stops
            or self.logprobs
            or self.token_ids
            or self.echo
            or self.continuous_usage
            or self.one_call
            or self.repetition is not None
            or (self.stream and self.stream_interval > 1)
        )

    def detokenizer(self, prompt: Prompt) -> Detokenizer:
        """A fresh detokeniser for one choice of `prompt`."""
        return self.model.tokenizer.detokenizer(
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            prompt=prompt.tokens if self.continues_text else (),
            keep=self.keep,
        )

    def matcher(self) -> StopMatcher | None:
        """A fresh stop matcher for one choice; None without stop strings."""
        if not self.stops:
            return None
        return StopMatcher(self.stops, include_stop=self.include_stop, min_tokens=self.min_tokens)
