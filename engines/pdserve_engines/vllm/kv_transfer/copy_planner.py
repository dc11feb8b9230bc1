"""Plans which blocks each step of vLLM copies from and to staging blocks. Pure, imports no vLLM.

    load    expected ─▶ vLLM has its blocks ─▶ copied in the step that computes the last token
    save    expected ─▶ copied step by step, as its blocks are computed

vLLM asks while it plans a step, its ranks copy within that step and report it later. Until then a
staging block must not be reused, even if the request has ended. So a request lets its staging
blocks go when it needs them no more and no step with them is under way. Owned by the scheduler half
of the connector; the core takes its events after each step.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pdserve.engine_core.staged_kv.port import StagedBlocks

__all__ = ["Copied", "CopyPlanner", "LetGo", "StepCopies"]

_log = logging.getLogger(__name__)

Pairs = list[tuple[int, int]]
"""Pairs of a block of vLLM and a staging block."""


@dataclass(frozen=True, slots=True)
class Copied:
    """The blocks with the first `tokens` tokens of a request are in staging."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """The staging blocks of a request are not read or written any more."""

    key: str
    failed: int
    """Tokens that were to be loaded and are computed by vLLM."""


@dataclass(frozen=True, slots=True)
class StepCopies:
    """What the ranks copy in one step. `loads` before they compute, `saves` after."""

    number: int
    loads: dict[str, Pairs] = field(default_factory=dict)
    saves: Pairs = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Load:
    blocks: StagedBlocks
    local: int = 0
    """Tokens that vLLM had itself when it was asked last."""
    step: int | None = None
    """The step that copies it."""
    pairs: Pairs = field(default_factory=list)
    start: int = 0
    """The sequence's block that the first pair is about."""


@dataclass(slots=True, eq=False)
class _Save:
    blocks: StagedBlocks
    planned: int
    """The sequence's leading blocks that are copied or need no copy."""
    under_way: dict[int, int] = field(default_factory=dict)
    """Step -> tokens that are in staging when it is done."""
    ended: bool = False
    broken: bool = False
    """A step could not be saved: nothing more is reported as copied."""


class CopyPlanner:
    """Plans the copies of one engine. All ranks get the same plan."""

    def __init__(self, block_size: int, ranks: int) -> None:
        self._size = block_size
        self._ranks = ranks
        self._loads: dict[str, _Load] = {}
        self._saves: dict[str, _Save] = {}
        self._reports: dict[int, int] = {}
        """Ranks that have reported each step under way."""
        self._failed: dict[int, set[int]] = {}
        """Blocks that some rank could not load, by step."""
        self._unsaved: set[int] = set()
        """Steps whose blocks some rank could not save."""
        self._steps = 0
        self._starting: dict[str, _Load] = {}
        """Loads whose blocks were allocated for the step that is being planned."""
        self._events: list[Copied | LetGo] = []

    def take_events(self) -> list[Copied | LetGo]:
        """Events since the last call, in order."""
        events, self._events = self._events, []
        return events

    # ------------------------------------------------------------------ from the core

    def expect_load(self, key: str, blocks: StagedBlocks) -> None:
        """A request comes whose KV is in staging blocks. `LetGo` follows."""
        self._loads[key] = _Load(blocks)

    def expect_save(self, key: str, blocks: StagedBlocks) -> None:
        """A request comes whose KV is to be copied to staging blocks. `Copied`s and then `LetGo`
        follow."""
        self._saves[key] = _Save(blocks, blocks.first)

    def forget(self, key: str) -> None:
        """Drop what was expected of a request that vLLM has refused: no event follows."""
        self._loads.pop(key, None)
        self._saves.pop(key, None)

    # ------------------------------------------------------------------ while vLLM plans a step

    def loads(self, key: str) -> bool:
        """Return whether a request's KV is in staging blocks."""
        return key in self._loads

    def matched(self, key: str, local: int, tokens: int) -> int:
        """How many tokens can be loaded behind the `local` ones that vLLM has itself; the last of
        the request's `tokens` is always left for vLLM to compute."""
        load = self._loads.get(key)
        if load is None or load.step is not None:
            return 0
        load.local = local
        if tokens != load.blocks.tokens or local < load.blocks.first * self._size:
            return 0
        return max(0, tokens - 1 - local)

    def allocated(self, key: str, external: int, block_ids: Sequence[int]) -> None:
        """vLLM has given the request its blocks, and counts on `external` tokens to be loaded."""
        load = self._loads.get(key)
        if load is None or load.step is not None:
            return
        if not external:
            del self._loads[key]
            missing = max(0, load.blocks.tokens - 1 - load.local)
            self._events.append(LetGo(key, missing))
            return
        first = load.blocks.first
        load.start = load.local // self._size
        end = -(-load.blocks.tokens // self._size)
        load.pairs = [
            (block_ids[index], load.blocks.slots[index - first]) for index in range(load.start, end)
        ]
        self._starting[key] = load

    def plan(
        self, computed: Mapping[str, int], blocks_of: Callable[[str], Sequence[int]]
    ) -> StepCopies:
        """The copies of the step that vLLM has just planned. `computed`: tokens of each request in
        it that have KV after the step."""
        step = StepCopies(self._steps + 1)
        for key, load in self._starting.items():
            load.step = step.number
            step.loads[key] = load.pairs
        self._starting = {}
        for key in self._saves.keys() & computed.keys():
            self._plan_save(step, self._saves[key], computed[key], blocks_of(key))
        if step.loads or step.saves:
            self._steps = step.number
            self._reports[step.number] = 0
        return step

    def _plan_save(
        self, step: StepCopies, save: _Save, computed: int, block_ids: Sequence[int]
    ) -> None:
        whole = computed >= save.blocks.tokens
        tokens = save.blocks.tokens if whole else computed
        end = -(-tokens // self._size) if whole else tokens // self._size
        if end <= save.planned:
            return
        first = save.blocks.first
        step.saves.extend(
            (block_ids[index], save.blocks.slots[index - first])
            for index in range(save.planned, end)
        )
        save.planned = end
        save.under_way[step.number] = tokens

    # ------------------------------------------------------------------ after steps

    def reported(
        self, number: int, ranks: int, failed: Iterable[int], *, saved: bool = True
    ) -> None:
        """So many more ranks have done the copies of a step; `failed` blocks were not loaded, and
        without `saved` some were not saved."""
        if number not in self._reports:
            _log.error("vLLM reports step %d, which copies nothing", number)
            return
        self._reports[number] += ranks
        self._failed.setdefault(number, set()).update(failed)
        if not saved:
            self._unsaved.add(number)
        if self._reports[number] >= self._ranks:
            del self._reports[number]
            self._done(number, self._failed.pop(number))

    def _done(self, number: int, failed: set[int]) -> None:
        unsaved = number in self._unsaved
        self._unsaved.discard(number)
        for key, load in list(self._loads.items()):
            if load.step == number:
                del self._loads[key]
                self._events.append(LetGo(key, self._lost(load, failed)))
        for key, save in list(self._saves.items()):
            tokens = save.under_way.pop(number, None)
            if tokens is None:
                continue
            save.broken |= unsaved
            if not save.broken and (not save.ended or tokens == save.blocks.tokens):
                self._events.append(Copied(key, tokens))
            self._settle(key, save)

    def _lost(self, load: _Load, failed: set[int]) -> int:
        """Tokens from the first block on that was not loaded."""
        for index, (block, _) in enumerate(load.pairs, load.start):
            if block in failed:
                return load.blocks.tokens - index * self._size
        return 0

    def finished(self, key: str) -> None:
        """vLLM has ended the request, in any way."""
        load, save = self._loads.get(key), self._saves.get(key)
        if load is not None:
            self._starting.pop(key, None)
            if load.step is None:
                del self._loads[key]
                self._events.append(LetGo(key, 0))
        if save is not None:
            save.ended = True
            self._settle(key, save)

    def _settle(self, key: str, save: _Save) -> None:
        end = -(-save.blocks.tokens // self._size)
        if not save.under_way and (save.ended or save.planned == end):
            del self._saves[key]
            self._events.append(LetGo(key, 0))
