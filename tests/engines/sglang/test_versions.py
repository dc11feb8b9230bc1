"""Releases of SGLang."""

from __future__ import annotations

import pytest

from pdserve_engines.sglang.versions import untested
from tests.contracts.contract import load


@pytest.mark.parametrize("version", ["0.5.20", "0.5.23", "0.5.21.post1", load("sglang").version])
def test_known_releases(version: str):
    assert untested(version) == ""


@pytest.mark.parametrize("version", ["0.5.19", "0.5.24", "0.6.0", "0.4.9", "dev", ""])
def test_others_are_named(version: str):
    text = untested(version)
    assert (version or "of an unknown version") in text
    assert "0.5.20 to 0.5.23" in text
