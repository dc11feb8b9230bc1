"""Defines the protocol of a model; each implementation has a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pdserve_engines.torch.kv_pool import KvPool
    from pdserve_engines.torch.model_loader.weights import Param
    from pdserve_engines.torch.models.forward_batch import ForwardBatch
    from pdserve_engines.torch.settings import TorchSettings

__all__ = ["ForwardModel", "LayersDoneFn"]

LayersDoneFn = Callable[[int], None]
"""Called in the thread of a forward pass with the number of layers whose keys and values are
written."""


class ForwardModel(Protocol):
    """Computes steps with its own weights, over the KV pool that the executor binds it to."""

    @property
    def kernels(self) -> str:
        """The kernels in use, in words for the log."""
        ...

    @property
    def exact(self) -> str:
        """The kernels' name if their result for a row, in the model's dtypes, does not depend on
        the other rows: then a token is the same however its sequence was scheduled. Empty if it
        may. Workers whose kernels have the same name compute the same bits. `exactness` says what a
        worker promises by it."""
        ...

    @property
    def torch_threads(self) -> int:
        """Number of threads that torch's own operations should use beside this model."""
        ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        ...

    def place(self, param: Param, parts: Iterable[torch.Tensor]) -> None:
        """Take one parameter. Called once for each, then `bind`."""
        ...

    def sibling(self, settings: TorchSettings) -> ForwardModel | None:
        """Make a model with the same placed weights, for a pool and a thread of its own; None if
        they are gone. Both may compute at the same time."""
        ...

    def bind(self, pool: KvPool) -> None:
        """Store keys and values in `pool` from now on."""
        ...

    def forward(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> torch.Tensor:
        """Compute every token of `batch`, write its KV and return the wanted rows, `[R,
        hidden]`."""
        ...

    def greedy(self, batch: ForwardBatch, after: LayersDoneFn | None = None) -> list[int]:
        """Compute every token of `batch`; returns the likeliest token of each wanted row, -1 where
        no logit is a number."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the logits of rows of `forward`'s result, `[n, vocab]` float32; the caller may
        overwrite them."""
        ...

    def close(self) -> None:
        """Drop pool and weights. Idempotent."""
        ...
