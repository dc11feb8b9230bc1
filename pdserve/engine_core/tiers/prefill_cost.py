"""Learns what prefill costs on this engine, from its own steps.

    seconds of a step = base + per_token * tokens + per_pair * sum of (end**2 - start**2)

over the chunks of the step, as in `perf_model.latency_model`. It decides whether a block is worth a
fetch, so it must be right within a factor, not within a percent. Pure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from pdserve.perf_model.latency_model import LatencyModel
from pdserve.perf_model.regression import RegressionRow, StratifiedWindow, fit_nonnegative

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.engine_core.executor import StepPlan
    from pdserve.ids import Seconds

__all__ = ["StepCost"]

_LEAST_TOKENS: Final = 8
"""Steps of fewer prompt tokens say little about prefill."""
_REFIT: Final = 8
"""New observations after which the coefficients are computed anew."""


class Chunk(Protocol):
    """Tokens of one sequence that a step computes."""

    @property
    def start(self) -> int: ...

    @property
    def count(self) -> int: ...


class StepCost:
    """The prefill cost of one engine core, learnt online; a `kv.tiers.planner.PrefillCost`."""

    def __init__(self) -> None:
        self._window = StratifiedWindow(depth=8, strata=32)
        self._model = LatencyModel()
        self._fresh = 0

    def note(self, plan: StepPlan, tokens: int, took: Seconds) -> None:
        """A step of `tokens` tokens has taken `took` seconds."""
        self.note_chunks(plan.chunks, tokens, took)

    def note_chunks(self, chunks: Collection[Chunk], tokens: int, took: Seconds) -> None:
        """A step that computed these parts of sequences, `tokens` tokens, has taken `took`
        seconds."""
        if tokens - len(chunks) < _LEAST_TOKENS or took <= 0.0:
            return
        pairs = 0
        for chunk in chunks:
            end = chunk.start + chunk.count
            pairs += end * end - chunk.start * chunk.start
        stratum = (tokens.bit_length(), pairs.bit_length())
        self._window.add(stratum, RegressionRow(tokens, pairs, took))
        self._fresh += 1

    def prefill(self, length: int, cached: int = 0) -> Seconds:
        """Seconds to prefill a prompt of `length` tokens, `cached` of which need no computing."""
        if self._fresh >= _REFIT or (self._fresh and not self._model.fitted):
            self._fit()
        return self._model.prefill(length, cached)

    def _fit(self) -> None:
        self._fresh = 0
        prior = LatencyModel()
        base, token, pair = fit_nonnegative(
            self._window.rows(), (prior.base, prior.per_token, prior.per_pair)
        )
        self._model = LatencyModel(base=base, per_token=token, per_pair=pair, fitted=True)
