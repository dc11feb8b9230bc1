"""What the sim engine is to be: its options, and the little it reads of a model.

Of a model's directory only `config.json` and `tokenizer.json` are read, if they are wanted at all:
with `vocab` there need be no directory. It knows nothing of steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.errors import ConfigError
from pdserve_engines.instant.settings import Options as VocabularyOptions
from pdserve_engines.instant.settings import read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.ids import Seconds, TokenId
    from pdserve.messages.engine import EngineSpec

__all__ = ["Options", "Vocabulary", "parse_options", "read_model"]

_SPECIAL = 4
"""Of an invented vocabulary, the ids that outputs never contain."""

_WORDS = 256
"""How many different tokens outputs consist of at most."""

_MAX_LEN = 1 << 17
"""Tokens of a sequence when nothing says otherwise: time models have no limit of their own."""


@dataclass(frozen=True, slots=True)
class Options:
    """`--engine-option name=value`."""

    preset: str = "h100-8b"
    """Whose times and whose memory: a name of `timing.PRESETS`."""
    timing: str = ""
    """A file of `calibrate`, instead of the preset's times."""
    noise: float = 0.0
    """Each step's time is multiplied by a lognormal draw of this sigma and mean 1."""
    seed: int = 0
    """Of the noise, beside the engine's own: workers with different ones differ."""
    slowdown: float = 1.0
    """Each step's time is multiplied by it; 2 is a worker of half the speed, 0 takes no time."""
    content: bool = False
    """`on`: blocks have bytes, and tokens follow from them, so that a wrong block shows."""
    blocks: int = 0
    """KV blocks when `--kv-memory` is not given; 0: as many as the preset has room for."""
    vocab: int = 0
    """Invent a vocabulary of this size, read no files; 0: the model's own."""
    max_len: int = 0
    """Tokens of a sequence, whatever the model's configuration says; 0: what it says."""
    load_time: Seconds = 0.0
    """How long loading takes; really waited for."""
    steps_at_once: int = 1
    """Decode steps of an unchanged batch that may be advanced as one. More than 1 is for virtual
    time: whoever reads the tokens sees them in bursts."""
    trouble: str = ""
    """A file that breaks steps, for tests: whenever it is there, it is removed and the step fails
    (`fail`) or stands still first (`hang SECONDS`)."""


def parse_options(options: Mapping[str, str]) -> Options:
    """Raises `ConfigError` for unknown names and for values that are none."""
    known = {field.name: field for field in fields(Options)}
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise ConfigError(
            f"the sim engine has no option {', '.join(unknown)}; it has {', '.join(known)}"
        )
    values: dict[str, object] = {}
    for name, text in options.items():
        default = known[name].default
        values[name] = _READERS[type(default)](name, text)
    return Options(**values)  # type: ignore[arg-type]


def _read_number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: not a number") from error
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name}={text}: must be finite and not negative")
    return value


def _read_count(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name}={text}: not a whole number")
    return int(text)


def _read_switch(name: str, text: str) -> bool:
    if text not in ("on", "off"):
        raise ConfigError(f"{name}={text}: on or off")
    return text == "on"


_READERS: dict[type, Callable[[str, str], object]] = {
    str: lambda name, text: text,
    float: _read_number,
    int: _read_count,
    bool: _read_switch,
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What prompts and outputs are made of, and how long they may become."""

    words: tuple[TokenId, ...]
    """What outputs consist of, in a fixed order that is not the vocabulary's."""
    size: int
    max_len: int
    model_type: str
    eos_token_ids: tuple[TokenId, ...]


def read_model(spec: EngineSpec, options: Options) -> Vocabulary:
    """Of the model's directory, or invented. Raises `ConfigError` naming what does not serve."""
    if options.vocab:
        if options.vocab <= _SPECIAL:
            raise ConfigError(f"vocab={options.vocab}: at least {_SPECIAL + 1}")
        step = max(1, (options.vocab - _SPECIAL) // _WORDS)
        words = range(_SPECIAL, options.vocab, step)[:_WORDS]
        limit = spec.max_model_len or options.max_len or _MAX_LEN
        return Vocabulary(_mixed(words), options.vocab, limit, "sim", ())
    if options.max_len:
        found = read_vocabulary(_unlimited(spec), VocabularyOptions())
        limit = min(spec.max_model_len or options.max_len, options.max_len)
    else:
        found = read_vocabulary(spec, VocabularyOptions())
        limit = found.max_model_len
    return Vocabulary(
        _mixed(found.tokens), found.vocab_size, limit, found.model_type, found.eos_token_ids
    )


def _unlimited(spec: EngineSpec) -> EngineSpec:
    """The checkpoint's limit is not asked about."""
    return replace(spec, max_model_len=0)


def _mixed(words: range | tuple[TokenId, ...]) -> tuple[TokenId, ...]:
    mixed = list(words)
    random.Random("words").shuffle(mixed)
    return tuple(mixed)
