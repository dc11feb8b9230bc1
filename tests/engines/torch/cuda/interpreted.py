"""Runs the kernels by Triton's interpreter, which computes on the CPU with numpy.

Triton decides at its import whether kernels are interpreted, for the whole process. Here the
kernels and Triton's own library functions are replaced for a while, so that other tests of the
process can compile them.
"""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import pdserve_engines.torch.cuda as package

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

pytest.importorskip("triton", reason="no Triton here")

# Triton imports it at the first launch, when it would find the functions replaced.
import triton.experimental.gluon  # noqa: F401
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from pdserve_engines.torch.cuda import add_norm

MODULES: list[ModuleType] = [
    importlib.import_module(each.name)
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
]
_PATCHED: tuple[Any, ...] = (
    *(tl, tl.core, tl.math, tl.standard),
    *(tl.core.tensor, tl.core.dtype, tl.core.tensor_descriptor_base),
)
"""What Triton's interpreter changes, and does not always change back."""


class _Interpreted(InterpretedFunction):  # type: ignore[misc]
    """A function that another one calls; Triton would replace its language again at each call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.rewrite()(*args, **kwargs)


class _Executor(interpreter.GridExecutor):  # type: ignore[misc]
    """Leaves tensors where they are: Triton would copy each, whole, onto itself."""

    def _restore_args_dev(self, *arguments: Any) -> None:
        pass


@contextmanager
def interpreted() -> Iterator[None]:
    """Interpret every kernel until the end of the block. Tensors must be on the CPU."""
    owners = (*_PATCHED, *MODULES, interpreter)
    before = [dict(vars(owner)) for owner in owners]
    for function in (add_norm._add_norm_kernel, tl.standard.sum):
        interpreter._patch_lang(function.fn)  # once for all launches: it takes milliseconds
    tl.core.tensor.__index__ = lambda self: self.handle.data.item()  # NumPy 2.4 needs it
    for owner in (*_PATCHED, *MODULES):
        for name, value in list(vars(owner).items()):
            if isinstance(value, JITFunction):
                setattr(owner, name, _Interpreted(value.fn))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()
    interpreter.GridExecutor = _Executor
    try:
        # A GPU computes infinities and NaN without a word.
        with np.errstate(all="ignore"):
            yield
    finally:
        for owner, members in zip(owners, before, strict=True):
            _restore(owner, members)


def _restore(owner: Any, members: dict[str, Any]) -> None:
    for name, value in members.items():
        if vars(owner).get(name) is not value:
            setattr(owner, name, value)
    # What Triton has added to a module stays: its rewritten functions use it.
    for name in vars(owner).keys() - members.keys() if isinstance(owner, type) else ():
        delattr(owner, name)
