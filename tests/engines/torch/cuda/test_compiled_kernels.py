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


def _combinations() -> Iterator[Any]:
    """Kernels, models, dtypes and GPUs: attention of the commonest model in every run."""
    launchers = (launch_norm, launch_activation, launch_rotation, launch_attention)
    kinds = [(dtype, dtype) for dtype in DTYPES] + [(torch.bfloat16, FP8)]
    for launcher, model, kind, gpu in itertools.product(launchers, MODELS, kinds, SHARED_MEMORY):
        if FP8 in kind and (gpu < 89 or launcher in (launch_norm, launch_activation)):
            continue  # these have no such instructions
        always = (launcher, model, kind[1], gpu) in {
            (launch_attention, "llama-8b", torch.bfloat16, 90),
            (launch_rotation, "llama-8b", torch.bfloat16, 80),
        }
        marks = [] if always else [pytest.mark.long(one_in=40)]
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
    modules = (add_norm, gated_activation, rotate_store, decode_attention)
    launches: list[Launch] = record(monkeypatch, *modules)
    launcher(*MODELS[model], dtype, kv)
    assert launches
    for launch in launches:
        code = compile_launch(launch, gpu)
        assert code.spilled == 0
        assert code.shared <= SHARED_MEMORY[gpu]
        if launch.kernel is decode_attention._segment_kernel:
            assert "mma.sync" in code.ptx  # tensor cores
            assert "cp.async" in code.ptx  # tiles are loaded ahead
