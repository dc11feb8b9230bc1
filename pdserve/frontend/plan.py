"""A request as decided: what goes to the engine, and how its answer is to look.

Records only; `prompts.py` makes them, `unary.py` and `stream.py` answer by them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.frontend.models import ServedModel
from pdserve.messages.request import GenerateRequest
from pdserve.text.stop import StopMatcher

if TYPE_CHECKING:
    from pdserve.text.incremental import Detokenizer


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request."""

    tokens: list[int]
    echo: str = ""
    """What the answer's text begins with; empty unless `echo` was asked for."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one request that is fixed before its first token."""

    chat: bool
    model: ServedModel
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
    echo: bool = False
    scores_only: bool = False
    """The one token that the engine makes is not told."""
    token_ids: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.tokens) for prompt in self.prompts)

    @property
    def plain(self) -> bool:
        """Whether text is all that a token adds: nothing to look for, nothing to tell beside it."""
        return not (
            self.stops or self.logprobs or self.token_ids or self.echo or self.continuous_usage
        )

    def detokenizer(self, prompt: Prompt) -> Detokenizer:
        """A fresh detokeniser for one choice of `prompt`."""
        return self.model.tokenizer.detokenizer(
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            prompt=prompt.tokens if self.continues_text else (),
        )

    def matcher(self) -> StopMatcher | None:
        """A fresh stop matcher for one choice; None without stop strings."""
        if not self.stops:
            return None
        return StopMatcher(self.stops, include_stop=self.include_stop, min_tokens=self.min_tokens)
