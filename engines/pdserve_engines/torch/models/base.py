"""Defines the protocol of a model; each implementation has a file of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pdserve_engines.torch.kv_pool import KvPool
    from pdserve_engines.torch.model_loader.weights import Param
    from pdserve_engines.torch.models.forward_batch import ForwardBatch
    from pdserve_engines.torch.settings import TorchSettings

__all__ = ["ForwardModel", "LayersDoneFn"]

LayersDoneFn = Callable[[int], None]
"""Called in the thread of a forward pass: keys and values of so many layers are written."""


class ForwardModel(Protocol):
    """Computes steps with weights of its own, over a pool that the executor binds it to."""

    @property
    def kernels(self) -> str:
        """Which code computes, in words for the log."""
        ...

    @property
    def exact(self) -> str:
        """The kernels' name if what they compute in float32 for a row does not depend on the rows
        beside it: then a token is the same however its sequence was scheduled. Empty: it may."""
        ...

    @property
    def torch_threads(self) -> int:
        """How many threads torch's own operations should have beside it."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as they are held."""
        ...

    def place(self, param: Param, parts: list[torch.Tensor]) -> None:
        """Take one parameter. Called once for each, then `bind`."""
        ...

    def sibling(self, settings: TorchSettings) -> ForwardModel | None:
        """Another with these weights, all placed, for a pool and a thread of its own; None if they
        are gone. Both compute at the same time."""
        ...

    def bind(self, pool: KvPool) -> None:
        """From now on keys and values live in `pool`."""
        ...

    def forward(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> torch.Tensor:
        """Compute every token of `batch`, write its KV, return the wanted rows, `[R,
        hidden]`."""
        ...

    def greedy(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> list[int]:
        """Compute every token of `batch`; the likeliest token of each wanted row, -1 where
        no logit is a number."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows of `forward`'s result to `[n, vocab]` float32, the caller's to overwrite."""
        ...

    def close(self) -> None:
        """Let go of pool and weights. Idempotent."""
        ...
