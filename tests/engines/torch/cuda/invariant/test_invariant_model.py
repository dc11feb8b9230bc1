"""Whole forward passes: those of torch, and of the same bits in any company and any chunks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pdserve.engine_core.executor import KvBlockShape, ScheduledChunk
from pdserve_engines.torch.cuda.invariant import tile_attention
from pdserve_engines.torch.cuda.invariant.invariant_model import InvariantModel
from pdserve_engines.torch.cuda.kernel_model import KernelModel
from pdserve_engines.torch.kv_pool import KvPool
from pdserve_engines.torch.model_loader.config import parse_config
from pdserve_engines.torch.model_loader.weights import params
from pdserve_engines.torch.models.forward_batch import make_batch
from pdserve_engines.torch.models.torch_model import TorchModel
from pdserve_engines.torch.settings import TorchSettings
from tests.engines.torch.cuda.test_kernel_model import BLOCK, FAMILIES, VOCAB
from tests.engines.torch.driver import sequence

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTHS = (18, 3, 5)
Work = tuple[int, int, int]
"""A sequence, and the positions between which its tokens are computed."""
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "no_rope_layers": [1]}


@pytest.fixture(autouse=True)
def short_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles of keys for few tokens: the interpreter takes seconds for some hundred."""
    whole = tile_attention._sizes
    monkeypatch.setattr(tile_attention, "_sizes", lambda *sizes: {**whole(*sizes), "TILE": 16})


class Side:
    """A model over a pool of its own, in which free places are NaN."""

    def __init__(
        self, kind: type[TorchModel], family: dict[str, Any], device: torch.device, dtype: Any
    ) -> None:
        config = parse_config(family)
        self.model = kind(config, TorchSettings(device, dtype, 1, 600))
        generator = torch.Generator().manual_seed(1)
        for param in params(config):
            parts = []
            for name, shape in param.parts:
                part = torch.randn(shape, generator=generator) * 0.1
                parts.append(part + 1 if "norm" in name and not config.float_norms else part)
            self.model.place(param, parts)
        size = dtype.itemsize
        layout = KvBlockShape(config.num_layers, config.kv_heads, BLOCK, config.head_dim, size)
        self.pool = KvPool(layout, 12, dtype, device)
        self.model.bind(self.pool)

    def run(self, steps: list[list[Work]]) -> dict[tuple[int, int], torch.Tensor]:
        """The logits at each position of each sequence, and last its KV."""
        self.pool.tensor.fill_(torch.nan)
        found: dict[tuple[int, int], torch.Tensor] = {}
        for step in steps:
            chunks = [self._chunk(*work) for work in step]
            places = [(which, at) for which, begin, end in step for at in range(begin, end)]
            with torch.inference_mode():
                batch = make_batch(chunks, list(range(len(places))), BLOCK)
                logits = self.model.logits(self.model.forward(batch))
            found |= dict(zip(places, logits, strict=True))
        for which, _, end in {work[0]: work for step in steps for work in step}.values():
            blocks = self.pool.tensor[4 * which : 4 * which + 4]
            rows = blocks.movedim(-2, 1).flatten(0, 1)[:end]
            found[(which, -1)] = rows.clone()
        return found

    def _chunk(self, which: int, begin: int, end: int) -> ScheduledChunk:
        made = sequence(random.Random(which).choices(range(VOCAB), k=end))
        made.blocks = list(range(4 * which, 4 * which + 4))
        return ScheduledChunk(made, begin, end - begin, samples=True)

    def close(self) -> None:
        self.model.close()
        self.pool.close()


WHOLE: list[list[Work]] = [[(which, 0, length)] for which, length in enumerate(LENGTHS)]
"""Each prompt alone."""
SCHEDULES: dict[str, list[list[Work]]] = {
    "together": [[(0, 0, 18), (1, 0, 3), (2, 0, 5)]],
    "in chunks beside decoding sequences": [
        [(1, 0, 2), (2, 0, 4)],
        [(1, 2, 3), (0, 0, 7), (2, 4, 5)],
        [(0, 7, 17)],
        [(0, 17, 18)],
    ],
    "token by token": [[(0, 0, 12)], *([(0, at, at + 1)] for at in range(12, 18))],
}


def differing(side: Side) -> set[str]:
    """The schedules that compute other bits than each prompt alone."""
    expected = side.run(WHOLE)
    return {
        name
        for name, steps in SCHEDULES.items()
        for place, found in side.run(steps).items()
        if not torch.equal(found, expected[place])
    }


@pytest.fixture
def sides() -> Iterator[list[Side]]:
    """They are closed at the end."""
    made: list[Side] = []
    yield made
    for side in made:
        side.close()


def small(name: str) -> dict[str, Any]:
    family = FAMILIES[name]
    return family | {key: value for key, value in ONE_LAYER.items() if key in family}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.float32),
        *(
            pytest.param(name, dtype, marks=pytest.mark.long)
            for name in FAMILIES
            for dtype in (torch.float32, torch.float16)
            if (name, dtype) != ("llama", torch.float32)
        ),
    ],
)
def test_bits_depend_on_the_own_sequence_alone(
    device: torch.device, name: str, dtype: torch.dtype, sides: list[Side], long: bool
) -> None:
    sides.append(Side(InvariantModel, FAMILIES[name] if long else small(name), device, dtype))
    assert differing(sides[0]) == set()


def test_kernels_that_promise_less_are_found(device: torch.device, sides: list[Side]) -> None:
    """The same comparison with products and prompts by torch."""
    sides.append(Side(KernelModel, small("llama"), device, torch.float32))
    assert differing(sides[0])


@pytest.mark.parametrize("name", [pytest.param(each, marks=pytest.mark.long) for each in FAMILIES])
def test_logits_are_those_of_torch(device: torch.device, name: str, sides: list[Side]) -> None:
    sides += [
        Side(kind, FAMILIES[name], device, torch.float32) for kind in (InvariantModel, TorchModel)
    ]
    steps = SCHEDULES["in chunks beside decoding sequences"]
    wanted = sides[1].run(steps)
    for place, found in sides[0].run(steps).items():
        torch.testing.assert_close(found, wanted[place], atol=1e-4, rtol=1e-4)


def test_the_name_says_what_decides_the_bits() -> None:
    config = parse_config(FAMILIES["llama"])
    names = []
    for dtype, kv in (
        (torch.float32, "auto"),
        (torch.bfloat16, "auto"),
        (torch.bfloat16, "fp8_e4m3"),
    ):
        settings = TorchSettings(torch.device("cpu"), dtype, 1, 600, kv_cache_dtype=kv)
        names.append(InvariantModel(config, settings).exact)
    assert len(set(names)) == 3
    assert names[0].startswith("invariant cpu triton 3.")
    assert names[0].endswith(" float32")
    assert names[2] == f"{names[1]}, KV float8_e4m3fn"
