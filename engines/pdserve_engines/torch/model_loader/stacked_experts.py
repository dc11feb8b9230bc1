"""Reads experts that a checkpoint stores as one tensor for all of a layer: GPT-OSS and Qwen3-VL.

The forward pass wants each matrix by itself, as [out_features, in_features], the layout of
PyTorch's `Linear`. Experts are read one at a time, since the weights of a layer may be a large part
of the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve_engines.torch.model_loader import mxfp4

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """One product of all experts of a layer: their matrices, or their biases."""

    name: str
    """The tensor's name, or its beginning if the weights are quantised."""
    count: int
    rows: int
    """out_features of each expert."""
    cols: int
    """in_features of each expert; 0: these are the biases."""
    quantised: bool = False
    """Whether the matrices are MXFP4."""
    paired: bool = False
    """Whether each expert has two matrices here."""
    interleaved: bool = False
    """Whether the rows of the two take turns; else the second matrix follows the first."""
    by_rows: bool = False
    """True if matrices are stored as [out_features, in_features]; else they are transposed."""

    @property
    def stored(self) -> dict[str, Shape]:
        """Names and shapes of the tensors in the checkpoint."""
        if not self.cols:
            return {self.name: (self.count, self.rows)}
        if not self.quantised:
            shape = (self.rows, self.cols) if self.by_rows else (self.cols, self.rows)
            return {self.name: (self.count, *shape)}
        blocks = (self.count, self.rows, self.cols // mxfp4.BLOCK)
        return {
            f"{self.name}_blocks": (*blocks, mxfp4.BLOCK_BYTES),
            f"{self.name}_scales": blocks,
        }

    @property
    def parts(self) -> tuple[tuple[str, Shape], ...]:
        """What `read` returns: a name for each part, and its shape."""
        halves = 2 if self.paired else 1
        rows = self.rows // halves
        shape = (rows, self.cols) if self.cols else (rows,)
        names = [f"{self.name}.{expert}" for expert in range(self.count)]
        return tuple((f"{name}.{half}", shape) for name in names for half in range(halves))

    def read(self, tensor: Callable[[str], torch.Tensor]) -> Iterator[torch.Tensor]:
        """The parts; `tensor` returns a stored tensor by its name."""
        stored = [tensor(name) for name in self.stored]
        for expert in range(self.count):
            matrix = self._expert(stored, expert)
            if not self.paired:
                yield matrix
            elif self.interleaved:
                yield matrix[::2]
                yield matrix[1::2]
            else:
                yield from matrix.chunk(2)

    def _expert(self, stored: list[torch.Tensor], expert: int) -> torch.Tensor:
        if self.quantised:
            blocks, scales = stored
            return mxfp4.dequantise(blocks[expert], scales[expert])
        matrix = stored[0][expert]
        return matrix.T if self.cols and not self.by_rows else matrix
