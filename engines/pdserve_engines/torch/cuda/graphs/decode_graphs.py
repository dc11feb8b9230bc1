"""Computes decode steps by graphs: one for each batch size, captured while the engine loads.

A step that fits copies its numbers to the graph's inputs and replays it; the host launches one
thing instead of some hundred. Whatever else a step has to do (a prompt, a larger batch, layers
that are sent or awaited) is launched kernel by kernel, and counted by its reason. Tokens are
chosen from the result like any other; grammars and penalties need nothing here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, Literal, Protocol, runtime_checkable

from pdserve_engines.torch.cuda.graphs.bucket_sizes import bucket_sizes, smallest_bucket

if TYPE_CHECKING:
    import torch

    from pdserve_engines.torch.cuda.graphs.graph_device import CapturedGraph, GraphDevice
    from pdserve_engines.torch.cuda.graphs.static_inputs import StaticInputs, StaticStep
    from pdserve_engines.torch.models.forward_batch import ForwardBatch

__all__ = ["REASONS", "DecodeGraphs", "EagerReason", "GraphedModel"]

EagerReason = Literal["prefill", "batch", "context", "layers"]
REASONS: Final[tuple[EagerReason, ...]] = ("prefill", "batch", "context", "layers")
"""Why a step is computed without a graph: it computes prompt tokens; it has more sequences than
the largest graph; its sequences have more tokens than graphs have room for; its layers are sent, or
waited for, one by one."""


@runtime_checkable
class GraphedModel(Protocol):
    """A model whose decode steps can be captured."""

    @property
    def graph_obstacle(self) -> str:
        """Why this one's cannot; empty if they can."""
        ...

    def decode(self, step: StaticStep) -> torch.Tensor:
        """Launch a decode step with these inputs, of which the host reads nothing; returns `[R,
        hidden]`."""
        ...

    def static_inputs(self, rows: int, max_model_len: int, programs: int) -> StaticInputs:
        """Make inputs for batches of up to `rows` sequences over the bound pool."""
        ...


class DecodeGraphs:
    """The graphs of one model over one pool. One thread uses them."""

    def __init__(
        self, model: GraphedModel, device: GraphDevice, max_sequences: int, max_model_len: int
    ) -> None:
        self.replays = 0
        """Steps that a graph has computed."""
        self.eager: dict[EagerReason, int] = dict.fromkeys(REASONS, 0)
        """Steps that none has computed, by reason."""
        self.sizes = bucket_sizes(max_sequences)
        """Rows of each graph."""
        self._model, self._device = model, device
        self._inputs = model.static_inputs(self.sizes[-1], max_model_len, device.programs)
        self._graphs: dict[int, CapturedGraph] = {}

    @property
    def eager_decodes(self) -> int:
        """Those of `eager` that only decode."""
        return sum(self.eager.values()) - self.eager["prefill"]

    def capture(self) -> None:
        """Capture all graphs, the largest first: the others then find room in its memory."""
        for rows in reversed(self.sizes):
            step = self._inputs.step(rows)
            self._graphs[rows] = self._device.capture(partial(self._model.decode, step))

    def forward(self, batch: ForwardBatch, *, by_layers: bool = False) -> torch.Tensor | None:
        """The hidden state of every token of `batch`, `[T, hidden]`, which is the caller's to
        keep; None: no graph has room for it. `by_layers`: layers are sent or waited for."""
        found = "layers" if by_layers else self._prepared(batch)
        if isinstance(found, str):
            self.eager[found] += 1
            return None
        found.replay()
        self.replays += 1
        # The next replay overwrites the result, also that of another graph.
        return found.result[: len(batch.tokens)].clone()

    def _prepared(self, batch: ForwardBatch) -> CapturedGraph | EagerReason:
        """The smallest graph for `batch`, whose numbers are in its inputs; or why there is none."""
        rows = len(batch.tokens)
        if rows != len(batch.starts) or rows != len(batch.rows):
            return "prefill"
        size = smallest_bucket(self.sizes, rows)
        if size is None:
            return "batch"
        if not self._inputs.fill(batch):
            return "context"
        return self._graphs[size]

    def close(self) -> None:
        """Free the graphs and their memory. Idempotent."""
        self._graphs.clear()
        self._device.close()
