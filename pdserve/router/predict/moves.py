"""How long moving KV takes, in the router's sum: from prefill to decode, and from a peer or a
lower tier instead of computing it.

    transfer  max(0, bytes / bandwidth - hidden) + latency      layers sent while later ones are
                                                                computed cost no time of their own
    fetch     bytes / bandwidth + latency + prefill of the rest

(Mooncake, FAST'25, takes the least of computing and of fetching the longest prefix; layer-wise
transfer as in Splitwise, ISCA'24.) Nothing in the cluster moves KV yet, so policies count 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.ids import Bytes, Seconds
    from pdserve.router.predict.model import TimeModel

__all__ = ["soonest_prefill", "transfer"]


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
