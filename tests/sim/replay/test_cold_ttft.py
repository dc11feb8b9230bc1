"""What prompts take on an idle worker."""

from __future__ import annotations

import pytest

from pdserve.messages.engine import EngineSpec
from pdserve.sim.replay.cold_ttft import cold_ttft_by_length
from pdserve.sim.replay.config import ReplayConfig
from pdserve.sim.replay.run import replay
from pdserve.sim.workloads.trace_request import TraceRequest

SPEC = EngineSpec(
    engine="sim",
    model="",
    options={"blocks": "1000", "vocab": "32000", "max_len": "100000"},
    block_size=512,
)


def test_longer_prompts_take_longer() -> None:
    time_of = cold_ttft_by_length(SPEC, 50_000)
    times = [time_of(length) for length in (1, 100, 1000, 5000, 20_000, 50_000)]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] > 2.5 * times[-2], "attention makes it more than linear"


@pytest.mark.parametrize("length", [16, 700, 5000, 12_345, 40_000])
def test_it_is_what_a_replay_shows_of_a_lone_request(length: int) -> None:
    config = ReplayConfig(workers=1, policy="round_robin", delay=0.0)
    (record,) = replay(config, iter([TraceRequest(0, 0.0, ((0, length),), 1)])).records
    assert cold_ttft_by_length(SPEC, 50_000)(length) == pytest.approx(
        record.ttft, rel=0.1, abs=0.01
    )
