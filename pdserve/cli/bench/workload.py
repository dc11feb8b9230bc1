"""Makes the prompts of a benchmark: from a file, a trace, or synthetic of a given length. Pure.

Synthetic prompts come from a seed. For completions and embeddings they are token ids, so the length
is exact; for chat they are words, and only the server's usage tells the number of tokens.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.errors import ConfigError
from pdserve.sim.workloads.lines import bad_line, read_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from pdserve.ids import Seconds
    from pdserve.sim.workloads.trace_request import PromptPiece, TraceRequest

__all__ = [
    "SampleRequest",
    "build_prompt",
    "length_sampler",
    "random_requests",
    "requests_from_file",
    "requests_from_trace",
    "warm_up_requests",
    "with_output_lengths",
]

_FIRST: Final = 16
"""Smaller ids are special in many vocabularies."""
_DIGITS: Final = 4
_OWN: Final = 1 << 30
"""Smaller content numbers may be shared by prompts."""
_TEXT: Final = (
    "the of and to in is you that it he was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do "
    "how their if will up other about out many then them these so some her would make like him "
    "into time has look two more write go see number no way could people my than first water "
    "been call who oil its now find long down day did get come made may part over new sound "
    "take only little work know place year live me back give most very after thing our just "
    "name good sentence man think say great where help through much before line right too mean "
    "old any same tell boy follow came want show also around form three small set put end does "
    "another well large must big even such because turn here why ask went men read need land "
    "different home us move try kind hand picture again change off play spell air away animal "
    "house point page letter mother answer found study still learn should world high every near "
    "add food between own below country plant last school father keep tree never start city "
    "earth eye light thought head under story saw left few while along might close something "
    "seem next hard open example begin life always those both paper together got group often "
    "run important until children side feet car mile night walk white"
)
_WORDS: Final = tuple(_TEXT.split())
"""Common words: one token each in most vocabularies."""

SamplePrompt = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One request to send."""

    number: int
    prompt: SamplePrompt
    """Text, token ids, or a conversation."""
    max_tokens: int | None
    """None: the server's default."""
    at: Seconds | None = None
    """Seconds since the start, if the workload has times."""


def length_sampler(flag: str, text: str) -> Callable[[Random], int]:
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


def random_requests(
    inputs: Callable[[Random], int],
    outputs: Callable[[Random], int],
    *,
    shared_prefix: int,
    words: bool,
    vocabulary: int,
    seed: int,
) -> Iterator[SampleRequest]:
    """Yields requests without end; requests with different seeds share no prompts.

    Args: every prompt begins with the same `shared_prefix` tokens, in addition to `inputs`;
    `words`: prompts are words instead of ids.
    """
    random = Random(f"lengths {seed}")
    for number in itertools.count():
        own = (_OWN + number, inputs(random))
        pieces = ((0, shared_prefix), own) if shared_prefix else (own,)
        prompt = build_prompt(pieces, words=words, vocabulary=vocabulary, seed=seed)
        yield SampleRequest(number, prompt, outputs(random))


def requests_from_trace(
    trace: Iterable[TraceRequest], *, words: bool, vocabulary: int, seed: int
) -> Iterator[SampleRequest]:
    """Requests with the trace's timestamps and lengths, and the prefixes that its prompts share."""
    for request in trace:
        prompt = build_prompt(request.pieces, words=words, vocabulary=vocabulary, seed=seed)
        yield SampleRequest(request.number, prompt, request.output_tokens, request.at)


def with_output_lengths(
    asks: Iterable[SampleRequest], outputs: Callable[[Random], int], seed: int
) -> Iterator[SampleRequest]:
    """Returns the requests with other output lengths."""
    random = Random(f"answers {seed}")
    for ask in asks:
        yield replace(ask, max_tokens=outputs(random))


def warm_up_requests(
    count: int, *, words: bool, vocabulary: int, seed: int
) -> Iterator[SampleRequest]:
    """Short prompts that share nothing with the measured ones."""
    for number in range(count):
        piece = (2 * _OWN + number, 32)
        prompt = build_prompt((piece,), words=words, vocabulary=vocabulary, seed=seed)
        yield SampleRequest(-1 - number, prompt, 8)


def build_prompt(
    pieces: Iterable[PromptPiece], *, words: bool, vocabulary: int, seed: int = 0
) -> str | list[int]:
    """A prompt of the pieces' lengths. Equal contents give equal tokens for one seed.

    A piece begins with its content number as digits, so that two contents differ within the first
    block. Then come tokens from a generator seeded with (seed, content), so that no part of a
    prompt repeats in it or in another one.
    """
    known: Sequence[Any] = _WORDS if words else range(_FIRST, max(_FIRST + 2, vocabulary))
    prompt: list[Any] = []
    for content, count in pieces:
        prompt += _drawn(known, content, count, seed)
    return " ".join(prompt) if words else prompt


def _drawn(known: Sequence[Any], content: int, count: int, seed: int) -> list[Any]:
    """`count` tokens of `known` for a content; a smaller count gives a prefix of a larger one."""
    span = len(known)
    number = content + (seed << 64)
    digits = [known[number // span**place % span] for place in range(_DIGITS)]
    more = Random(number).choices(known, k=max(0, count - _DIGITS))
    return [*digits[:count], *more]


# ---------------------------------------------------------------- files


class _Line(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


_decode = msgspec.json.Decoder(_Line).decode


def requests_from_file(
    path: Path, outputs: Callable[[Random], int], seed: int
) -> list[SampleRequest]:
    """Reads lines of text, or of JSON with `prompt` or `messages` and optionally `max_tokens`;
    `outputs` is for lines without it. Errors: `ConfigError` with the line."""
    asks: list[SampleRequest] = []
    random = Random(f"answers {seed}")
    for number, text in read_lines(path, "the file of prompts"):
        line = _line(path, number, text)
        prompt = line.messages if line.messages is not None else line.prompt
        if not prompt:
            raise bad_line(path, number, "has neither `prompt` nor `messages`")
        asks.append(SampleRequest(len(asks), prompt, line.max_tokens or outputs(random)))
    if not asks:
        raise ConfigError(f"{path} holds no prompts")
    return asks


def _line(path: Path, number: int, text: bytes) -> _Line:
    try:
        return _decode(text) if text.startswith(b"{") else _Line(prompt=text.decode())
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise bad_line(path, number, str(error)) from None
