"""The formulas that the configuration promises."""

from __future__ import annotations

import pytest

from pdserve.gossip.config import GossipConfig


def test_a_silent_death_is_seen_after_a_five_second_pause_and_within_seven_seconds():
    config = GossipConfig()
    soonest = config.misses * config.ping_timeout + config.relay_timeout + config.suspicion_floor
    assert soonest > 5.0
    assert soonest + config.ping_interval < 7.0


@pytest.mark.parametrize(
    "change", [{"rings": 0}, {"rings": 9}, {"batch": 65}, {"part_chunk": 1 << 19}]
)
def test_bounds_of_the_wire_are_kept(change):
    with pytest.raises(ValueError, match="is 1 to"):
        GossipConfig(**change)
