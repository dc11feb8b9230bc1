"""How long moving KV takes, in the router's sum: from prefill to decode, and from a peer or a
lower tier instead of computing it.

    transfer  max(0, bytes / bandwidth - hidden) + latency      layers sent while later ones are
                                                                computed cost no time of their own
    fetch     bytes / bandwidth + latency + prefill of the rest

(Mooncake, FAST'25, takes the least of computing and of fetching the longest prefix; layer-wise
transfer as in Splitwise, ISCA'24.) Nothing is fetched from peers or lower tiers yet.

A decode worker has prompts computed by prefill workers. What that takes is learnt from those that
came so, apart from what prompts take where they are also decoded:

    elsewhere = wait + base + a L + b L²  +  latency + s (L - c)

for L tokens, of which c are cached where they will be decoded.
The first part is the queue's and the prefill worker's, whose own cache is in what was learnt. The
second is what remains of moving when the prompt is computed; 1/s is the bandwidth, in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.router.predict.learn import Coefficients, Row, Window, fit
from pdserve.router.predict.model import TimeModel

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import Bytes, Seconds
    from pdserve.messages.handoff import QueueState

__all__ = ["Elsewhere", "Handoffs", "soonest_prefill", "transfer"]

_ENOUGH: Final = 5
"""Observations before anything is said,"""
_REFIT: Final = 20
"""and between two fits."""
_BELIEVED: Final = 0.2
"""Share of the prompts that were predicted to be computed elsewhere, and were. Below this, decode
workers have been told to do otherwise."""
_NEWEST: Final = 0.05
_PRIOR_ROAD: Final = (0.005, 1e-6, 0.0)
"""With the third column that learning wants, and that is not used."""


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What a prompt takes that a prefill worker computes, at the moment of a decision."""

    wait: Seconds
    """Until one begins with it."""
    model: TimeModel
    """Of prefill workers; only its prefill part."""
    latency: Seconds = 0.0
    token: Seconds = 0.0
    """Of each token that is sent."""

    def moving(self, tokens: int) -> Seconds:
        """Of so many tokens that the decode worker lacks."""
        return self.latency + self.token * tokens

    def ttft(self, length: int, cached: int) -> Seconds:
        """Of a prompt of `length` tokens, `cached` of which the decode worker has."""
        return self.wait + self.model.prefill(length) + self.moving(length - cached)


class Handoffs:
    """What is learnt of one model's prompts that are computed elsewhere."""

    def __init__(self) -> None:
        self._prefills = Window()
        self._roads = Window()
        self._seen = 0
        self._believed = 1.0
        self.model = TimeModel()
        self.road: Coefficients = _PRIOR_ROAD

    def observe(
        self, length: int, received: int, prefill: Seconds, rest: Seconds, wait: Seconds
    ) -> None:
        """One came from a prefill worker: `prefill` was spent there, `rest` before and after, and
        the queue was predicted to take `wait` of it. Only without a wait the rest tells of the
        road: else it would learn by how much queues are misjudged."""
        self._believed += _NEWEST * (1.0 - self._believed)
        row = Row(length, float(length * length), max(prefill, 1e-6))
        fresh = self._prefills.add(length.bit_length(), row)
        if wait <= 0.0:
            self._roads.add(received.bit_length(), Row(received, 0.0, max(rest, 1e-6)))
        self._seen += 1
        if fresh or self._seen <= _ENOUGH or self._seen % _REFIT == 0:
            self._fit()

    def stayed(self) -> None:
        """One that was predicted to be computed elsewhere was not."""
        self._believed -= _NEWEST * self._believed

    def _fit(self) -> None:
        prior = _PRIOR.base, _PRIOR.per_token, _PRIOR.per_pair
        base, per_token, per_pair = fit(self._prefills.rows(), prior)
        self.model = TimeModel(base, per_token, per_pair, fitted=True)
        self.road = fit(self._roads.rows(), _PRIOR_ROAD)

    @property
    def known(self) -> bool:
        """Enough to go by."""
        return self._seen >= _ENOUGH and self._believed >= _BELIEVED

    def now(self, queue: QueueState | None) -> Elsewhere | None:
        """With the queue as it is; None: nobody computes prompts for others now."""
        if queue is None or not queue.workers:
            return None
        return Elsewhere(self._wait(queue), self.model, self.road[0], self.road[1])

    def _wait(self, queue: QueueState) -> Seconds:
        """While somebody would take a prompt at once there is none."""
        if queue.credits > queue.waiting:
            return 0.0
        items = queue.waiting + queue.claimed
        tokens = queue.waiting_tokens + queue.uncomputed_tokens
        mean = tokens // max(1, items)
        return items * self.model.prefill(mean) / queue.workers


_PRIOR: Final = TimeModel()


def transfer(size: Bytes, bandwidth: float, latency: Seconds, hidden: Seconds = 0.0) -> Seconds:
    """What is left to wait for after the prefill, of which `hidden` went by while it ran.
    `bandwidth` in bytes per second."""
    if size <= 0:
        return 0.0
    return max(0.0, size / bandwidth - hidden) + latency


def soonest_prefill(
    model: TimeModel,
    speed: float,
    length: int,
    cached: int,
    sources: Iterable[tuple[int, Seconds]] = (),
) -> Seconds:
    """With `cached` tokens at hand, or the prefix of some source: so many tokens, after so long."""
    times = [speed * model.prefill(length, cached)]
    for tokens, seconds in sources:
        if tokens > cached:
            times.append(seconds + speed * model.prefill(length, min(tokens, length - 1)))
    return min(times)
