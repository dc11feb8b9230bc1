"""The launches that an engine makes: every kernel, for the heads, sizes and data types of models.

The launchers run with tensors of models' real sizes; the caller records the launches (`compiled`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from pdserve_engines.torch.cuda import add_norm, decode_attention, gated_activation, rotate_store
from pdserve_engines.torch.cuda.decode_plan import list_items
from pdserve_engines.torch.cuda.invariant import experts, linear, tile_attention
from pdserve_engines.torch.cuda.support import MAX_GROUP
from tests.engines.torch.cuda.pools import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES: Final = (
    *(add_norm, gated_activation, rotate_store, decode_attention),
    *(linear, experts, tile_attention),
)
FP8: Final = torch.float8_e4m3fn
CAPABILITIES: Final = (80, 90)
MODELS: Final = {
    "llama-1b": (Shape(32, 8, 64), 2048),
    "phi-2b": (Shape(32, 32, 80), 2560),
    "llama-8b": (Shape(32, 8, 128), 4096),
    "qwen-32b": (Shape(40, 8, 128), 5120),
    "gemma-27b": (Shape(32, 16, 128), 5376),
    "llama-405b": (Shape(128, 8, 128), 16384),
    "stablelm-12b": (Shape(32, 8, 160), 5120),
    "gemma-2b": (Shape(8, 1, 256), 2048),
}
"""Heads, and the size of the hidden state, of common models."""
WIDE: Final = {
    f"{MAX_GROUP}-heads-of-{dim}": (Shape(MAX_GROUP, 1, dim), 2048) for dim in (64, 128, 256)
}
"""The largest groups of query heads; with `MODELS`, every size of a tile for heads of 64 to 256."""
INNER: Final = {f"inner-size-{size}": (Shape(32, 8, 128), size) for size in (4096, 4112, 4097)}
"""Inner sizes of products: one that fills tiles, one that does not, and an odd one."""


@dataclass(frozen=True)
class Sizes:
    """What a launcher makes tensors of."""

    shape: Shape
    hidden: int
    dtype: torch.dtype
    kv: torch.dtype

    @property
    def scales(self) -> tuple[float, float]:
        return (0.5, 0.25) if self.kv == FP8 else (1.0, 1.0)

    def pool(self) -> torch.Tensor:
        """One of 32 layers."""
        shape = self.shape
        whole = (1, 32, 2, shape.kv_heads, 32, shape.head_dim)
        return torch.empty(whole, dtype=self.kv)[:, 1]

    def heads(self) -> torch.Tensor:
        width = (self.shape.heads + 2 * self.shape.kv_heads) * self.shape.head_dim
        return torch.empty(2, width, dtype=self.dtype)

    def rows(self, *size: int) -> torch.Tensor:
        return torch.empty(2, *size, dtype=self.dtype)


Launcher = Callable[[Sizes], None]


def launch_norm(sizes: Sizes) -> None:
    x = sizes.rows(sizes.hidden)
    for delta in (x, None):
        add_norm.add_norm(x, delta, x[0], 1e-5)


def launch_activation(sizes: Sizes) -> None:
    """An inner size that 16 divides, and another."""
    for size, gelu in itertools.product((8 * sizes.hidden, 8 * sizes.hidden + 4), (False, True)):
        gated_activation.gated_activation(sizes.rows(size), gelu=gelu)


def launch_rotation(sizes: Sizes) -> None:
    places, weight = _places(), torch.empty(sizes.shape.head_dim, dtype=sizes.dtype)
    table = torch.empty(1, 2, sizes.shape.head_dim // 2)
    norms = rotate_store.HeadNorms(weight, weight, 1e-5)
    for table_or_none, norms_or_none in ((table, None), (table, norms), (None, None)):
        rotate_store.rotate_store(
            sizes.heads(),
            table_or_none,
            places,
            places,
            sizes.pool(),
            norms_or_none,
            sizes.scales,
        )


def launch_attention(sizes: Sizes) -> None:
    """A sequence of several segments, so that they are merged, too."""
    listed, places = list_items(np.array([5000], np.int32), None), _places()
    inputs = decode_attention.DecodeInputs(
        *(places[:1], places, places, places),
        torch.from_numpy(listed.items),
        torch.from_numpy(listed.first_items),
        places,
        splits=listed.splits,
    )
    for rules in _rules(sizes):
        decode_attention.attend_decodes(sizes.heads(), _out(sizes), sizes.pool(), inputs, rules)


def launch_tiles(sizes: Sizes) -> None:
    places = _places()
    inputs = tile_attention.TileInputs(places, places, places, places, places)
    for rules in _rules(sizes):
        tile_attention.attend_tiles(sizes.heads(), _out(sizes), sizes.pool(), inputs, rules)


def launch_linear(sizes: Sizes) -> None:
    """Numbers of columns as of a layer, of a router and of a classifier."""
    for columns in (64, 60, 1):
        weight = torch.empty(columns, sizes.hidden, dtype=sizes.dtype)
        linear.linear(sizes.rows(sizes.hidden), weight)
        linear.linear(sizes.rows(sizes.hidden), weight, weight[:, 0].contiguous())


def launch_experts(sizes: Sizes) -> None:
    """The products of both layers of experts: a row for each token, and one for each expert."""
    for normalized in (False, True):
        experts.choose_experts(sizes.rows(60), 4, normalized=normalized)
    routed = linear.ExpertRows(torch.empty(64, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    weight = sizes.rows(32, sizes.hidden)
    for per_token, bias in itertools.product((4, 1), (None, weight[:, :, 0].contiguous())):
        linear.linear_by_expert(sizes.rows(sizes.hidden), weight, bias, routed, per_token)
    experts.add_experts(sizes.rows(4, sizes.hidden), torch.empty(2, 4))


def _places() -> torch.Tensor:
    return torch.empty(4, dtype=torch.int32)


def _out(sizes: Sizes) -> torch.Tensor:
    return sizes.rows(sizes.shape.heads * sizes.shape.head_dim)


def _rules(sizes: Sizes) -> Iterator[decode_attention.ScoreRules]:
    """Those of most models, and with everything there is."""
    yield decode_attention.ScoreRules(0.1, kv_scales=sizes.scales)
    yield decode_attention.ScoreRules(0.1, 100, 50.0, sizes.scales)


OF_HEADS: Final[tuple[Launcher, ...]] = (launch_rotation, launch_attention, launch_tiles)
"""Kernels that know the KV pool."""
OF_ROWS: Final[tuple[Launcher, ...]] = (
    *(launch_norm, launch_activation, launch_linear, launch_experts),
)


@dataclass(frozen=True)
class Case:
    """Launches that are compiled together."""

    launcher: Launcher
    model: str
    dtype: torch.dtype
    kv: torch.dtype
    capability: int

    def launch(self) -> None:
        self.launcher(Sizes(*{**MODELS, **WIDE, **INNER}[self.model], self.dtype, self.kv))

    def __str__(self) -> str:
        types = (str(each).removeprefix("torch.") for each in (self.dtype, self.kv))
        kernel = self.launcher.__name__.removeprefix("launch_")
        return "-".join((kernel, self.model, *types, str(self.capability)))


def all_cases() -> Iterator[Case]:
    """Each launcher for the models, data types and GPUs that make a difference to it."""
    dtypes = (torch.bfloat16, torch.float32)
    for capability, dtype in itertools.product(CAPABILITIES, dtypes):
        # FP8 has no instructions before compute capability 8.9; torch computes there.
        kinds = (dtype, FP8) if capability >= 89 else (dtype,)
        for launcher, model, kv in itertools.product(OF_HEADS, (*MODELS, *WIDE), kinds):
            yield Case(launcher, model, dtype, kv, capability)
        for model in MODELS:
            yield Case(launch_norm, model, dtype, dtype, capability)
        yield Case(launch_activation, "llama-8b", dtype, dtype, capability)
        for launcher, model in itertools.product((launch_linear, launch_experts), INNER):
            yield Case(launcher, model, dtype, dtype, capability)
