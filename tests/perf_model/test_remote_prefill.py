"""What prompts take that prefill workers compute, learnt from those that came so."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.messages.handoff import QueueState
from pdserve.perf_model.remote_prefill import RemotePrefillModel

IDLE = QueueState(workers=2, credits=4)


def taught(
    count: int = 200, *, seed: int = 1, wait: float = 0.0, noise: float = 0.1
) -> RemotePrefillModel:
    """By a worker of 50 us a token behind a network of 2 us a token."""
    random, handoffs = Random(seed), RemotePrefillModel()
    for _ in range(count):
        length = random.randrange(100, 20_000)
        factor = random.uniform(1 - noise, 1 + noise)
        prefill, transfer = (0.004 + 5e-5 * length) * factor, 0.01 + 2e-6 * length
        handoffs.observe(length, length, prefill, transfer * factor + wait, wait)
    return handoffs


def test_little_says_nothing():
    assert not taught(3).known
    assert taught(5).known
    assert taught().now(None) is None
    assert taught().now(QueueState(credits=3)) is None


def test_prefill_and_road_are_learnt_apart():
    away = taught().now(IDLE)
    assert away is not None
    assert away.wait == 0.0
    assert away.model.prefill(8000) == pytest.approx(0.404, rel=0.05)
    assert away.moving(8000) == pytest.approx(0.026, rel=0.1)
    assert away.ttft(8000, 6000) == pytest.approx(away.model.prefill(8000) + away.moving(2000))


def test_a_wait_is_not_taken_for_the_road():
    handoffs = taught()
    before = handoffs.transfer
    for _ in range(100):
        handoffs.observe(1000, 1000, 0.05, 5.0, 1.0)
    assert handoffs.transfer == before


def test_a_full_queue_is_waited_for_by_its_work():
    full = QueueState(
        workers=2, waiting=6, waiting_tokens=48_000, claimed=2, uncomputed_tokens=16_000
    )
    away = taught().now(full)
    assert away is not None
    assert away.wait == pytest.approx(8 * away.model.prefill(8000) / 2)


def test_workers_that_do_otherwise_are_believed():
    handoffs = taught()
    for _ in range(100):
        handoffs.stayed()
    assert not handoffs.known
    for _ in range(10):
        handoffs.observe(1000, 1000, 0.05, 0.01, 0.0)
    assert handoffs.known
