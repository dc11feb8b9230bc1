"""Known releases, and the nearest one for others."""

from __future__ import annotations

import pytest

from pdserve_engines.tensorrt_llm.versions import KNOWN, release_of, untested


@pytest.mark.parametrize("version", ["1.2.1", "1.3.0rc29", "1.4.0rc1"])
def test_known_releases_are_not_named(version):
    assert untested(version) == ""


@pytest.mark.parametrize(
    ("version", "taken"),
    [
        ("1.1.0", "1.2"),
        ("0.21.0", "1.2"),
        ("1.5.0", "1.4 pre-release"),
        ("2.0.0", "1.4 pre-release"),
        ("", "1.4 pre-release"),
        ("next", "1.4 pre-release"),
    ],
)
def test_others_are_named_with_what_they_are_taken_for(version, taken):
    assert release_of(version).name == taken
    text = untested(version)
    assert version in text
    assert f"it is taken for {taken}. Install a known one" in text


def test_penalties_are_applied_from_1_4_on():
    assert [release.penalties for release in KNOWN.values()] == [False, False, True]
