"""Compiles kernels for GPUs that are not here, with the arguments that they are launched with."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

if TYPE_CHECKING:
    from types import ModuleType

    import pytest

TYPES: Final = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
}
SHARED_MEMORY: Final = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}
"""Bytes that a program may have, by compute capability: CUDA C++ Programming Guide, table of
technical specifications. 86 has least."""


@dataclass(frozen=True)
class Launch:
    """A kernel and what it was launched with."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Code:
    """What the compiler made of a launch."""

    registers: int
    spilled: int
    """Bytes of local memory of a thread: registers that did not suffice."""
    shared: int
    ptx: str


class Recorder:
    """Stands for a kernel and writes down its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self._launches.append(Launch(self._kernel, args, kwargs))


def record(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> list[Launch]:
    """Launches of these modules' kernels are added to this list from now on, and not run."""
    launches: list[Launch] = []
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.runtime.JITFunction) and name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Recorder(value, launches))
    return launches


def compile_launch(launch: Launch, capability: int) -> Code:
    """Compile for a GPU as Triton does at the launch: what is known of numbers and pointers, it
    takes into account."""
    names = launch.kernel.arg_names
    given = dict(zip(names, launch.arguments, strict=False)) | launch.options
    options = {name: given.pop(name) for name in list(given) if name not in names}
    signature, constants, attributes = {}, {}, {}
    for index, name in enumerate(names):
        signature[name] = kind = _type(launch.kernel.params[index], given[name])
        if kind == "constexpr":
            constants[(index,)] = given[name]
        elif _aligned(given[name]) and not launch.kernel.params[index].do_not_specialize:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return Code(*_resources(made.asm["cubin"]), made.metadata.shared, made.asm["ptx"])


def _type(parameter: Any, value: Any) -> str:
    one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
    if parameter.is_constexpr or one:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _aligned(value: Any) -> bool:
    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return isinstance(number, int) and number % 16 == 0


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its local memory."""
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text))
    return int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"])
