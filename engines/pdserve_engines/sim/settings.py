"""Resolves the sim engine's options and reads what it needs of a model.

Only `config.json` and `tokenizer.json` of a model's directory are read; with the option `vocab` no
directory is needed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.engine_core.kit import check_options
from pdserve.errors import ConfigError
from pdserve.transfer.copy_plan import PlanError, heads_on
from pdserve_engines.instant.settings import InstantOptions as VocabularyOptions
from pdserve_engines.instant.settings import read_vocabulary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pdserve.ids import Seconds, TokenId
    from pdserve.messages.engine import EngineSpec

__all__ = ["SimOptions", "SimVocabulary", "check_ranks", "parse_options", "read_model"]

_SPECIAL = 4
"""Number of lowest ids of an invented vocabulary that outputs never contain."""

_WORDS = 256
"""Most different tokens that outputs consist of."""

_MOST_HEADS = 1 << 14
"""As in a KV layout that travels (`messages.transfer.RankKvLayout`)."""

_MAX_LEN = 1 << 17
"""Default context length in tokens: timing models have no limit of their own."""


@dataclass(frozen=True, slots=True)
class SimOptions:
    """The sim engine's options, from `--engine-option name=value`."""

    preset: str = "h100-8b"
    """Worker to simulate, with times and memory: a name of `perf_model.step_time.PRESETS`."""
    timing: str = ""
    """A timing file written by `calibrate`, instead of the preset's times; empty: none."""
    noise: float = 0.0
    """Sigma of the lognormal factor (mean 1) by which each step's time is multiplied; 0: none."""
    seed: int = 0
    """Seed of the noise, besides the engine's own: gives workers different noise."""
    slowdown: float = 1.0
    """Factor by which each step's time is multiplied; 2 is half the speed, 0 takes no time."""
    content: bool = False
    """`on`: blocks have bytes on which tokens depend, so that a wrong block changes the output."""
    kv_heads: int = 0
    """Number of KV heads of blocks with content, which `--tp` divides among the pools of ranks; 0:
    blocks have no heads. Workers with other numbers exchange no KV."""
    blocks: int = 0
    """Number of KV blocks if `--kv-memory` is not given; 0: as many as fit the preset's memory."""
    vocab: int = 0
    """Size of an invented vocabulary, for which no files are read; 0: the model's own."""
    max_len: int = 0
    """Context length in tokens; 0: that of the model's configuration."""
    load_time: Seconds = 0.0
    """Seconds that loading takes, in real time."""
    steps_at_once: int = 1
    """Most decode steps of an unchanged batch that are computed as one. More than 1 is meant for
    simulated time: tokens then come in bursts."""
    host_bandwidth: float = 50e9
    """Bytes per second between the device and host memory, in each direction."""
    disk_read_bandwidth: float = 6e9
    """Bytes per second that the simulated disk reads."""
    disk_write_bandwidth: float = 3e9
    """Bytes per second that the simulated disk writes."""
    trouble: str = ""
    """Path of a file that injects faults, for tests: whenever it exists, it is removed and the step
    fails (`fail`) or hangs first (`hang SECONDS`)."""


def parse_options(options: Mapping[str, str]) -> SimOptions:
    """Parse the engine's options. Raises `ConfigError` for an unknown name or an invalid value."""
    known = {field.name: field for field in fields(SimOptions)}
    check_options("sim", options, known)
    values: dict[str, object] = {}
    for name, text in options.items():
        default = known[name].default
        values[name] = _READERS[type(default)](name, text)
    return SimOptions(**values)  # type: ignore[arg-type]


def check_ranks(spec: EngineSpec, options: SimOptions) -> None:
    """Raise `ConfigError` unless the ranks of `--tp` can divide the simulated KV. Nothing else is
    divided: steps take the preset's time, whatever the number of ranks."""
    ranks, heads = spec.tensor_parallel, options.kv_heads
    if heads > _MOST_HEADS:
        raise ConfigError(f"kv_heads={heads}: must be at most {_MOST_HEADS}")
    if heads and not options.content:
        raise ConfigError(f"kv_heads={heads}: only blocks with content have heads; give content=on")
    if ranks == 1:
        return
    if not heads:
        raise ConfigError(
            f"--tp {ranks}: engine sim divides only KV heads; give --engine-option content=on and "
            f"--engine-option kv_heads=N, with N a multiple of {ranks}"
        )
    if spec.tiers is not None and spec.tiers.is_used:
        raise ConfigError(
            f"--tp {ranks}: KV tiers work with one rank only; leave out --host-kv and --disk-kv"
        )
    try:
        heads_on(heads, ranks, 0)
    except PlanError as error:
        raise ConfigError(f"--tp {ranks} with kv_heads={heads}: {error}") from error


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
        raise ConfigError(f"{name}={text}: must be on or off")
    return text == "on"


_READERS: dict[type, Callable[[str, str], object]] = {
    str: lambda name, text: text,
    float: _read_number,
    int: _read_count,
    bool: _read_switch,
}


@dataclass(frozen=True, slots=True)
class SimVocabulary:
    """The tokens of prompts and outputs, and how long sequences may become."""

    words: tuple[TokenId, ...]
    """Tokens of outputs, in a fixed order that is not the vocabulary's."""
    size: int
    max_len: int
    model_type: str
    eos_token_ids: tuple[TokenId, ...]


def read_model(spec: EngineSpec, options: SimOptions) -> SimVocabulary:
    """Read the vocabulary from the model's directory, or invent one. Raises `ConfigError`, which
    names the unusable file or option."""
    if options.vocab:
        if options.vocab <= _SPECIAL:
            raise ConfigError(f"vocab={options.vocab}: must be at least {_SPECIAL + 1}")
        step = max(1, (options.vocab - _SPECIAL) // _WORDS)
        words = range(_SPECIAL, options.vocab, step)[:_WORDS]
        limit = spec.max_model_len or options.max_len or _MAX_LEN
        return SimVocabulary(_mixed(words), options.vocab, limit, "sim", ())
    if options.max_len:
        found = read_vocabulary(_unlimited(spec), VocabularyOptions())
        if spec.max_model_len > options.max_len:
            raise ConfigError(
                f"--max-model-len of {spec.max_model_len} is over --engine-option "
                f"max_len={options.max_len}: raise the one or lower the other"
            )
        limit = spec.max_model_len or options.max_len
    else:
        longer = f"; the sim engine has none: --engine-option max_len={spec.max_model_len}"
        found = read_vocabulary(spec, VocabularyOptions(), longer=longer)
        limit = found.max_model_len
    return SimVocabulary(
        _mixed(found.tokens), found.vocab_size, limit, found.model_type, found.eos_token_ids
    )


def _unlimited(spec: EngineSpec) -> EngineSpec:
    """The spec without a context length, so that the checkpoint's limit does not apply."""
    return replace(spec, max_model_len=0)


def _mixed(words: range | tuple[TokenId, ...]) -> tuple[TokenId, ...]:
    mixed = list(words)
    random.Random("words").shuffle(mixed)
    return tuple(mixed)
