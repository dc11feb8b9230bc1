"""Constrains vLLM's tokens by pdserve's own grammar states, in place of vLLM's back ends.

So a grammar, a reasoning budget and both together mean the same with every engine, and a grammar
that the frontend has compiled is compiled here by the same library. The request's parameters travel
inside of vLLM as the text of a grammar (`grammar_text`). vLLM compiles in threads of its own and
waits for the result before it schedules the request.

A sequence that cannot be continued must not end vLLM's step: its fault is noted, all tokens are
allowed, and the core ends the request after the step.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import msgspec
from llguidance import LLMatcher, LLParserLimits

from pdserve.engine_core.structured_output import GrammarError, GrammarState, make_tokenizer
from pdserve.messages.grammar_limits import PARSER_LIMITS
from pdserve.messages.request import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llguidance import LLTokenizer

    from pdserve.ids import TokenId

__all__ = ["ConstrainedChoice", "Constraints", "grammar_text", "make_backend"]


class _Text(msgspec.Struct, array_like=True):
    """What `grammar_text` carries."""

    key: str
    sampling: SamplingParams
    given: list[int]


def grammar_text(key: str, sampling: SamplingParams, given: Sequence[TokenId]) -> str:
    """The text that stands for a constrained choice inside of vLLM; `key` is its request id."""
    return msgspec.json.encode(_Text(key, sampling, list(given))).decode()


class ConstrainedChoice:
    """One choice's constraint, in the form of vLLM's `StructuredOutputGrammar`."""

    def __init__(self, owner: Constraints, text: _Text, state: GrammarState) -> None:
        self._owner = owner
        self._text = text
        self._state = state
        self._made = len(text.given)
        state.take_all(text.given)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Follow the choice. Always True: a fault is noted for the core instead."""
        try:
            self._state.take_all(tokens)
        except GrammarError as fault:
            self._owner.faults[self._text.key] = fault
        self._made += len(tokens)
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Accept no guessed token: the core offers no constraints beside speculative decoding."""
        return []

    def rollback(self, num_tokens: int) -> None:
        """Nothing is ever taken ahead of the output."""

    def fill_bitmask(self, bitmask: Any, batch_index: int) -> None:
        """Write the mask of the next token, one bit a token, into a row of int32."""
        mask = self._mask()
        row = bitmask[batch_index].numpy().view("uint8")
        if mask is None:
            row[:] = 0xFF
            return
        row[:] = 0
        row[: len(mask)] = memoryview(mask)

    def _mask(self) -> bytes | None:
        try:
            mask = self._state.allowed()
        except GrammarError as fault:
            self._owner.faults[self._text.key] = fault
            return None
        sampling = self._text.sampling
        if self._made >= sampling.min_tokens or self._state.forced:
            return mask
        if mask is None:
            mask = self._owner.everything
        return _without(mask, (*sampling.eos_token_ids, *sampling.stop_token_ids))

    def is_terminated(self) -> bool:
        """Never: after the end only an end token is allowed."""
        return False

    def reset(self) -> None:
        """Unused: a preempted sequence keeps its tokens, and therefore its state."""


def _without(mask: bytes, tokens: Sequence[TokenId]) -> bytes:
    changed = bytearray(mask)
    for token in tokens:
        if token >> 3 < len(changed):
            changed[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return bytes(changed)


class Constraints:
    """Compiles the constraints of one engine. `compile` runs in any thread."""

    def __init__(
        self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[TokenId]
    ) -> None:
        self.faults: dict[str, GrammarError] = {}
        """Request id -> why it cannot be continued; the core takes entries out."""
        self.everything = ((1 << vocab_size) - 1).to_bytes(-(-vocab_size // 8), "little")
        """A mask of all tokens."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._ends = [token for token in eos_token_ids if token < vocab_size]
        self._limits = LLParserLimits(**PARSER_LIMITS, verbose_errors=False)  # type: ignore[arg-type]
        self._tokenizer: LLTokenizer | None = None
        self._reading = threading.Lock()

    def compile(self, text: str) -> ConstrainedChoice:
        """Compile what `grammar_text` made. Raises `GrammarError`; vLLM ends the request then."""
        wanted = msgspec.json.decode(text, type=_Text)
        matcher = self._matcher(wanted.sampling.grammar) if wanted.sampling.grammar else None
        state = GrammarState(wanted.sampling, matcher, self._vocab_size)
        return ConstrainedChoice(self, wanted, state)

    def _matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(f"its grammar cannot be compiled: {matcher.get_error()}")
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        with self._reading:
            if self._tokenizer is None:
                text = self._tokenizer_json.decode()
                self._tokenizer = make_tokenizer(text, self._vocab_size, self._ends)
            return self._tokenizer


def make_backend(constraints: Constraints, vocab_size: int) -> Any:
    """A `StructuredOutputBackend` of vLLM over `constraints`. Imports vLLM."""
    import torch
    from vllm.v1.structured_output.backend_types import StructuredOutputBackend

    class Backend(StructuredOutputBackend):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def compile_grammar(
            self, request_type: Any, grammar_spec: str, stop_token_ids: Any = None
        ) -> ConstrainedChoice:
            try:
                return constraints.compile(grammar_spec)
            except GrammarError as fault:
                key = msgspec.json.decode(grammar_spec)[0]
                constraints.faults[key] = fault
                raise

        def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
            return torch.full((max_num_seqs, -(-vocab_size // 32)), -1, dtype=torch.int32)

        def destroy(self) -> None:
            pass

    return Backend()
