"""The CUDA kernels compile without a GPU, and are called as they are declared."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from pdserve.transfer.cuda import kernels
from pdserve.transfer.cuda.driver import CudaError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="NVRTC is installed on Linux only")

CONVERT = [("b8", 72), *[("u64", 8)] * 4, ("u32", 4)]
"""The map by value (`kv.layout_cuda.MapArgument`), four tables, the number of units."""
SIGNATURES = {
    "pdserve_convert_16": CONVERT,
    "pdserve_convert_4": CONVERT,
    "pdserve_convert_1": CONVERT,
    "pdserve_copy_runs": [*[("u64", 8)] * 3, ("u32", 4)],
}


def entries(ptx: str) -> dict[str, list[tuple[str, int]]]:
    """Entry points and their parameters: type and bytes."""
    sizes = {"u64": 8, "u32": 4}
    found = {}
    for name, body in re.findall(r"\.visible \.entry (\w+)\((.*?)\)", ptx, re.DOTALL):
        parameters = re.findall(r"\.param (?:\.align \d+ )?\.(\w+) \w+(?:\[(\d+)\])?", body)
        found[name] = [(kind, int(size) if size else sizes[kind]) for kind, size in parameters]
    return found


@pytest.mark.parametrize("name", kernels.KERNELS)
@pytest.mark.parametrize("capability", ["80", "90"])
def test_a_kernel_compiles_to_ptx_with_its_entry_points(name: str, capability: str) -> None:
    ptx = kernels.compiled(name, f"compute_{capability}").decode()
    assert f".target sm_{capability}" in ptx
    expected = {entry: SIGNATURES[entry] for entry in kernels.KERNELS[name]}
    assert entries(ptx) == expected


@pytest.mark.parametrize("name", kernels.KERNELS)
@pytest.mark.parametrize("capability", ["80", "90"])
def test_a_kernel_compiles_to_machine_code(name: str, capability: str) -> None:
    code = kernels.compiled(name, f"sm_{capability}")
    assert code[:4] == b"\x7fELF"
    assert all(entry.encode() in code for entry in kernels.KERNELS[name])


def test_what_does_not_compile_says_where(monkeypatch) -> None:
    real = kernels.source_of

    def broken(name: str) -> str:
        text = real(name)
        return text.replace("unit.block", "unit.bloc") if name.endswith(".cu") else text

    monkeypatch.setattr(kernels, "source_of", broken)
    with pytest.raises(CudaError, match=r"convert\.cu\(\d+\): error: .*bloc"):
        kernels.compiled("convert", "compute_86")


def test_sources_are_found_in_the_tree_and_named_when_they_are_not() -> None:
    assert "pdserve_copy_runs" in kernels.source_of("copy_runs.cu")
    with pytest.raises(CudaError, match=str(Path("native") / "cuda")):
        kernels.source_of("nothing.cu")
