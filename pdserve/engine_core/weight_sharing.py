"""Shares weights between the cores of one process that serve the same model.

The cores load one after another. Each runs in a thread of its own with its own scheduler, pool and
executor; only weights are shared, if the engine can (`executor.SupportsWeightSharing`). The engine
process owns one `WeightSharingGroup`.

Each core computes with all the threads of its spec, and the system divides the processors between
the busy ones. On two processors, with a model of 130 million parameters, decode steps took 38 ms
alone and 80 ms beside a prefill without pause; with one thread per core 73 ms and 75 ms. A lower
priority for prefill would starve it, since decoding never rests.
"""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from pdserve.engine_core.engine_loader import make_engine, wrap_core
from pdserve.errors import ConfigError
from pdserve.messages.engine import LoadProgress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pdserve.clock import Clock
    from pdserve.engine_core.executor import SupportsWeightSharing
    from pdserve.engine_core.kit import Core
    from pdserve.engine_core.kv_transfer.connector import KvConnector
    from pdserve.messages.engine import EngineSpec

__all__ = ["WeightSharingGroup"]

_log = logging.getLogger(__name__)

_COMMON = ("engine", "model", "device", "dtype", "threads")
"""Fields of the spec that decide which weights are loaded and which threads use them."""


class WeightSharingGroup:
    """Makes cores that share weights, each within its `turn`."""

    def __init__(self) -> None:
        self._loading = threading.Lock()
        self._owner: tuple[EngineSpec, object] | None = None
        """The spec of the first core, and what its factory made."""

    @contextmanager
    def turn(self, say: Callable[[LoadProgress], None]) -> Iterator[None]:
        """Make and load one core at a time, in this context. A core that fails to load is not
        shared."""
        if not self._loading.acquire(blocking=False):
            say(LoadProgress(stage="waiting for another worker of this process to load"))
            self._loading.acquire()
        before = self._owner
        try:
            yield
        except BaseException:
            self._owner = before
            raise
        finally:
            self._loading.release()

    def make_core(self, spec: EngineSpec, clock: Clock, mover: KvConnector | None = None) -> Core:
        """Make a core for `spec`, not loaded. Raises `ConfigError` if it needs other weights than
        the first."""
        if self._owner is None:
            made = make_engine(spec.engine)
            self._owner = spec, made
        else:
            made = _another(spec, *self._owner)
        return wrap_core(spec.engine, made, clock, mover, optional=spec.moves_optionally)


def _another(spec: EngineSpec, first: EngineSpec, owner: object) -> object:
    for field in _COMMON:
        ours, theirs = getattr(spec, field), getattr(first, field)
        if ours != theirs:
            raise ConfigError(
                f"cores of one process must agree on {field}: {theirs!r} is loaded, {ours!r} wanted"
            )
    if hasattr(owner, "sibling"):
        return cast("SupportsWeightSharing", owner).sibling()
    _log.warning("engine %r cannot share weights: a further core loads its own", spec.engine)
    return make_engine(spec.engine)
