"""What the tests over real processes share: a cluster per test, and two models to serve."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.chaos.cluster import Cluster
from tests.e2e.model import write_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Programs inherit which signals are ignored: under nohup, or behind `&` in a script, the processes
# started here would never see the signals that these tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """No node yet. At the end all are ended, and must have ended well."""
    with Cluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory."""
    return write_model(tmp_path_factory.mktemp("chaos-model") / "tiny")
