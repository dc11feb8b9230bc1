"""Where there can be no network faults a run leaves them out, unless it must not."""

from __future__ import annotations

import shutil

import pytest

from tests.chaos.netns import network


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", pytest.skip.Exception), ("0", pytest.skip.Exception), ("1", pytest.fail.Exception)],
)
def test_a_machine_without_nft_skips_or_fails(value, expected, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "nft" else f"/sbin/{tool}")
    monkeypatch.setenv("PDSERVE_REQUIRE_NFT", value)
    with pytest.raises(expected, match="nft is not installed"), network():
        pass
