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
    if settings.kernels not in ("auto", "torch", "triton"):
        raise ConfigError(
            f"engine option kernels={settings.kernels}: not possible, the device is "
            f"{settings.device}; auto, torch and triton are"
        )
    if settings.kernels == "torch":
        return TorchModel(config, settings), "they were not asked for"
    reason = unsupported_reason(config)
    if reason is None:
        # Triton takes a second to import, and only here it is there for certain.
        from pdserve_engines.torch.cuda.kernel_check import failing_kernel
        from pdserve_engines.torch.cuda.kernel_model import KernelModel

        reason = failing_kernel(config, settings)
        if reason is None:
            return KernelModel(config, settings), ""
    if settings.kernels == "triton":
        raise ConfigError(f"engine option kernels=triton: not possible, {reason}")
    return TorchModel(config, settings), reason
