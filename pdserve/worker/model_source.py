"""Finds the model that a worker serves, and describes it in a card.

A simulated worker has another source than a checkpoint: `sim.virtual_model`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from pdserve.worker.card import read_card, read_template
from pdserve.worker.model import HubModel, LocalModel, ProgressFn, fetch, locate

if TYPE_CHECKING:
    from pdserve.messages.card import ModelCard
    from pdserve.messages.engine import EngineCapabilities
    from pdserve.worker.config import WorkerConfig

__all__ = ["CheckpointSource", "ModelSource"]


class ModelSource(Protocol):
    """What a worker needs to know of its model."""

    async def find(self, on_progress: ProgressFn) -> LocalModel:
        """Returns the directory that the engine loads. Errors: `ConfigError`. Cancellation: a
        download stops."""
        ...

    async def describe(self, model: LocalModel, capabilities: EngineCapabilities) -> ModelCard:
        """Returns the card of the loaded model. Errors: `ConfigError`."""
        ...


class CheckpointSource:
    """The checkpoint that the configuration names: bundled, a directory, or of the hub."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config

    async def find(self, on_progress: ProgressFn) -> LocalModel:
        if self._config.chat_template:
            # Before anything large is loaded: a wrong name shows at once.
            await asyncio.to_thread(read_template, self._config.chat_template)
        found = locate(self._config.model)
        if isinstance(found, HubModel):
            return await fetch(found, on_progress, self._config.download_dir)
        return found

    async def describe(self, model: LocalModel, capabilities: EngineCapabilities) -> ModelCard:
        config = self._config
        return await asyncio.to_thread(
            read_card,
            model.path,
            config.served_model_name or (model.name,),
            capabilities,
            tool_parser=config.tool_parser,
            reasoning_parser=config.reasoning_parser,
            pooling=config.pooling,
            chat_template=config.chat_template,
        )
