"""A device on a CPU whose results the host may not read before it has waited for them.

Operations are done at once, so results are right; but what `begin` and `sample` have launched
counts as not there until a `Download` that was queued behind it is waited for. Reading it before
is kept in `violation`: on a GPU the host would stand still until the device has done everything
that was launched. The model computes as one kernel of such a device.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pdserve_engines.torch.executor import TorchExecutor
from pdserve_engines.torch.models.cpu_model import CpuModel
from pdserve_engines.torch.models.download import Download
from pdserve_engines.torch.sampling import filters, sampler
from tests.engines.torch.cuda.graphs.recorded import DATA_DEPENDENT, READS, storage, tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pytest

__all__ = ["LateReads"]


class LateReads:
    """Watches all torch executors while the patch holds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.violation: AssertionError | None = None
        """The first read of what is not there."""
        self.waits = 0
        """Downloads that were waited for."""
        self._launched = 0
        self._late: dict[int, tuple[int, torch.Tensor]] = {}
        """Memory -> the launch that writes it, and a tensor that keeps it from being used anew."""
        self._queued: dict[int, int] = {}
        """Download -> launches before it."""
        self._function_mode, self._dispatch_mode = _Functions(self), _Operations(self)
        for name in ("begin", "sample", "finish"):
            self._replace(patch, TorchExecutor, name, self._watched)
        self._replace(patch, TorchExecutor, "execute", self._at_once)
        for name in ("forward", "logits"):
            self._replace(patch, CpuModel, name, self._as_kernel)
        self._replace(patch, Download, "__init__", self._queueing)
        self._replace(patch, Download, "wait", self._waiting)
        # Of what depends on the device, a GPU's way.
        patch.setattr(filters, "border_by_sorting", filters.border_by_counting)
        patch.setattr(sampler, "argmax", _argmax)

    def launch(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do the call; what it returns is not there yet."""
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            result = call(*args, **kwargs)
        self._launched += 1
        for tensor in tensors(result):
            self._late[storage(tensor)] = (self._launched, tensor)
        return result

    def check(self, what: Any, *values: Any) -> None:
        """Note a read of what is not there."""
        late = any(storage(tensor) in self._late for tensor in tensors(values))
        if late and self.violation is None:
            self.violation = AssertionError(f"{what} waits for the device")

    def _arrive(self, launches: int) -> None:
        self._late = {key: late for key, late in self._late.items() if late[0] > launches}

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with self._function_mode, self._dispatch_mode:
            yield

    @staticmethod
    def _replace(
        patch: pytest.MonkeyPatch, owner: Any, name: str, wrap: Callable[[Any], Any]
    ) -> None:
        patch.setattr(owner, name, wrap(getattr(owner, name)))

    def _watched(self, method: Any) -> Any:
        def watched(*args: Any) -> Any:
            with self._modes():
                return method(*args)

        return watched

    def _at_once(self, method: Any) -> Any:
        """Such a step ends with all of its results read."""

        def at_once(*args: Any) -> Any:
            self._late.clear()
            return method(*args)

        return at_once

    def _as_kernel(self, method: Any) -> Any:
        def launched(*args: Any) -> Any:
            return self.launch(method, args, {})

        return launched

    def _queueing(self, method: Any) -> Any:
        def queued(download: Download, *args: Any) -> None:
            method(download, *args)
            self._queued[id(download)] = self._launched

        return queued

    def _waiting(self, method: Any) -> Any:
        def waited(download: Download) -> Any:
            self.waits += 1
            self._arrive(self._queued.pop(id(download)))
            return method(download)

        return waited


class _Functions(TorchFunctionMode):
    """Finds functions that read, which on a CPU torch does not dispatch."""

    def __init__(self, device: LateReads) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") in READS:
            self._device.check(func, args)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Launches torch's operations."""

    def __init__(self, device: LateReads) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket.__name__ in DATA_DEPENDENT:
            self._device.check(func, args)
        return self._device.launch(func, args, kwargs or {})


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """`sampler.argmax` as a device computes it."""
    found = logits.argmax(-1)
    most = logits.gather(-1, found.unsqueeze(-1)).squeeze(-1)
    return found.masked_fill_(~(most > -torch.inf), -1)
