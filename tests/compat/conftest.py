"""One installation of the release before, for all tests that ask."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.compat.previous import Mixed, Release
from tests.e2e.model import write_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# See tests/chaos/conftest.py: programs inherit which signals are ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return Release(tmp_path_factory.mktemp("release"))


@pytest.fixture
def cluster(tmp_path: Path, release: Release) -> Iterator[Mixed]:
    """No node yet. At the end all are ended, and must have ended well."""
    cluster = Mixed(tmp_path, release)
    with cluster:
        yield cluster


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory."""
    return write_model(tmp_path_factory.mktemp("compat-model") / "tiny")
