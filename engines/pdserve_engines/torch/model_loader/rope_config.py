"""Reads the rotary embedding's settings from `config.json`, in either of its spellings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from pdserve.errors import UnsupportedCheckpoint
from pdserve_engines.torch.model_loader.config_keys import Json, flag, number, positive


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. The fields after `theta` matter only to the kinds that name them."""

    kind: Literal["default", "linear", "llama3", "yarn"]
    theta: float
    factor: float = 1.0
    """For all kinds but `default`: how much longer the context is than the original one."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_positions: int = 0
    """For `llama3` and `yarn`: the original training context, in tokens."""
    yarn: YarnConfig | None = None


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


def parse_rope(raw: Json, family: str) -> RopeConfig:
    """Parse either spelling: `rope_parameters` (newer), or `rope_theta` beside `rope_scaling`."""
    rope: Json = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    if family == "gemma3" and _is_nested(rope):
        rope = rope.get("full_attention") or {}
    if _is_nested(rope):
        raise UnsupportedCheckpoint("config.json: rope_parameters by layer are not supported")
    return _parse(raw, rope, number(raw, "rope_theta", 10000.0))


def parse_local_rope(raw: Json) -> RopeConfig:
    """The rotary embedding of the layers with a window; never scaled in the older spelling."""
    rope = raw.get("rope_parameters") or {}
    local = (rope.get("sliding_attention") or {}) if _is_nested(rope) else {}
    return _parse(raw, local, number(raw, "rope_local_base_freq"))


def _is_nested(rope: Json) -> bool:
    return any(isinstance(value, dict) for value in rope.values())


def _parse(raw: Json, rope: Json, theta: float) -> RopeConfig:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = number(rope, "rope_theta", theta)
    for key in ("mrope_section", "llama_4_scaling_beta"):
        if key in rope:
            raise UnsupportedCheckpoint(f"config.json: rope with {key} is not supported")
    if number(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedCheckpoint("config.json: rope with partial_rotary_factor is not supported")
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, factor=number(rope, "factor"))
    if kind == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            factor=number(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_max_positions=positive(rope, "original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(raw, rope, theta)
    raise UnsupportedCheckpoint(
        f"config.json: rope type {kind!r} is not supported, only default, linear, llama3 and yarn"
    )


def _yarn(raw: Json, rope: Json, theta: float) -> RopeConfig:
    """Parse yarn's settings. Without an original context the configuration's is taken."""
    positions = positive(raw, "max_position_embeddings")
    original = positive(rope, "original_max_position_embeddings", positions)
    original = positive(raw, "original_max_position_embeddings", original)
    factor = number(rope, "factor", positions / original)
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


def _mscale(factor: float, scale: float) -> float:
    """Factor of the attention scores in a stretched context."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def max_positions(raw: Json, rope: RopeConfig) -> int:
    """The context length; with yarn at least the stretched one, since the other key often still has
    the original."""
    said = positive(raw, "max_position_embeddings")
    if rope.kind != "yarn":
        return said
    return max(said, int(rope.original_max_positions * rope.factor))
