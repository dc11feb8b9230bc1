"""A path's rate is found with few bytes and in little time, whatever the path."""

from __future__ import annotations

import pytest

from pdserve.transfer.path_probe import PROBE_BYTES, PROBE_TIME, RateProbe


def probed(rate: float, latency: float = 1e-4) -> tuple[RateProbe, list[int], float]:
    """Measures a path of this rate; also returns the sizes and the seconds spent."""
    probe, sizes, spent = RateProbe(), [], 0.0
    while size := probe.next_size():
        seconds = latency + size / rate
        probe.add(size, seconds)
        sizes.append(size)
        spent += seconds
    return probe, sizes, spent


@pytest.mark.parametrize("rate", [1e8, 1.25e9, 25e9, 400e9])
@pytest.mark.parametrize("latency", [1e-6, 1e-4, 2e-3])
def test_the_rate_is_within_a_factor_of_two(rate: float, latency: float) -> None:
    probe, sizes, spent = probed(rate, latency)
    assert sum(sizes) <= PROBE_BYTES
    assert spent <= PROBE_TIME
    # A latency that is long for the last probe's bytes hides how fast they move.
    bound = 2 * sizes[-1] / (latency + sizes[-1] / rate)
    assert min(rate, bound) / 1.05 <= probe.rate <= rate * 1.05


def test_a_slow_path_gets_fewer_probes() -> None:
    assert len(probed(1e7)[1]) < len(probed(1e9)[1])


def test_a_path_that_takes_no_time_has_no_rate() -> None:
    probe = RateProbe()
    for _ in range(3):
        probe.add(probe.next_size(), 0.0)
    assert probe.rate == 0.0


def test_a_latency_that_has_fallen_since_is_not_trusted() -> None:
    probe = RateProbe()
    probe.add(probe.next_size(), 0.01)
    probe.add(1 << 20, 0.002)
    assert probe.rate == (1 << 20) / 0.001
