"""Every kernel compiles for GPUs that are not here: no register is spilled, and shared memory
suffices.

The launchers run with tensors of models' real sizes, and their launches are compiled, not run.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pdserve_engines.torch.cuda import add_norm, decode_attention, gated_activation, rotate_store
from pdserve_engines.torch.cuda.decode_plan import list_items
from pdserve_engines.torch.cuda.invariant import experts, linear, tile_attention
from tests.engines.torch.cuda.compiled import SHARED_MEMORY, Launch, compile_launch, record
from tests.engines.torch.cuda.pools import Shape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODELS = {
    "llama-1b": (Shape(32, 8, 64), 2048),
    "phi-2b": (Shape(32, 32, 80), 2560),
    "phi-mini": (Shape(32, 32, 96), 3072),
    "llama-8b": (Shape(32, 8, 128), 4096),
    "qwen-32b": (Shape(40, 8, 128), 5120),
    "gemma-2b": (Shape(8, 1, 256), 2048),
    "gemma-27b": (Shape(32, 16, 128), 5376),
}
"""Heads, and the size of the hidden state, of common models."""
MODULES = (
    *(add_norm, gated_activation, rotate_store, decode_attention),
    *(linear, experts, tile_attention),
)
WITH_PRODUCTS = (
    decode_attention._segment_kernel,
    linear._linear_kernel,
    tile_attention._tile_kernel,
)
DTYPES = [torch.bfloat16, torch.float16]
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that everything is compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def launch_norm(shape: Shape, hidden: int, dtype: torch.dtype, kv: torch.dtype) -> None:
    x, weight = torch.empty(2, hidden, dtype=dtype), torch.empty(hidden, dtype=dtype)
    add_norm.add_norm(x, x, weight, 1e-5)


def launch_activation(shape: Shape, hidden: int, dtype: torch.dtype, kv: torch.dtype) -> None:
    gated_activation.gated_activation(torch.empty(2, 8 * hidden, dtype=dtype))
    gated_activation.gated_activation(torch.empty(2, 8 * hidden, dtype=dtype), gelu=True)


def pool_of(shape: Shape, kv: torch.dtype) -> torch.Tensor:
    """One of 32 layers."""
    return torch.empty(1, 32, 2, shape.kv_heads, 32, shape.head_dim, dtype=kv)[:, 1]


def heads_of(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(2, (shape.heads + 2 * shape.kv_heads) * shape.head_dim, dtype=dtype)


def launch_rotation(shape: Shape, hidden: int, dtype: torch.dtype, kv: torch.dtype) -> None:
    places = torch.empty(4, dtype=torch.int32)
    weight = torch.empty(shape.head_dim, dtype=dtype)
    table = torch.empty(1, 2, shape.head_dim // 2)
    scales = (0.5, 0.25) if kv == FP8 else (1.0, 1.0)
    for norms in (None, rotate_store.HeadNorms(weight, weight, 1e-5)):
        rotate_store.rotate_store(
            heads_of(shape, dtype), table, places, places, pool_of(shape, kv), norms, scales
        )


def launch_attention(shape: Shape, hidden: int, dtype: torch.dtype, kv: torch.dtype) -> None:
    listed = list_items(np.array([5000], np.int32), None)
    places = torch.empty(4, dtype=torch.int32)
    inputs = decode_attention.DecodeInputs(
        *(places[:1], places, places, places),
        torch.from_numpy(listed.items),
        torch.from_numpy(listed.first_items),
        places,
        splits=listed.splits,
    )
    out = torch.empty(2, shape.heads * shape.head_dim, dtype=dtype)
    scales = (0.5, 0.25) if kv == FP8 else (1.0, 1.0)
    for cap in (None, 50.0):
        rules = decode_attention.ScoreRules(0.1, 100, cap, scales)
        pool = pool_of(shape, kv)
        decode_attention.attend_decodes(heads_of(shape, dtype), out, pool, inputs, rules)


def launch_linear(shape: Shape, hidden: int, dtype: torch.dtype, kv: torch.dtype) -> None:
    """The second inner size is no multiple of a tile."""
    for inner in (hidden, hidden + 8):
        x, weight = torch.empty(2, inner, dtype=dtype), torch.empty(64, inner, dtype=dtype)
        linear.linear(x, weight)
        linear.linear(x, weight, weight[:, 0].contiguous())


def launch_experts(shape: Shape, hidden: int, dtype: torch.dtype, kv: torch.dtype) -> None:
    x, shares = torch.empty(2, hidden, dtype=dtype), torch.empty(2, 4)
    experts.choose_experts(torch.empty(2, 60, dtype=dtype), 4, normalized=True)
    routed = linear.ExpertRows(torch.empty(64, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    weight = torch.empty(2, 32, hidden, dtype=dtype)
    linear.linear_by_expert(x, weight, weight[:, :, 0].contiguous(), routed, 4)
    experts.add_experts(torch.empty(2, 4, hidden, dtype=dtype), shares)


def launch_tiles(shape: Shape, hidden: int, dtype: torch.dtype, kv: torch.dtype) -> None:
    places = torch.empty(4, dtype=torch.int32)
    inputs = tile_attention.TileInputs(places, places, places, places, places)
    out = torch.empty(2, shape.heads * shape.head_dim, dtype=dtype)
    scales = (0.5, 0.25) if kv == FP8 else (1.0, 1.0)
    for cap in (None, 50.0):
        rules = decode_attention.ScoreRules(0.1, 100, cap, scales)
        pool = pool_of(shape, kv)
        tile_attention.attend_tiles(heads_of(shape, dtype), out, pool, inputs, rules)


KERNELS = {
    launch_norm: "plain",
    launch_activation: "plain",
    launch_rotation: "kv",
    launch_attention: "kv",
    launch_linear: "float32",
    launch_experts: "float32",
    launch_tiles: "kv float32",
}
"""What each is compiled for beside both half precisions: KV in FP8, and float32."""
ALWAYS = {
    (launch_attention, "llama-8b", torch.bfloat16, 90),
    (launch_rotation, "llama-8b", torch.bfloat16, 80),
    (launch_linear, "llama-8b", torch.bfloat16, 90),
}


def _combinations() -> Iterator[Any]:
    """Kernels, models, dtypes and GPUs: some of the commonest model in every run."""
    kinds = [(dtype, dtype) for dtype in (*DTYPES, torch.float32)] + [(torch.bfloat16, FP8)]
    for launcher, model, kind, gpu in itertools.product(KERNELS, MODELS, kinds, SHARED_MEMORY):
        if FP8 in kind and (gpu < 89 or "kv" not in KERNELS[launcher]):
            continue  # these have no such instructions
        if torch.float32 in kind and "float32" not in KERNELS[launcher]:
            continue
        if launcher in (launch_linear, launch_experts) and model not in ("llama-8b", "qwen-32b"):
            continue  # heads are nothing to them
        always = (launcher, model, kind[1], gpu) in ALWAYS
        marks = [] if always else [pytest.mark.long(one_in=60)]
        names = (launcher.__name__, model, *(str(each).removeprefix("torch.") for each in kind))
        yield pytest.param(
            launcher, model, *kind, gpu, marks=marks, id="-".join((*names, str(gpu)))
        )


@pytest.mark.parametrize(("launcher", "model", "dtype", "kv", "gpu"), list(_combinations()))
def test_a_kernel_compiles_within_a_gpu_s_limits(
    launcher: Any,
    model: str,
    dtype: torch.dtype,
    kv: torch.dtype,
    gpu: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches: list[Launch] = record(monkeypatch, *MODULES)
    launcher(*MODELS[model], dtype, kv)
    assert launches
    for launch in launches:
        code = compile_launch(launch, gpu)
        assert code.spilled == 0
        assert code.shared <= SHARED_MEMORY[gpu]
        if launch.kernel in WITH_PRODUCTS and dtype != torch.float32:
            assert "mma.sync" in code.ptx or "wgmma" in code.ptx  # tensor cores
        if launch.kernel is decode_attention._segment_kernel:
            assert "cp.async" in code.ptx  # tiles are loaded ahead


def test_the_number_of_rows_changes_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would know it as a constant if it is 1, and otherwise whether 16 divides it."""
    launches: list[Launch] = record(monkeypatch, linear)
    for rows in (1, 3, 64):
        linear.linear(torch.empty(rows, 64, dtype=torch.bfloat16), torch.empty(64, 64).bfloat16())
    codes = [compile_launch(launch, 80).ptx for launch in launches]
    assert codes[0] == codes[1] == codes[2]
