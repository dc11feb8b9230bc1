"""Defaults hold, and what can never work is named."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError
from pdserve.router.config import RouterConfig


def test_the_defaults_are_valid():
    RouterConfig().validate()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"booking_ttl": 0.0}, "booking-ttl must be more than 0"),
        ({"gone_model_memory": float("nan")}, "gone-model-memory must be more than 0"),
        ({"sweep_interval": -1.0}, "sweep-interval"),
        ({"retry_after": 0}, "retry-after"),
        ({"max_bookings": 0}, "max-bookings must be at least 1"),
        ({"gone_models": 0}, "gone-models must be at least 1"),
        ({"assumed_max_sequences": 0}, "assumed-max-sequences must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused_by_name(changes, words):
    with pytest.raises(ConfigError, match=words):
        RouterConfig(**changes).validate()
