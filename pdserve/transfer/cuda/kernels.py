"""Finds the CUDA kernels' sources and compiles them at run time with NVRTC.

Sources are in `native/cuda`; a wheel built with the native extension has them beside this file, a
pure one lacks them. For a virtual architecture the result is PTX, which tests can check without a
GPU. For a real one it is machine code, which also loads on drivers older than the compiler.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from pdserve.transfer.cuda.driver import CudaError

__all__ = ["KERNELS", "compiled", "source_of"]

KERNELS: Final = {
    "convert": ("pdserve_convert_16", "pdserve_convert_4", "pdserve_convert_1"),
    "copy_runs": ("pdserve_copy_runs",),
}
"""Entry points of each source."""
_HEADERS: Final = ("layout_map.hpp",)
_PLACES: Final = (Path(__file__).parent, Path(__file__).parents[3] / "native" / "cuda")


def source_of(name: str) -> str:
    """The text of a source file. Errors: `CudaError` if the installation lacks it."""
    for place in _PLACES:
        if (place / name).is_file():
            return (place / name).read_text(encoding="utf-8")
    raise CudaError(f"{name} is not in {' or '.join(map(str, _PLACES))}")


@lru_cache(maxsize=16)
def compiled(name: str, architecture: str) -> bytes:
    """Compile a kernel, for `compute_90` and the like to PTX, or for `sm_90` and the like to
    machine code. Errors: `CudaError` with the compiler's log, also without a compiler."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CudaError(f"cuda-python cannot be imported: {error}") from error
    try:
        return _compiled(nvrtc, name, architecture)
    except RuntimeError as error:  # how the bindings say that they find no library
        raise CudaError(f"NVRTC cannot be loaded: {error}") from error


def _compiled(nvrtc: Any, name: str, architecture: str) -> bytes:
    text = source_of(f"{name}.cu").encode()
    headers = [source_of(header).encode() for header in _HEADERS]
    names = [header.encode() for header in _HEADERS]
    program = _asked(
        nvrtc,
        nvrtc.nvrtcCreateProgram(text, f"{name}.cu".encode(), len(headers), headers, names),
    )
    try:
        options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            size = _asked(nvrtc, nvrtc.nvrtcGetProgramLogSize(program))
            log = bytearray(size)
            _asked(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
            raise CudaError(f"{name}.cu for {architecture}: {log.decode(errors='replace')}")
        return _code(nvrtc, program, binary=architecture.startswith("sm_"))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _code(nvrtc: Any, program: Any, *, binary: bool) -> bytes:
    sizes = nvrtc.nvrtcGetCUBINSize if binary else nvrtc.nvrtcGetPTXSize
    get = nvrtc.nvrtcGetCUBIN if binary else nvrtc.nvrtcGetPTX
    # The bindings take the address of the buffer, whatever its type says of changing it.
    code = bytes(_asked(nvrtc, sizes(program)))
    _asked(nvrtc, get(program, code))
    return code


def _asked(nvrtc: Any, result: tuple[Any, ...]) -> Any:
    """The result of a call. Errors: `CudaError`."""
    code, *values = result
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CudaError(f"NVRTC: {code.name}")
    return values[0] if values else None
