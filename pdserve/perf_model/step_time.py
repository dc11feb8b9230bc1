"""Models the time of an engine step, for engines that simulate the forward pass.

`Roofline` is the default form. A step of Q tokens takes

    base + sequences * s + max(W, Q * a) + pairs * b + kv * k

where W is the time to read the weights once, a one token's share of the matrix products, b one
(query, key) pair of prompt attention, and k one token of KV that decoding reads. A chunk of a
prompt that computes `count` tokens after `start` others has count * (start + count / 2) pairs, so
each request pays for its own length; the batch shares only the weights. `MockerPolynomials` are
those of Dynamo's mocker.

The presets are derived from data sheets and stated shares of their peaks, not measured by us;
`calibrate` makes a file of the same form from measured steps. Nothing here knows of sequences.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Protocol

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pdserve.ids import Bytes, Seconds

__all__ = [
    "PRESETS",
    "KvShape",
    "MockerPolynomials",
    "Roofline",
    "StepTimeModel",
    "WorkerPreset",
    "preset_of",
    "read_timing",
    "write_timing",
]


class StepTimeModel(Protocol):
    """Predicts the time of one step, in seconds."""

    def step(
        self, prefill: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, capacity: int
    ) -> Seconds:
        """Seconds of a step. `prefill`: chunks of prompts as (tokens before, tokens computed).
        `decodes`: sequences that add one token each; together they read `kv_tokens` of KV, out of
        `capacity` tokens of the pool."""
        ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """The default model; the module's docstring has the formula. All fields are in seconds."""

    base: Seconds
    """Per step: launches, sampling, latency of collectives."""
    sequence: Seconds
    """Per sequence in the step."""
    weights: Seconds
    """To read the weights once."""
    token: Seconds
    pair: Seconds
    kv: Seconds

    def step(
        self, prefill: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, capacity: int
    ) -> Seconds:
        tokens = decodes
        pairs = 0.0
        for start, count in prefill:
            tokens += count
            pairs += count * (start + count / 2)
        return (
            self.base
            + (decodes + len(prefill)) * self.sequence
            + max(self.weights, tokens * self.token)
            + pairs * self.pair
            + kv_tokens * self.kv
        )


@dataclass(frozen=True, slots=True)
class MockerPolynomials:
    """The defaults of Dynamo's mocker (lib/mocker, perf_model.rs), fitted by its authors: prompts
    by the square of the batch's *sum* of new tokens, which over-charges batches of several prompts;
    decoding by the share of the pool in use, whatever the batch."""

    def step(
        self, prefill: Sequence[tuple[int, int]], decodes: int, kv_tokens: int, capacity: int
    ) -> Seconds:
        milliseconds = 0.0
        if prefill:
            tokens = sum(count for _, count in prefill)
            milliseconds = 4.209989e-07 * tokens * tokens + 1.518344e-02 * tokens + 16.50142
        if decodes:
            used = min(kv_tokens / capacity, 1.0)
            milliseconds += max(1.0, -25.74 * used * used + 54.01 * used + 5.74)
        return milliseconds / 1000


# ---------------------------------------------------------------- presets


@dataclass(frozen=True, slots=True)
class KvShape:
    """The dimensions of a model's KV."""

    layers: int
    kv_heads: int
    head_dim: int
    itemsize: Bytes

    @property
    def token_bytes(self) -> Bytes:
        """Bytes of KV per token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.itemsize


@dataclass(frozen=True, slots=True)
class WorkerPreset:
    """A kind of worker: model, GPU and step times."""

    about: str
    timing: StepTimeModel
    shape: KvShape
    kv_tokens: int
    """Tokens that fit into the pool."""
    weight_bytes: Bytes


_H100: Final = 989e12, 3.35e12
_H200: Final = 989e12, 4.3e12
"""Dense bf16 FLOP/s of the data sheets; bytes/s: the data sheet's for the H100; for the H200 the
copy rate that can be measured on one (the sheet says 4.8)."""
_LINEAR, _ATTENTION, _MEMORY = 0.6, 0.5, 0.8
"""Shares of the peaks that good kernels reach: matrix products, prompt attention, reading."""
_SEQUENCE: Final[Seconds] = 10e-6
_NVLINK: Final = 300e9
"""Bytes/s of an all-reduce, as libraries reach it."""


def _llama(
    shape: KvShape,
    width: int,
    body: float,
    weight_bytes: float,
    machine: tuple[float, float],
    *,
    gpus: int = 1,
    faster: float = 1.0,
) -> Roofline:
    """The roofline of a model with `body` parameters besides embeddings and attention of `width`.
    `faster` is the factor by which its matrix products are faster than bf16."""
    flops, bandwidth = machine[0] * gpus, machine[1] * gpus * _MEMORY
    reduces = 2 * shape.layers if gpus > 1 else 0
    traffic = 2 * (gpus - 1) / gpus * width * 2  # bytes per token and all-reduce, in a ring
    return Roofline(
        base=0.5e-3 + reduces * 13e-6,
        sequence=_SEQUENCE,
        weights=weight_bytes / bandwidth,
        token=2 * body / (flops * faster * _LINEAR) + reduces * traffic / _NVLINK,
        pair=4 * shape.layers * width / (flops * _ATTENTION),
        kv=shape.token_bytes / bandwidth,
    )


_8B: Final = KvShape(layers=32, kv_heads=8, head_dim=128, itemsize=2)
_70B: Final = KvShape(layers=80, kv_heads=8, head_dim=128, itemsize=2)

PRESETS: Final[dict[str, WorkerPreset]] = {
    "h100-8b": WorkerPreset(
        "Llama 3.1 8B in bf16 on one H100 (80 GB)",
        _llama(_8B, 4096, 6.98e9, 15.0e9, _H100),
        _8B,
        400_000,
        int(16.06e9),
    ),
    "h200-8b": WorkerPreset(
        "Llama 3.1 8B in bf16 on one H200 (141 GB)",
        _llama(_8B, 4096, 6.98e9, 15.0e9, _H200),
        _8B,
        800_000,
        int(16.06e9),
    ),
    "h100-70b-tp4": WorkerPreset(
        "Llama 3.3 70B in bf16 over four H100",
        _llama(_70B, 8192, 68.5e9, 139e9, _H100, gpus=4),
        _70B,
        410_000,
        int(141e9),
    ),
    "h200-70b": WorkerPreset(
        "Llama 3.3 70B with FP8 weights and bf16 KV over two H200",
        _llama(_70B, 8192, 68.5e9, 70e9, _H200, gpus=2, faster=1.67),
        _70B,
        530_000,
        int(71e9),
    ),
    "dynamo-mocker": WorkerPreset(
        "the polynomials and the pool (16,384 blocks of 64) of Dynamo's mocker",
        MockerPolynomials(),
        _8B,
        16_384 * 64,
        int(16.06e9),
    ),
}
"""70B in FP8 outruns bf16 by less than the data sheet's two, hence 1.67."""


def preset_of(name: str) -> WorkerPreset:
    """The preset of this name. Errors: `ConfigError`, which lists the names."""
    if name not in PRESETS:
        known = ", ".join(f"{name} ({preset.about})" for name, preset in PRESETS.items())
        raise ConfigError(f"the sim engine has no preset {name!r}; known: {known}")
    return PRESETS[name]


# ---------------------------------------------------------------- files


def read_timing(path: Path) -> Roofline:
    """Read a model that `write_timing` wrote. Errors: `ConfigError`."""
    try:
        content = json.loads(path.read_bytes())
        fields = content["roofline"]
        model = Roofline(**{name: float(value) for name, value in fields.items()})
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is not a timing file of the sim engine: {error!r}") from error
    if not all(0 <= value < math.inf for value in asdict(model).values()):
        raise ConfigError(f"{path}: times must be finite and not negative")
    return model


def write_timing(path: Path, model: Roofline, about: dict[str, object]) -> None:
    """Write a model to a file. `about` tells readers of the file what was measured."""
    content = {"about": about, "roofline": asdict(model)}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
