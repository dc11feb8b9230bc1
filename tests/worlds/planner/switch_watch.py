"""Judges each change of a worker's mode: the engine's prefix cache takes no part in it.

While a worker changes its mode, its pool loses a name only where a new block takes the place of an
old one, or where what a transfer has brought is not trusted. A name that stays has the same parent,
and the model's card, by which frontends and routers name blocks, is the same afterwards. That no
request is lost, and no token is another, is judged for all requests, whatever happens to workers
(`oracle.outcomes`, `load_clients`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.engine_core.core import EngineCore
from pdserve.worker.mode.state_table import ModeState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from pdserve.kv.block_pool import BlockPool
    from pdserve.messages.card import ModelCard
    from pdserve.worker.mode.state_table import ModeEvent
    from tests.worlds.roles import Worker

__all__ = ["SwitchWatch"]


class SwitchWatch:
    """The changes of one worker's mode."""

    def __init__(self, worker: Worker, on_over: Callable[[list[str]], None]) -> None:
        """`on_over` gets what was wrong with each change that is over."""
        self._worker = worker
        self._on_over = on_over
        self._before: _Cache | None = None
        """Its cache when the present change began; None: none is under way."""
        mode = worker.agent.mode
        feed = mode._feed

        def fed(event: ModeEvent) -> None:
            if self._before is None:
                self._before = _Cache(worker)
            feed(event)
            if mode._state is ModeState.SERVING:
                self._over()

        vars(mode)["_feed"] = fed

    def _over(self) -> None:
        before, self._before = self._before, None
        assert before is not None
        before.end()
        self._on_over(list(before.changed(self._worker)))


class _Cache:
    """What is in a worker's prefix cache when its mode begins to change, and what goes after it."""

    def __init__(self, worker: Worker) -> None:
        core = worker.engine.core
        self._core = core if isinstance(core, EngineCore) else None
        self._cards = dict(worker.service.cards())
        self._names: dict[bytes, bytes] = {}
        self._gone = 0
        """Names that had to go, at most."""
        if self._core is not None:
            self._names = dict(self._core.pool.names())
            self._count(self._core.pool)

    def _count(self, pool: BlockPool) -> None:
        evict, disown = pool._evict, pool.disown

        def evicted(count: int) -> None:
            self._gone += count
            evict(count)

        def disowned(blocks: Sequence[int]) -> None:
            self._gone += len(blocks)
            disown(blocks)

        vars(pool).update(_evict=evicted, disown=disowned)

    def end(self) -> None:
        """Counts no more."""
        if self._core is not None:
            own: dict[str, Any] = vars(self._core.pool)
            del own["_evict"], own["disown"]

    def changed(self, worker: Worker) -> Iterator[str]:
        """What is another now. An engine that has died meanwhile has a new cache."""
        if _named_by(self._cards) != _named_by(worker.service.cards()):
            yield "the model's blocks have other names"
        if self._core is None or worker.engine.core is not self._core:
            return
        names = self._core.pool.names()
        lost = self._names.keys() - names.keys()
        if len(lost) > self._gone:
            all_of_them = len(self._names)
            yield f"{len(lost)} of {all_of_them} cached blocks are lost, {self._gone} had to go"
        for name in self._names.keys() & names.keys():
            if self._names[name] != names[name]:
                yield f"block {name.hex()} follows another one"


def _named_by(cards: Mapping[str, ModelCard]) -> dict[str, tuple[int, str]]:
    """What the names of blocks depend on, besides tokens."""
    return {name: (card.block_size, card.compat_hash) for name, card in cards.items()}
