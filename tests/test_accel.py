"""Which twin is in use is decided once, can be forced, and is said in one line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pdserve import accel


def described(**environment: str) -> str:
    """What a fresh interpreter says under this environment."""
    return subprocess.run(
        [sys.executable, "-c", "from pdserve import accel; print(accel.describe())"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_a_run_that_requires_native_code_has_it() -> None:
    if os.environ.get("PDSERVE_REQUIRE_NATIVE", "") not in ("", "0"):
        assert accel.NATIVE, accel.REASON


def test_describe_is_one_line() -> None:
    assert accel.describe().count("\n") == 0
    assert ("native" in accel.describe()) is accel.NATIVE


@pytest.mark.parametrize("value", ["1", "true", "yes"])
def test_pure_can_be_forced(value: str) -> None:
    assert described(PDSERVE_PURE=value) == "hot loops: pure Python (PDSERVE_PURE is set)"


@pytest.mark.skipif(not accel.NATIVE, reason=accel.REASON)
@pytest.mark.parametrize("value", ["", "0", "false"])
def test_native_is_used_where_it_is_built(value: str) -> None:
    assert described(PDSERVE_PURE=value) == "hot loops: native (extension found)"
