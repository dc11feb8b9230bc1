"""Chooses who computes a model on a GPU: pdserve's kernels, or torch where they cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve_engines.torch.cuda.support import unsupported_reason
from pdserve_engines.torch.models.torch_model import TorchModel

if TYPE_CHECKING:
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.settings import TorchSettings

__all__ = ["make_gpu_model"]


def make_gpu_model(config: ModelConfig, settings: TorchSettings) -> tuple[TorchModel, str]:
    """The model, and why it is not that of the kernels; empty if it is.

    Raises `ConfigError` if the requested kernels are not possible.
    """
    wanted = settings.kernels
    if wanted not in ("auto", "torch", "triton", "invariant"):
        raise ConfigError(
            f"engine option kernels={wanted}: not possible, the device is {settings.device}; "
            "auto, torch, triton and invariant are"
        )
    if wanted == "torch":
        return TorchModel(config, settings), "they were not asked for"
    reason = unsupported_reason(config)
    if reason is None:
        made = _checked_model(config, settings)
        if not isinstance(made, str):
            return made, ""
        reason = made
    if wanted != "auto":
        raise ConfigError(f"engine option kernels={wanted}: not possible, {reason}")
    return TorchModel(config, settings), reason


def _checked_model(config: ModelConfig, settings: TorchSettings) -> TorchModel | str:
    """The model of the kernels, or which of them fails on this device."""
    # Triton takes a second to import, and only here it is there for certain.
    from pdserve_engines.torch.cuda.kernel_check import failing_kernel

    failing = failing_kernel(config, settings)
    if failing is not None:
        return failing
    if settings.kernels != "invariant":
        from pdserve_engines.torch.cuda.kernel_model import KernelModel

        return KernelModel(config, settings)
    from pdserve_engines.torch.cuda.invariant.invariance_check import varying_kernel
    from pdserve_engines.torch.cuda.invariant.invariant_model import InvariantModel

    return varying_kernel(config, settings) or InvariantModel(config, settings)
