"""Chooses whether decode steps are computed by graphs, and captures them.

It decides by the engine option `cuda_graphs` and by who computes the model; nothing is imported
that needs a GPU before one is there.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError
from pdserve_engines.torch.cuda.graphs.decode_graphs import DecodeGraphs, GraphedModel
from pdserve_engines.torch.cuda.graphs.graph_device import CudaGraphDevice

if TYPE_CHECKING:
    import torch

    from pdserve_engines.torch.cuda.graphs.graph_device import GraphDevice
    from pdserve_engines.torch.models.base import ForwardModel
    from pdserve_engines.torch.settings import TorchSettings

__all__ = ["graph_device", "graph_obstacle", "make_graphs"]

_log = logging.getLogger(__name__)

_LAUNCHED = "decode steps are launched without CUDA graphs"


def graph_device(device: torch.device) -> GraphDevice | None:
    """What captures graphs on `device`; None: nothing does."""
    return CudaGraphDevice(device) if device.type == "cuda" else None


def graph_obstacle(model: ForwardModel) -> str:
    """Why the model's steps cannot be captured; empty if they can."""
    if not isinstance(model, GraphedModel):
        return f"the model is computed by {model.kernels}, not by pdserve's kernels for GPUs"
    return model.graph_obstacle


def make_graphs(
    model: ForwardModel,
    settings: TorchSettings,
    max_sequences: int,
    max_model_len: int,
) -> tuple[DecodeGraphs | None, str]:
    """The captured graphs; None if there are none, and why, if capturing them has failed.

    Raises `ConfigError` if they were asked for by `cuda_graphs=on` and are not possible.
    """
    if settings.cuda_graphs == "off":
        return None, ""
    obstacle, failure = graph_obstacle(model), ""
    if not obstacle:
        graphs, failure = _captured(model, settings, max_sequences, max_model_len)
        if graphs is not None:
            return graphs, ""
    if settings.cuda_graphs == "on":
        raise ConfigError(
            f"engine option cuda_graphs=on: not possible, {failure or obstacle}; auto goes on "
            "without them"
        )
    if failure:
        _log.warning("%s, slower: %s", _LAUNCHED, failure)
    elif settings.device.type == "cuda":
        _log.info("%s: %s", _LAUNCHED, obstacle)
    return None, failure and f"{_LAUNCHED}: {failure}"


def _captured(
    model: ForwardModel, settings: TorchSettings, max_sequences: int, max_model_len: int
) -> tuple[DecodeGraphs | None, str]:
    """The captured graphs, or why they cannot be."""
    assert isinstance(model, GraphedModel)
    device = graph_device(settings.device)
    if device is None:
        return None, f"the device is {settings.device}"
    graphs = DecodeGraphs(model, device, max_sequences, max_model_len)
    began = time.monotonic()
    try:
        graphs.capture()
    # Torch, Triton and the driver have exceptions of many kinds.
    except Exception as error:
        graphs.close()
        return None, f"capturing has failed: {type(error).__name__}: {error}"
    _log.info(
        "captured CUDA graphs for %s sequences in %.1f s",
        ", ".join(map(str, graphs.sizes)),
        time.monotonic() - began,
    )
    return graphs, ""
