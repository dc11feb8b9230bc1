"""How many frames the host tier of a core has."""

from __future__ import annotations

import pytest

from pdserve.engine_core.tiers.core_tiers import STAGING_FRAMES, frames_of
from pdserve.errors import ConfigError
from pdserve.messages.tiers import TierSpec

BLOCK = 128 << 10


def test_the_host_tier_has_the_frames_that_fit() -> None:
    assert frames_of(TierSpec(host_bytes=4 * BLOCK - 1), BLOCK) == 3


def test_a_disk_tier_alone_has_some_frames() -> None:
    assert frames_of(TierSpec(disk_path="/x", disk_bytes=1 << 30), BLOCK) == STAGING_FRAMES


def test_a_host_tier_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"part of it is 512 B, a block takes 128\.0 KiB"):
        frames_of(TierSpec(host_bytes=512), BLOCK)
