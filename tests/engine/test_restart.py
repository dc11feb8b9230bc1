"""Back-off, jitter and restart intensity."""

from __future__ import annotations

import random

from pdserve.engine.restart import CoreRestartPolicy, RestartBackoff

POLICY = CoreRestartPolicy(max_restarts=3, window=60.0, first_delay=1.0, max_delay=3.0, jitter=0.0)


def test_delays_double_up_to_a_limit_and_then_it_is_over():
    restarts = RestartBackoff(POLICY, random.Random(1))
    assert [restarts.next_delay(t) for t in (0.0, 1.0, 2.0, 3.0)] == [1.0, 2.0, 3.0, None]
    assert restarts.total == 3


def test_restarts_outside_the_window_are_forgiven():
    restarts = RestartBackoff(POLICY, random.Random(1))
    for t in (0.0, 1.0, 2.0):
        restarts.next_delay(t)
    assert restarts.next_delay(60.5) == 3.0  # the first one has left the window
    assert restarts.next_delay(60.6) is None
    assert restarts.next_delay(200.0) == 1.0


def test_jitter_only_shortens(seed: int):
    policy = CoreRestartPolicy(max_restarts=1000, first_delay=1.0, max_delay=1.0, jitter=0.5)
    restarts = RestartBackoff(policy, random.Random(seed))
    delays = [restarts.next_delay(0.0) or 0.0 for _ in range(1000)]
    assert 0.5 <= min(delays) < 0.55
    assert 0.95 < max(delays) <= 1.0


def test_zero_restarts_means_never():
    assert (
        RestartBackoff(CoreRestartPolicy(max_restarts=0), random.Random(1)).next_delay(0.0) is None
    )
