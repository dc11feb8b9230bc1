"""Defines a planned request: what the engine gets, and how the answer is written.

Records only. `frontend/preprocess/input_processor.py` makes them,
`frontend/output/full_response.py` and `frontend/output/streaming_response.py` use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from pdserve.frontend.images.image_tokens import LoadedImage
from pdserve.frontend.model_registry import PreparedModel
from pdserve.frontend.output.api_adapter import ApiAdapter
from pdserve.frontend.output.embedding_format import EmbeddingFormat
from pdserve.frontend.output.score_format import ScoreFormat
from pdserve.ids import new_random
from pdserve.messages.request import GenerateRequest
from pdserve.protocols.completion_requests import Tool
from pdserve.protocols.completion_responses import Usage
from pdserve.text.output_parts import OutputParser
from pdserve.text.repetition import RepetitionDetector
from pdserve.text.stop_matcher import StopMatcher
from pdserve.token_ids import TokenIds

if TYPE_CHECKING:
    from pdserve.ids import Bytes
    from pdserve.text.tokenization.detokenizer import Detokenizer


def new_call_id() -> str:
    """A new id for a tool call, in OpenAI's form."""
    return f"call_{new_random().hex()}"


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request."""

    tokens: TokenIds
    echo: str = ""
    """Text that the answer begins with; empty unless `echo` was requested."""
    reasoning: bool = False
    """True if the prompt has opened the model's reasoning, so that the output begins inside it."""
    images: tuple[LoadedImage, ...] = ()
    """Images, one for each placeholder in `tokens`."""
    image_tokens: tuple[int, ...] = ()
    """Tokens that each image is expected to take; 0: unknown."""

    @property
    def size(self) -> int:
        """Tokens of the prompt, with those that its images are known to take."""
        if not self.image_tokens:
            return len(self.tokens)
        return len(self.tokens) + sum(each - 1 for each in self.image_tokens if each)


class RequestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one request that is fixed before its first token."""

    chat: bool
    model: PreparedModel
    model_name: str
    """The model's name as the client wrote it: a name, an alias or an adapter."""
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
    """True if the output continues the prompt's text, instead of being a text of its own."""
    logprobs: bool = False
    alternatives: int = 0
    """Number of alternatives per echoed prompt token, in its logprobs."""
    echo: bool = False
    scores_only: bool = False
    """True if the one token that the engine generates is not sent to the client."""
    token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    tools: tuple[Tool, ...] = ()
    """Tools that may be called; empty: the output is not parsed for calls."""
    one_call: bool = False
    """True if at most one tool call is allowed."""
    parser: Callable[[], OutputParser] | None = None
    """Makes a parser for each choice; None: the output is plain text."""
    keep: frozenset[int] = frozenset()
    """Special tokens that the parser must see."""
    call_id: Callable[[], str] = new_call_id
    """Makes an id for a tool call."""
    reasons: bool = False
    """True if the parser separates reasoning from content."""
    include_reasoning: bool = True
    repetition: Callable[[], RepetitionDetector] | None = None
    """Makes a repetition detector for each choice; None: repetition is allowed."""
    prompt_logprobs: int | None = None
    """Number of alternatives per prompt token, sent beside the output; None: no prompt logprobs are
    sent."""
    tokens_as_ids: bool = False
    """True if logprobs name tokens by their ids."""
    on_image_tokens: Callable[[tuple[int, ...]], None] = lambda tokens: None
    """Called with the tokens that each image of the prompt took."""
    stream_interval: int = 1
    """Tokens per chunk of a stream."""
    vectors: EmbeddingFormat | None = None
    """The format of the prompts' embeddings; None: the answer is text."""
    scores: ScoreFormat | None = None
    """How the embeddings become scores; None: they are sent themselves."""
    write_vectors: Callable[[RequestPlan, list[list[float]], Usage], bytes] | None = None
    """Writes the answer with the embeddings in another API's format."""
    ready: bytes | None = None
    """The answer, if it needs no tokens; nothing is dispatched then."""
    left_out: tuple[str, ...] = ()
    """Tool types that the request has and that are ignored instead of refused."""
    adapter: ApiAdapter | None = None
    """Writes the answer in the format of an API other than OpenAI's chat and completions; `n` is 1
    then."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum([prompt.size for prompt in self.prompts])

    @property
    def repeats(self) -> Bytes:
        """Bytes of the request that the answer repeats."""
        if self.scores is not None:
            return self.scores.repeats
        return 0 if self.adapter is None else self.adapter.repeats()

    @property
    def tells_chosen(self) -> bool:
        """True if the alternatives are those of `logprob_token_ids`, plus the sampled token."""
        return bool(self.requests[0].sampling.logprob_token_ids)

    @property
    def plain(self) -> bool:
        """True if a token adds only text: nothing in it is searched for, and nothing is sent beside
        it."""
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
        """A new detokenizer for one choice of `prompt`."""
        return self.model.tokenizer.detokenizer(
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            prompt=prompt.tokens if self.continues_text else (),
            keep=self.keep,
        )

    def matcher(self) -> StopMatcher | None:
        """A new stop matcher for one choice; None without stop strings."""
        if not self.stops:
            return None
        return StopMatcher(self.stops, include_stop=self.include_stop, min_tokens=self.min_tokens)
