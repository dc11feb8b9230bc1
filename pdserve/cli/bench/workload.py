"""What is asked: prompts of a file, of a trace, or made up to a length. Pure, from a seed.

Made-up prompts are token ids for completions and embeddings, so that their length is exact; for
chat they are words, and only the server's usage says how many tokens these were.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.errors import ConfigError
from pdserve.sim.traces.lines import bad_line, read_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from pdserve.ids import Seconds
    from pdserve.sim.traces.base import Piece, TraceRequest

__all__ = [
    "Ask",
    "answers_of",
    "generated",
    "length",
    "of_file",
    "of_trace",
    "prompt_of",
    "warm_up",
]

_FIRST: Final = 16
"""Ids below are special in many vocabularies."""
_DIGITS: Final = 4
_OWN: Final = 1 << 30
"""Contents below may be shared by prompts."""
_WORDS: Final = (
    *("a", "all", "and", "are", "as", "at", "be", "but", "by", "can", "do", "for", "from", "go"),
    *("he", "in", "is", "it", "no", "not", "of", "on", "one", "or", "so", "that", "the", "they"),
    *("this", "to", "was", "we", "with", "you"),
)

Prompt = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to be."""

    number: int
    prompt: Prompt
    """Text, token ids, or a conversation."""
    max_tokens: int | None
    """None: the server's default."""
    at: Seconds | None = None
    """Since the begin, where the workload says it."""


def length(flag: str, text: str) -> Callable[[Random], int]:
    """`N`, `uniform:A:B`, `normal:MEAN:DEVIATION`, `lognormal:MEDIAN:SIGMA` or `exponential:MEAN`.

    Draws are rounded and at least 1. Errors: `ConfigError`.
    """
    kind, *rest = text.split(":") if ":" in text else ("fixed", text)
    try:
        values = [float(one) for one in rest]
        draw = _drawer(kind, values)
    except (ValueError, IndexError):
        raise ConfigError(
            f"{flag}: {text!r} is no length: give N, uniform:A:B, normal:MEAN:DEVIATION, "
            "lognormal:MEDIAN:SIGMA or exponential:MEAN"
        ) from None
    return lambda random: max(1, round(draw(random)))


def _drawer(kind: str, values: list[float]) -> Callable[[Random], float]:
    counts = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2, "exponential": 1}
    if counts.get(kind) != len(values) or not all(0 <= value < 1e9 for value in values):
        raise ValueError(kind)
    if values[0] < 1 or (kind == "uniform" and values[1] < values[0]):
        raise ValueError(kind)
    first, second = values[0], values[-1]
    if kind == "fixed":
        return lambda random: first
    if kind == "uniform":
        return lambda random: random.randint(int(first), int(second))
    if kind == "normal":
        return lambda random: random.gauss(first, second)
    if kind == "lognormal":
        return lambda random: first * random.lognormvariate(0.0, second)
    return lambda random: random.expovariate(1 / first)


def generated(
    inputs: Callable[[Random], int],
    outputs: Callable[[Random], int],
    *,
    shared_prefix: int,
    words: bool,
    vocabulary: int,
    seed: int,
) -> Iterator[Ask]:
    """Without end. Args: all prompts begin with the same `shared_prefix` tokens, beside `inputs`;
    `words` instead of ids."""
    random = Random(f"lengths {seed}")
    base = _OWN + random.randrange(
        _OWN
    )  # another seed's prompts are not in the cache of this one's
    for number in itertools.count():
        own = (base + number, inputs(random))
        pieces = ((seed, shared_prefix), own) if shared_prefix else (own,)
        yield Ask(number, prompt_of(pieces, words=words, vocabulary=vocabulary), outputs(random))


def of_trace(trace: Iterable[TraceRequest], *, words: bool, vocabulary: int) -> Iterator[Ask]:
    """The trace's moments and lengths, with the prefixes that its prompts share."""
    for request in trace:
        prompt = prompt_of(request.pieces, words=words, vocabulary=vocabulary)
        yield Ask(request.number, prompt, request.output_tokens, request.at)


def answers_of(asks: Iterable[Ask], outputs: Callable[[Random], int], seed: int) -> Iterator[Ask]:
    """The same requests with answers of other lengths."""
    random = Random(f"answers {seed}")
    for ask in asks:
        yield replace(ask, max_tokens=outputs(random))


def warm_up(count: int, *, words: bool, vocabulary: int) -> Iterator[Ask]:
    """Short prompts that share nothing with those that count."""
    for number in range(count):
        piece = (2 * _OWN + number, 32)
        yield Ask(-1 - number, prompt_of((piece,), words=words, vocabulary=vocabulary), 8)


def prompt_of(pieces: Iterable[Piece], *, words: bool, vocabulary: int) -> str | list[int]:
    """Equal contents give equal tokens: prompts that begin with equal pieces share a prefix."""
    ids: list[int] = []
    span = max(2, min(vocabulary, 1 << 20) - _FIRST)
    for content, count in pieces:
        digits = [_FIRST + content // span**place % span for place in range(_DIGITS)]
        ids += (digits * (count // _DIGITS + 1))[:count]
    return " ".join(_WORDS[one % len(_WORDS)] for one in ids) if words else ids


# ---------------------------------------------------------------- files


class _Line(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


_decode = msgspec.json.Decoder(_Line).decode


def of_file(path: Path, outputs: Callable[[Random], int], seed: int) -> list[Ask]:
    """Lines of text, or of JSON with `prompt` or `messages` and perhaps `max_tokens`; `outputs`
    is for those without. Errors: `ConfigError`, with the line.
    """
    asks: list[Ask] = []
    random = Random(f"answers {seed}")
    for number, text in read_lines(path):
        line = _line(path, number, text)
        prompt = line.messages if line.messages is not None else line.prompt
        if not prompt:
            raise bad_line(path, number, "has neither `prompt` nor `messages`")
        asks.append(Ask(len(asks), prompt, line.max_tokens or outputs(random)))
    if not asks:
        raise ConfigError(f"{path} holds no prompts")
    return asks


def _line(path: Path, number: int, text: bytes) -> _Line:
    try:
        return _decode(text) if text.startswith(b"{") else _Line(prompt=text.decode())
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise bad_line(path, number, str(error)) from None
