"""Chooses the sim engine's next tokens, by pure functions, so that tests can predict its output.

Outputs consist of the vocabulary's `words`. Without block content they walk through the words from
a start that a few prompt tokens choose; with content each token follows from the bytes of all
blocks. Greedy requests depend on prompt and LoRA adapter alone, others also on seed, prompt index
and choice.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING

from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.engine_core.structured_output import pick_allowed_token
from pdserve.messages.request import TokenLogprob
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from pdserve.engine_core.structured_output import StructuredOutputManager
    from pdserve.ids import TokenId
    from pdserve.messages.request import GenerateRequest, SamplingParams
    from pdserve_engines.sim.settings import SimVocabulary

__all__ = [
    "EMBEDDING_SIZE",
    "ENTRY_BYTES",
    "chosen",
    "constrained_word",
    "entry_of",
    "lora_key",
    "made_up_logprob",
    "reference_tokens",
    "start_of",
    "stop_ids",
    "vector_of",
    "walk",
    "word_at",
]

ENTRY_BYTES = 16
"""Bytes that each token writes to its block."""

EMBEDDING_SIZE = 32
"""Dimension of an embedding."""

_ENDS = 8
"""Number of tokens at either end of a prompt that choose where its output starts."""


def stop_ids(sampling: SamplingParams) -> frozenset[TokenId]:
    """Token ids that end a choice."""
    ends = () if sampling.ignore_eos else sampling.eos_token_ids
    return frozenset(sampling.stop_token_ids) | frozenset(ends)


def _masked(sampling: SamplingParams, position: int) -> frozenset[TokenId]:
    """Token ids that are not allowed at this position of the output."""
    if position >= sampling.min_tokens:
        return frozenset()
    return frozenset(sampling.stop_token_ids) | frozenset(sampling.eos_token_ids)


def _key(request: GenerateRequest, choice: int) -> bytes:
    sampling = request.sampling
    if sampling.temperature <= 0:
        return b""
    return struct.pack("<QII", sampling.seed & (2**64 - 1), request.prompt_index, choice)


def vector_of(content: bytes, pooling: str) -> bytes:
    """An embedding that depends on every byte of `content`: numbers between -1 and 1, as in
    `Finish.embedding`."""
    digest = blake2b(content, key=pooling.encode(), digest_size=2 * EMBEDDING_SIZE).digest()
    numbers = struct.unpack(f"<{EMBEDDING_SIZE}h", digest)
    return struct.pack(f"<{EMBEDDING_SIZE}f", *(number / 32768 for number in numbers))


# ---------------------------------------------------------------- without content


def start_of(request: GenerateRequest, choice: int) -> int:
    """Index of the word at which the output starts; cheap for any length of prompt."""
    prompt = request.prompt
    ends = (len(prompt), *prompt[:_ENDS], *prompt[-_ENDS:])
    state = blake2b(struct.pack(f"<{len(ends)}I", *ends), digest_size=8)
    state.update(_key(request, choice))
    state.update(request.lora.encode())
    return int.from_bytes(state.digest(), "little")


def walk(words: Seq[TokenId], start: int, position: int, count: int) -> list[TokenId]:
    """`count` output tokens from `position` on, if none is masked."""
    size = len(words)
    first = (start + position) % size
    whole = list(words[first : first + count])
    while len(whole) < count:
        whole += words[: count - len(whole)]
    return whole


def word_at(words: Seq[TokenId], start: int, position: int, sampling: SamplingParams) -> TokenId:
    """The output token at `position`; masked ones are skipped."""
    return chosen(words, start + position, sampling, position)


def chosen(words: Seq[TokenId], number: int, sampling: SamplingParams, position: int) -> TokenId:
    """The word with this number, or the next one that is allowed at `position`."""
    size = len(words)
    if position < sampling.min_tokens:
        masked = _masked(sampling, position)
        for offset in range(size):
            word = words[(number + offset) % size]
            if word not in masked:
                return word
    return words[number % size]


# ---------------------------------------------------------------- with a grammar


def constrained_word(
    words: Seq[TokenId], word: TokenId, mask: bytes, sampling: SamplingParams, position: int
) -> TokenId:
    """The token instead of `word` where `mask` allows only some; it depends on `word`."""
    state = blake2b(struct.pack("<II", word, position), digest_size=8)
    number = int.from_bytes(state.digest(), "little")
    without = _masked(sampling, position)
    return pick_allowed_token(
        mask, words, number, stop_ids(sampling) or sampling.eos_token_ids, without
    )


# ---------------------------------------------------------------- with content


def lora_key(lora: str) -> bytes:
    """The key of all entries that an adapter computes; empty for the model itself."""
    return blake2b(lora.encode(), digest_size=ENTRY_BYTES).digest() if lora else b""


def entry_of(token: TokenId, position: int, before: bytes, lora: bytes = b"") -> bytes:
    """The bytes that `token` writes to its block; they depend on all tokens before it.

    `lora` is the adapter's `lora_key`. It is in every entry, so the output shows it if any token
    was computed with another adapter.
    """
    content = struct.pack("<II", token, position) + before
    return blake2b(content, key=lora, digest_size=ENTRY_BYTES).digest()


def digested(digest: bytes, request: GenerateRequest, choice: int) -> int:
    """Number of the next word, from the digest of all entries so far."""
    state = blake2b(digest, digest_size=8)
    state.update(_key(request, choice))
    state.update(request.lora.encode())
    return int.from_bytes(state.digest(), "little")


# ---------------------------------------------------------------- the reference


def reference_tokens(
    request: GenerateRequest,
    vocabulary: SimVocabulary,
    choice: int = 0,
    *,
    content: bool,
    structured_output: StructuredOutputManager | None = None,
) -> list[TokenId]:
    """The output of one choice, computed alone and without blocks; includes given output.

    `structured_output`: needed for a request with a grammar or a reasoning budget, and used by no
    other caller.
    """
    sampling, words = request.sampling, vocabulary.words
    output = list(request.output[choice]) if request.output else []
    stops = stop_ids(sampling)
    room = min(sampling.max_tokens, vocabulary.max_len - len(request.prompt))
    start = start_of(request, choice)
    lora = lora_key(request.lora)
    state = blake2b()
    entry = b""
    computed = 0
    while len(output) < room and not _ended(output, stops, sampling):
        position = len(output)
        if content:
            tokens = [*request.prompt, *output]
            for index in range(computed, len(tokens)):
                entry = entry_of(tokens[index], index, entry, lora)
                state.update(entry)
            computed = len(tokens)
            number = digested(state.digest(), request, choice)
            word = chosen(words, number, sampling, position)
        else:
            word = word_at(words, start, position, sampling)
        mask = (
            None
            if structured_output is None
            else structured_output.allowed(_alone(request, choice, output))
        )
        output.append(
            word if mask is None else constrained_word(words, word, mask, sampling, position)
        )
    return output


def _alone(request: GenerateRequest, choice: int, output: list[TokenId]) -> Sequence:
    prompt = request.prompt
    return Sequence(-1, choice, request, prompt + token_ids(output), len(prompt), arrival=0.0)


def _ended(output: list[TokenId], stops: frozenset[TokenId], sampling: SamplingParams) -> bool:
    return bool(output) and output[-1] in stops and len(output) > sampling.min_tokens


def made_up_logprob(words: Seq[TokenId], token: TokenId, top: int) -> TokenLogprob:
    """A made-up logprob with `top` alternatives, the token itself first."""
    others = [word for word in words[:top] if word != token]
    ranked = [token, *others][:top]
    return TokenLogprob(token, -0.25, 1, [(word, -0.25 - i) for i, word in enumerate(ranked)])
