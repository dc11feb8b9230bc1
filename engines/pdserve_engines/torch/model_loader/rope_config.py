"""Reads the rotary embedding's settings from `config.json`, in either of its spellings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.config_keys import (
    Json,
    above_zero,
    flag,
    number,
    positive,
    section,
)

if TYPE_CHECKING:
    from pdserve_engines.torch.model_loader.architectures import ModelFamily


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. The fields after `theta` matter only to the kinds that name them."""

    kind: Literal["default", "linear", "llama3", "yarn", "dynamic", "longrope"]
    theta: float
    factor: float = 1.0
    """For all kinds but `default`: how much longer the context is than the original one."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    """For all kinds but `default` and `linear`: the original training context, in tokens."""
    yarn: YarnConfig | None = None
    # The fields below are at their defaults in most families; see `model_info.compat_hash`.
    dims: int = 0
    """Leading dimensions of a head that are turned, an even number; 0: all."""
    interleaved: bool = False
    """Whether dimensions 2i and 2i + 1 are a pair; else i and i + dims / 2 are."""
    longrope: LongRopeConfig | None = None

    context: int = 0
    """For `dynamic`: the longest sequence, in tokens; `for_context` sets it."""
    query_beta: float = 0.0
    """For `yarn`: queries are multiplied by 1 + query_beta * log(1 + position //
    original_max_positions), as Llama 4's are."""

    def for_context(self, tokens: int) -> RopeConfig:
        """The embedding for sequences of up to `tokens` tokens. The angles of `dynamic` and
        `longrope` depend on the length, and sequences that share keys need the same angles."""
        if self.kind == "dynamic":
            return replace(self, context=max(tokens, self.original_max_positions))
        fits = tokens <= self.original_max_positions
        if self.longrope is None:
            return replace(self, query_beta=0.0) if fits else self
        factors = self.longrope.short if fits else self.longrope.long
        return replace(self, longrope=replace(self.longrope, short=factors, long=factors))

    def head_order(self, head_dim: int) -> list[int] | None:
        """The dimensions of a head in an order in which i and i + head_dim / 2 are pairs, the
        turned ones first; None if they are in that order."""
        dims = self.dims or head_dim
        if dims == head_dim and not self.interleaved:
            return None
        turned, rest = list(range(dims)), list(range(dims, head_dim))
        halves = turned[: dims // 2], turned[dims // 2 :]
        first, second = (turned[::2], turned[1::2]) if self.interleaved else halves
        middle = len(rest) // 2
        return first + rest[:middle] + second + rest[middle:]


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """Further settings of `yarn`."""

    beta_fast: float
    """Dimension pairs that turn more often than this in the original context are kept."""
    beta_slow: float
    """Dimension pairs that turn less often than this are stretched by the whole factor."""
    attention_factor: float
    """Factor of the cosines and sines."""
    truncate: bool
    """Whether the two limits are rounded, outwards, to whole pairs."""


@dataclass(frozen=True, slots=True)
class LongRopeConfig:
    """Further settings of `longrope`: what each pair's wavelength is multiplied by."""

    short: tuple[float, ...]
    """Factors if all sequences fit the original context."""
    long: tuple[float, ...]
    """Factors if they may be longer."""
    attention_factor: float
    """Factor of the cosines and sines."""


_PARTIAL: Final = ("phi3", "glm", "glm4")
"""Families that may turn a part of each head only."""
_INTERLEAVED: Final = ("glm", "glm4", "cohere", "cohere2", "ernie4_5")
"""Families whose pairs are neighbours."""
_BY_LAYER: Final = ("gemma3", "olmo3")
"""Families whose layers with a window have a rotary embedding of their own."""


def parse_rope(raw: Json, family: ModelFamily, head_dim: int) -> RopeConfig:
    """Parse either spelling: `rope_parameters` (newer), or `rope_theta` beside `rope_scaling`."""
    rope: Json = section(raw, "rope_scaling") | section(raw, "rope_parameters")
    if family in _BY_LAYER and _is_nested(rope):
        rope = section(rope, "full_attention")
    if _is_nested(rope):
        raise UnsupportedCheckpoint("config.json: rope_parameters by layer are not supported")
    dims = _dims(raw, rope, family, head_dim)
    parsed = _parse(raw, rope, above_zero(raw, "rope_theta", 10000.0), dims or head_dim)
    beta = number(rope, "llama_4_scaling_beta", 0.0)
    if beta and (family != "mistral" or parsed.kind != "yarn"):
        raise UnsupportedCheckpoint(
            "config.json: rope with llama_4_scaling_beta is supported only in yarn of Mistral"
        )
    interleaved = family in _INTERLEAVED
    return replace(parsed, dims=dims, interleaved=interleaved, query_beta=beta)


def parse_local_rope(raw: Json, theta: float) -> RopeConfig:
    """The rotary embedding of the layers with a window; in the older spelling it is `theta`'s and
    never scaled."""
    rope = section(raw, "rope_parameters")
    local = section(rope, "sliding_attention") if _is_nested(rope) else {}
    return _parse(raw, local, theta, 0)


def _dims(raw: Json, rope: Json, family: ModelFamily, head_dim: int) -> int:
    factor = number(rope, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0))
    if factor == 1.0:
        return 0
    if family not in _PARTIAL:
        raise UnsupportedCheckpoint(
            "config.json: partial_rotary_factor is not supported in this architecture"
        )
    dims = int(head_dim * factor)
    if dims % 2 or not 0 < dims <= head_dim:
        raise UnsupportedCheckpoint(
            f"config.json: partial_rotary_factor {factor} of a head of {head_dim} dimensions is "
            "no even number of them"
        )
    return dims % head_dim


def _is_nested(rope: Json) -> bool:
    return any(isinstance(value, dict) for value in rope.values())


def _parse(raw: Json, rope: Json, theta: float, dims: int) -> RopeConfig:
    """`dims`: dimensions of a head that are turned."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = above_zero(rope, "rope_theta", theta)
    if "mrope_section" in rope:
        raise UnsupportedCheckpoint("config.json: rope with mrope_section is not supported")
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=above_zero(rope, "factor"))
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor=above_zero(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_max_positions=positive(rope, "original_max_position_embeddings"),
        )
    if kind == "dynamic":
        original = positive(raw, "max_position_embeddings")
        factor = above_zero(rope, "factor")
        return RopeConfig("dynamic", theta, factor, original_max_positions=original)
    # Phi-3's first configurations call it by other names.
    if kind in ("longrope", "su") or (kind == "yarn" and "long_factor" in rope):
        return _longrope(raw, rope, theta, dims)
    if kind == "yarn":
        return _yarn(raw, rope, theta)
    raise UnsupportedCheckpoint(
        f"config.json: rope type {kind!r} is not supported, only default, linear, llama3, yarn, "
        "dynamic and longrope"
    )


def _yarn(raw: Json, rope: Json, theta: float) -> RopeConfig:
    original, factor = _stretch(raw, rope)
    attention_factor = _mscale(factor, 1.0)
    scale, all_dim = number(rope, "mscale", 0.0), number(rope, "mscale_all_dim", 0.0)
    if scale and all_dim:
        attention_factor = _mscale(factor, scale) / _mscale(factor, all_dim)
    yarn = YarnConfig(
        # Zero counts as not set.
        beta_fast=number(rope, "beta_fast", 32.0) or 32.0,
        beta_slow=number(rope, "beta_slow", 1.0) or 1.0,
        attention_factor=number(rope, "attention_factor", attention_factor),
        truncate=rope.get("truncate") is None or flag(rope, "truncate"),
    )
    return RopeConfig("yarn", theta, factor, original_max_positions=original, yarn=yarn)


def _longrope(raw: Json, rope: Json, theta: float, dims: int) -> RopeConfig:
    original, factor = _stretch(raw, rope)
    sharpened = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    longrope = LongRopeConfig(
        short=_numbers(rope, "short_factor", dims // 2),
        long=_numbers(rope, "long_factor", dims // 2),
        attention_factor=number(rope, "attention_factor", sharpened),
    )
    return RopeConfig("longrope", theta, factor, original_max_positions=original, longrope=longrope)


def _stretch(raw: Json, rope: Json) -> tuple[int, float]:
    """The original context, without one the configuration's, and the factor."""
    positions = positive(raw, "max_position_embeddings")
    original = positive(rope, "original_max_position_embeddings", positions)
    original = positive(raw, "original_max_position_embeddings", original)
    return original, above_zero(rope, "factor", positions / original)


def _numbers(rope: Json, key: str, count: int) -> tuple[float, ...]:
    values = rope.get(key)
    if not isinstance(values, list) or len(values) != count:
        raise UnsupportedCheckpoint(f"config.json: {key} must be a list of {count} numbers")
    return tuple(number({key: value}, key) for value in values)


def _mscale(factor: float, scale: float) -> float:
    """Factor of the attention scores in a stretched context."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def max_positions(raw: Json, rope: RopeConfig) -> int:
    """The context length; with yarn and dynamic at least the stretched one, since the other key has
    the original."""
    said = positive(raw, "max_position_embeddings")
    if rope.kind not in ("yarn", "dynamic"):
        return said
    return max(said, int(rope.original_max_positions * rope.factor))
