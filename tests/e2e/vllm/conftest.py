"""One cluster with vLLM for all tests of this folder: loading an engine takes about 12 seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.model import MARKERS, THINKS, write_model
from tests.e2e.vllm.cluster import VllmCluster, require_vllm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of random weights, with tools in its template."""
    require_vllm()
    # Heads of 32 numbers are the smallest that vLLM computes on CPUs.
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return write_model(folder, hidden=128, template=THINKS, markers=MARKERS)


@pytest.fixture(scope="session")
def running(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCluster]:
    """Loaded once."""
    with VllmCluster(tmp_path_factory.mktemp("cluster"), tiny) as cluster:
        cluster.open()
        yield cluster


@pytest.fixture
def cluster(running: VllmCluster) -> VllmCluster:
    """Whole again, whatever the test before has done."""
    running.wait_whole()
    return running
