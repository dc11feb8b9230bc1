"""Implements one rank's part of a forward pass: the torch model over this rank's heads.

After attention and after the feed-forward the ranks add up their parts, so the activations between
them are the same on all ranks. A rank contributes to the sum after it has written the layer's keys
and values: what a rank has summed is in the memory of every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from pdserve_engines.torch.models.torch_model import TorchModel

if TYPE_CHECKING:
    from pdserve_engines.torch.settings import TorchSettings
    from pdserve_engines.torch.tensor_parallel.collectives import RankGroup
    from pdserve_engines.torch.tensor_parallel.shard import Shard

__all__ = ["RankModel"]


class RankModel(TorchModel):
    """A `TorchModel` of one shard; `join` comes before the first step."""

    def __init__(self, shard: Shard, settings: TorchSettings) -> None:
        super().__init__(shard.config, settings)
        self._shard = shard
        self._group: RankGroup | None = None

    @property
    def group(self) -> RankGroup:
        """The collective operations of this model's ranks."""
        assert self._group is not None, "join comes before forward"
        return self._group

    @property
    def hidden_size(self) -> int:
        """Length of a hidden state."""
        return self._config.hidden_size

    def join(self, group: RankGroup) -> None:
        """Compute with the ranks of `group` from now on."""
        self._group = group

    def sibling(self, settings: TorchSettings) -> None:
        """None: a sibling would need ranks of its own."""
        return

    def close(self) -> None:
        super().close()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _project(self, layer: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts of a product that is divided by columns."""
        part = functional.linear(x, layer[name])
        if len(x):
            self.group.all_reduce(part)
        else:
            self.group.barrier()
        bias = layer.get(f"{name}_bias")
        return part if bias is None else part.add_(bias)

    def _output_product(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output layer's products for the whole vocabulary on rank 0; on other ranks their own
        part."""
        rows, params = self._shard.vocabulary, self._held.params
        head = params["embed"][rows.start : rows.stop] if self._config.tied else params["head"]
        each = -(-self._shard.whole.vocab_size // self._shard.ranks)
        part = functional.linear(hidden, head)
        if len(rows) < each:
            part = functional.pad(part, (0, each - len(rows)))
        if not len(hidden):
            return part.new_empty(0, self._shard.whole.vocab_size)
        parts = self.group.gather(part)
        return torch.cat(parts, dim=1)[:, : self._shard.whole.vocab_size] if parts else part
