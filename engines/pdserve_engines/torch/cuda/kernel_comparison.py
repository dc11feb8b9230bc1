"""What the comparisons of kernels have in common that an engine makes while it loads."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.settings import TorchSettings

__all__ = ["KernelComparison", "first_problem"]

_Found = TypeVar("_Found")


class KernelComparison:
    """A model's sizes, and random numbers on its device; each method of a subclass compares one
    kernel."""

    def __init__(self, config: ModelConfig, settings: TorchSettings) -> None:
        self._config, self._device, self._dtype = config, settings.device, settings.dtype
        self._kv_dtype = settings.kv_dtype
        self._generator = torch.Generator().manual_seed(0)

    def _draw(self, *size: int) -> torch.Tensor:
        drawn = torch.randn(size, generator=self._generator)
        return drawn.to(device=self._device, dtype=self._dtype)


def first_problem(
    comparisons: Sequence[Callable[[], _Found]], problem: Callable[[_Found], str]
) -> str | None:
    """Which kernel is wrong, and how; None if none is. `problem` says it of one result, empty: all
    is well. A kernel that fails is wrong, too."""
    for compare in comparisons:
        name = f"the kernel for {compare.__name__}"
        try:
            with torch.inference_mode():
                found = compare()
        # Triton, its compiler and the driver have exceptions of many kinds.
        except Exception as error:
            return f"{name} fails: {type(error).__name__}: {error}"
        if words := problem(found):
            return f"{name} {words}"
    return None
