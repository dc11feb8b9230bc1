"""Learns how long a remote prefill takes: a prompt that a prefill worker computes for another.

It learns only from such prompts, apart from local prefills:

    elsewhere = wait + base + a L + b L²  +  latency + s (L - c)

for L tokens, of which c are cached where they will be decoded.
The first part is the time in the queue and at the prefill worker, with its cache hits. The second
is the transfer time that remains once the prompt is computed; 1/s is the bandwidth in tokens/s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.perf_model.latency_model import LatencyModel
from pdserve.perf_model.regression import (
    Coefficients,
    RegressionRow,
    StratifiedWindow,
    fit_nonnegative,
)

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.messages.handoff import QueueState

__all__ = ["RemotePrefillEstimate", "RemotePrefillModel"]

_ENOUGH: Final = 5
"""Least number of observations for an estimate."""
_REFIT: Final = 20
"""Number of observations between two fits."""
_BELIEVED: Final = 0.2
"""Least share of predicted remote prefills that took place. Below it, decode workers are probably
configured to prefill locally, and there is no estimate."""
_NEWEST: Final = 0.05
_PRIOR_TRANSFER: Final = (0.005, 1e-6, 0.0)
"""Prior of the transfer time: latency and seconds per token; the third column is not used."""


@dataclass(frozen=True, slots=True)
class RemotePrefillEstimate:
    """Estimate of a remote prefill at the moment of a decision."""

    wait: Seconds
    """Seconds in the prefill queue until a worker takes the prompt."""
    model: LatencyModel
    """Latency model of prefill workers; only its prefill part is used."""
    latency: Seconds = 0.0
    token: Seconds = 0.0
    """Transfer seconds per token."""

    def moving(self, tokens: int) -> Seconds:
        """Seconds to transfer `tokens` tokens that the decode worker lacks."""
        return self.latency + self.token * tokens

    def ttft(self, length: int, cached: int) -> Seconds:
        """Time to first token of a prompt of `length` tokens, `cached` of which the decode worker
        has."""
        return self.wait + self.model.prefill(length) + self.moving(length - cached)


class RemotePrefillModel:
    """Learns the remote prefill times of one served model."""

    def __init__(self) -> None:
        self._prefills = StratifiedWindow()
        self._transfers = StratifiedWindow()
        self._seen = 0
        self._believed = 1.0
        self.model = LatencyModel()
        self.transfer: Coefficients = _PRIOR_TRANSFER

    def observe(
        self, length: int, received: int, prefill: Seconds, rest: Seconds, wait: Seconds
    ) -> None:
        """Learn from a remote prefill that spent `prefill` seconds at the prefill worker and `rest`
        before and after; the queue was predicted to take `wait` of it. The transfer time is learnt
        only without a wait, since else it would include the error of that prediction."""
        self._believed += _NEWEST * (1.0 - self._believed)
        row = RegressionRow(length, float(length * length), max(prefill, 1e-6))
        fresh = self._prefills.add(length.bit_length(), row)
        if wait <= 0.0:
            self._transfers.add(
                received.bit_length(), RegressionRow(received, 0.0, max(rest, 1e-6))
            )
        self._seen += 1
        if fresh or self._seen <= _ENOUGH or self._seen % _REFIT == 0:
            self._fit()

    def stayed(self) -> None:
        """Take note of a predicted remote prefill that did not take place."""
        self._believed -= _NEWEST * self._believed

    def _fit(self) -> None:
        prior = _PRIOR.base, _PRIOR.per_token, _PRIOR.per_pair
        base, per_token, per_pair = fit_nonnegative(self._prefills.rows(), prior)
        self.model = LatencyModel(base, per_token, per_pair, fitted=True)
        self.transfer = fit_nonnegative(self._transfers.rows(), _PRIOR_TRANSFER)

    @property
    def known(self) -> bool:
        """Return whether there are enough observations for an estimate."""
        return self._seen >= _ENOUGH and self._believed >= _BELIEVED

    def now(self, queue: QueueState | None) -> RemotePrefillEstimate | None:
        """The estimate with the present queue; None if no prefill worker is available."""
        if queue is None or not queue.workers:
            return None
        return RemotePrefillEstimate(
            self._wait(queue), self.model, self.transfer[0], self.transfer[1]
        )

    def _wait(self, queue: QueueState) -> Seconds:
        """Seconds of wait in the queue; 0 while a prefill worker is idle."""
        if queue.credits > queue.waiting:
            return 0.0
        items = queue.waiting + queue.claimed
        tokens = queue.waiting_tokens + queue.uncomputed_tokens
        mean = tokens // max(1, items)
        return items * self.model.prefill(mean) / queue.workers


_PRIOR: Final = LatencyModel()
