"""What the clients of a trace tell routers of their requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

from pdserve.sim.replay.cluster import MODEL
from pdserve.sim.replay.config import ReplayConfig, ReplaySlo
from pdserve.sim.replay.run import replay
from pdserve.sim.workloads.generate import Unique

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.messages.demand import ModelDemand
    from pdserve.sim.replay.cluster import ReplayCluster


class Counters:
    """Looks at the router's counters at the end."""

    demand: ModelDemand

    async def begin(self, cluster: ReplayCluster, now: Callable[[], Seconds]) -> None:
        self._core = cluster.routers[0].service.core

    async def end(self) -> None:
        await asyncio.sleep(1.0)  # the last release is still on its way
        self.demand = self._core.demand.totals()[MODEL]

    def summary(self) -> dict[str, Any]:
        return {}


def test_routers_hear_of_each_request_once_and_of_its_lengths() -> None:
    load, counters = Unique(requests=40, rate=4.0, input=500, output=50), Counters()
    result = replay(ReplayConfig(workers=2, seed=1), iter(load), scaler=counters)
    demand, records = counters.demand, result.records
    assert demand.arrivals == demand.finished == demand.first_tokens == len(records) == 40
    assert demand.output_tokens == sum(record.output_tokens for record in records)
    assert demand.kv_token_seconds > 0


def test_routers_hear_what_kept_its_objective_and_what_missed_it_why() -> None:
    """As many as the summary says, those included that found no worker."""
    load, counters = Unique(requests=120, rate=40.0, input=4000, output=20), Counters()
    slo = ReplaySlo(ttft=0.5, cold=2.0)
    config = ReplayConfig(
        workers=1, seed=1, slo=slo, max_waiting=4, router_options={"hold_limit": "8"}
    )
    result = replay(config, iter(load), scaler=counters)
    outcomes = Counter(record.outcome for record in result.records)
    assert outcomes["rejected"] > 10 < outcomes["completed"]
    kept, missed = counters.demand.kept["both"], counters.demand.missed["both"]
    assert kept + sum(missed.values()) == 120
    assert kept == round(result.summary["good"] * 120) > 0
    assert missed["held"] >= outcomes["rejected"]
