"""Every kernel compiles for GPUs that are not here: no register is spilled, and shared memory
suffices.

`launches` has what an engine launches; it is compiled here, not run.
"""

from __future__ import annotations

import importlib
import itertools
import pkgutil
from typing import TYPE_CHECKING

import pytest
import torch
import triton

import pdserve_engines.torch.cuda as package
from pdserve_engines.torch.cuda import decode_attention
from pdserve_engines.torch.cuda.invariant import linear, tile_attention
from pdserve_engines.torch.cuda.support import MAX_GROUP, MAX_HEAD_DIM
from tests.engines.torch.cuda.compiled import SHARED_MEMORY, Launch, compile_launch, record
from tests.engines.torch.cuda.launches import INNER, MODULES, OF_ROWS, Case, all_cases
from tests.support.seeds import drawn

if TYPE_CHECKING:
    from collections.abc import Iterator

WITH_PRODUCTS = (
    decode_attention._segment_kernel,
    linear._linear_kernel,
    tile_attention._tile_kernel,
)
TILE = ("ROWS", "DIMS", "TILE", "num_warps", "num_stages")
CASES = list(all_cases())


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """So that everything is compiled, and what several models have in common once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def launches_of(cases: list[Case], patch: pytest.MonkeyPatch) -> list[Launch]:
    launches = record(patch, *MODULES)
    for case in cases:
        case.launch()
    return launches


@pytest.mark.parametrize("case", drawn(CASES, 3, "compiled launches"), ids=str)
def test_a_kernel_compiles_within_a_gpu_s_limits(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = launches_of([case], monkeypatch)
    assert launches
    for launch in launches:
        code = compile_launch(launch, case.capability)
        assert code.spilled == 0, launch.options
        assert code.shared <= min(SHARED_MEMORY.values()), launch.options
        if launch.kernel in WITH_PRODUCTS and case.dtype != torch.float32:
            assert "mma.sync" in code.ptx or "wgmma" in code.ptx  # tensor cores
        if launch.kernel is decode_attention._segment_kernel and launch.options["num_stages"] > 1:
            assert "cp.async" in code.ptx  # tiles are loaded ahead


def test_the_cases_have_every_kernel_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is added needs a launcher."""
    found = set()
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, triton.runtime.JITFunction) and name.endswith("_kernel"):
                found.add(name)
    some = [case for case in CASES if case.model in ("llama-8b", *INNER)]
    launched = {each.kernel.__name__ for each in launches_of(some, monkeypatch)}
    assert launched == found


def test_the_cases_have_every_tile_that_heads_can_get(monkeypatch: pytest.MonkeyPatch) -> None:
    some = [case for case in CASES if case.launcher not in OF_ROWS]
    launched: dict[str, set[tuple[int, ...]]] = {}
    for launch in launches_of(some, monkeypatch):
        if launch.kernel in WITH_PRODUCTS:
            tile = tuple(launch.options[name] for name in TILE)
            launched.setdefault(launch.kernel.__name__, set()).add(tile)
    groups, dims = range(1, MAX_GROUP + 1), range(64, MAX_HEAD_DIM + 1, 8)
    sizes = {"_segment_kernel": decode_attention._tiles, "_tile_kernel": tile_attention._sizes}
    for kernel, chosen in sizes.items():
        for group, dim, types in itertools.product(groups, dims, ((2, 2), (2, 1), (4, 4), (4, 1))):
            options = chosen(group, dim, *types)
            assert tuple(options[name] for name in TILE) in launched[kernel], (group, dim, types)


def test_the_number_of_rows_changes_no_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton would know it as a constant if it is 1, and otherwise whether 16 divides it."""
    launches: list[Launch] = record(monkeypatch, linear)
    for rows in (1, 3, 64):
        linear.linear(torch.empty(rows, 64, dtype=torch.bfloat16), torch.empty(64, 64).bfloat16())
    codes = [compile_launch(launch, 80).ptx for launch in launches]
    assert codes[0] == codes[1] == codes[2]
