"""Opens a checkpoint and checks all of it before any weight is read.

Every process that computes with the checkpoint opens it in this way, so that all of them agree on
its configuration. It allocates nothing on a device.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.limits.memory import available
from pdserve_engines.torch.model_loader import weights
from pdserve_engines.torch.model_loader.classifier import read_head, without_output_layer
from pdserve_engines.torch.model_loader.config import read_config
from pdserve_engines.torch.model_loader.kv_scales import take_kv_scales
from pdserve_engines.torch.model_loader.safetensors_reader import Checkpoint
from pdserve_engines.torch.model_loader.weight_formats.base import read_weight_format
from pdserve_engines.torch.models.rope import check_rope
from pdserve_engines.torch.settings import resolve_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.messages.engine import EngineSpec
    from pdserve_engines.torch.model_loader.classifier import ClassificationHead
    from pdserve_engines.torch.model_loader.config import ModelConfig
    from pdserve_engines.torch.model_loader.weight_formats.base import WeightFormat
    from pdserve_engines.torch.settings import TorchSettings

__all__ = ["OpenedModel", "open_model"]


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A checkpoint whose tensors are exactly those of its configuration."""

    checkpoint: Checkpoint
    config: ModelConfig
    settings: TorchSettings
    head: ClassificationHead | None
    weight_format: WeightFormat | None = None
    """That of its quantised weights; None: it has none, or only those that a model reads itself."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parameters in the files."""
        names = [name for param in weights.params(self.config) for name in param.stored]
        return sum(self.checkpoint.entries[name].nbytes for name in names)

    def identity(self) -> bytes:
        """A digest that tells checkpoints apart (`Checkpoint.identity`), the head included."""
        names = [name for param in weights.params(self.config) for name in param.stored]
        return self.checkpoint.identity(names) + (b"" if self.head is None else self.head.identity)

    def digest(self) -> bytes:
        """Equal for processes that have read the same configuration and the same tensors."""
        return hashlib.sha256(repr(self.config).encode() + self.identity()).digest()


@contextmanager
def open_model(spec: EngineSpec) -> Iterator[OpenedModel]:
    """Open the checkpoint of `spec`; it is closed at the end of the context. Raises
    `UnsupportedCheckpoint` and `ConfigError`."""
    directory = Path(spec.model)
    config = read_config(directory)
    settings = resolve_settings(spec, config)
    with Checkpoint(directory) as checkpoint:
        checkpoint.entries = weights.canonical(checkpoint.entries, multimodal=config.multimodal)
        weights.check_count(config, checkpoint.entries)
        scales = take_kv_scales(checkpoint, config.num_layers)
        if settings.kv_cache_dtype != "auto":
            settings = replace(settings, kv_scales=scales)
        quantised = read_weight_format(directory)
        if quantised is not None:
            checkpoint.entries = quantised.join(checkpoint.entries)
        embeds = (directory / "modules.json").exists()
        config = weights.resolve_lm_head(config, checkpoint.entries, embeds=embeds)
        config = weights.resolve_experts(config, checkpoint.entries)
        head = read_head(directory, checkpoint, config, settings.classifier_from_token)
        if head is not None and head.stored:
            config = without_output_layer(config)
        weights.check(config, checkpoint.entries)
        for rope in {config.rope, config.local_rope or config.rope}:
            check_rope(rope, config.head_dim, settings.max_model_len, available())
        yield OpenedModel(checkpoint, config, settings, head, quantised)
