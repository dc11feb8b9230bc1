"""The model of a simulated worker: no directory, and a card made of the engine's capabilities."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.messages.card import ModelCard
from pdserve.worker.model import LocalModel

if TYPE_CHECKING:
    from pdserve.messages.engine import EngineCapabilities
    from pdserve.worker.model import ProgressFn

__all__ = ["VirtualModel"]


@dataclass(frozen=True, slots=True)
class VirtualModel:
    """A source of a model without files; see `worker.model_source.ModelSource`."""

    name: str
    tokenizer_json: bytes = b"{}"
    """The card's tokenizer; only frontends that make text read it."""

    async def find(self, on_progress: ProgressFn) -> LocalModel:
        """Returns a directory that does not exist: simulated engines load nothing."""
        return LocalModel(Path("/model"), self.name)

    async def describe(self, model: LocalModel, capabilities: EngineCapabilities) -> ModelCard:
        return ModelCard(
            name=model.name,
            max_model_len=capabilities.max_model_len,
            vocab_size=capabilities.vocab_size,
            block_size=capabilities.block_size,
            eos_token_ids=capabilities.eos_token_ids,
            tokenizer_json=self.tokenizer_json,
            compat_hash=capabilities.compat_hash,
        )
