"""Which libraries an engine needs, and what is said when one is missing."""

from __future__ import annotations

import importlib.util

import pytest

from pdserve.engine_core.engine_libraries import check_installed
from pdserve.errors import ConfigError


def test_a_library_that_is_missing_is_named_before_anything_starts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs 'torch'.*pdserve\[torch\].*--engine sim"):
        check_installed("torch")
    check_installed("sim")
    check_installed("mine:engine")
