"""Graphs on a CPU: operations are written down while a function runs, and done again later.

Like a CUDA graph, a replay knows the addresses and numbers of its capture and nothing else. It does
all operations again on the same tensors; what the host has changed elsewhere does not count. The
capture refuses what a graph must not contain: reading the device, and tensors that are not there
for as long as the graph. All graphs of a device share their memory, so a replay spoils what the
others have left, and memory that nothing writes holds NaN.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["DATA_DEPENDENT", "READS", "RecordedGraph", "RecordingDevice", "storage", "tensors"]

READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "nonzero"}
"""Functions that wait for a device."""
_ALLOCATES = {"empty", "empty_like", "new_empty"}
"""Functions that write nothing."""
DATA_DEPENDENT = {"nonzero", "_local_scalar_dense", "masked_select", "_unique2"}


class RecordingDevice:
    """Implements `GraphDevice`."""

    programs = 4

    def __init__(self, lasting: Callable[[], Iterable[torch.Tensor]]) -> None:
        """`lasting`: tensors that graphs may use: weights, the pool and the static inputs."""
        self.graphs: list[RecordedGraph] = []
        self.replayed: list[int] = []
        """Rows of each replay."""
        self._lasting = lasting

    def capture(self, launch: Callable[[], torch.Tensor]) -> RecordedGraph:
        launch()
        graph = RecordedGraph(self, list(self._lasting()))
        with graph.captured():
            graph.result = launch()
        self.graphs.append(graph)
        return graph

    def close(self) -> None:
        self.graphs.clear()


class RecordedGraph:
    """Implements `CapturedGraph`."""

    result: torch.Tensor
    capturing: ClassVar[RecordedGraph | None] = None

    def __init__(self, device: RecordingDevice, lasting: list[torch.Tensor]) -> None:
        self._device = device
        self._calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        self._lasting = lasting
        self._known = {storage(tensor) for tensor in lasting}

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Write down everything until the end of the block."""
        RecordedGraph.capturing = self
        try:
            with _NoReads(), _Recorder(self):
                yield
        finally:
            RecordedGraph.capturing = None

    def launch(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do the call, and again at each replay."""
        for tensor in tensors(args, kwargs):
            if tensor.dim() and storage(tensor) not in self._known:
                raise AssertionError(
                    f"{call} uses a tensor of {list(tensor.shape)} that is gone at the replay"
                )
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            result = call(*args, **kwargs)
        self._known |= {storage(tensor) for tensor in tensors(result)}
        self._calls.append((call, args, kwargs, result))
        return result

    def replay(self) -> None:
        for graph in self._device.graphs:
            graph.spoil()
        with torch.inference_mode():
            for call, args, kwargs, result in self._calls:
                if getattr(call, "__name__", "").partition(".")[0] in _ALLOCATES:
                    continue
                given = {storage(tensor) for tensor in tensors(args, kwargs)}
                for old, new in zip(tensors(result), tensors(call(*args, **kwargs)), strict=True):
                    if storage(old) not in given:
                        old.copy_(new)
        self._device.replayed.append(len(self.result))

    def spoil(self) -> None:
        """Overwrite everything that the graph has left."""
        lasting = {storage(tensor) for tensor in self._lasting}
        with torch.inference_mode():
            for *_, result in self._calls:
                for tensor in tensors(result):
                    # Numbers of the host are captured as such.
                    if (
                        tensor.dim()
                        and tensor.is_floating_point()
                        and storage(tensor) not in lasting
                    ):
                        tensor.fill_(torch.nan)


class _Recorder(TorchDispatchMode):
    """Writes down torch's operations."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in DATA_DEPENDENT:
            raise AssertionError(f"{func} waits for the device")
        return self._graph.launch(func, args, kwargs or {})


class _NoReads(TorchFunctionMode):
    """Refuses functions that read the device, which on a CPU torch does not dispatch."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in READS:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


def tensors(*values: Any) -> list[torch.Tensor]:
    """All tensors in nested values, those of dataclasses too."""
    found: list[torch.Tensor] = []
    for value in _pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif is_dataclass(value) and not isinstance(value, type):
            found += tensors([getattr(value, field.name) for field in fields(value)])
    return found


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
