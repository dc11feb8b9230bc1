"""What a process without an engine must not carry: libraries of models in its memory."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest

from tests.chaos.load import wait_served

pytestmark = pytest.mark.timeout(300)

HEAVY = re.compile(r"site-packages/(torch|numpy|transformers|safetensors|scipy)/")
TEXT = re.compile(r"site-packages/tokenizers/")


def mapped(pid: int) -> str:
    """The files in a process's memory."""
    return Path(f"/proc/{pid}/maps").read_text()


def test_roles_without_an_engine_carry_no_library_of_models(cluster, tiny_model):
    """After a request each: nothing was imported late either. All of those libraries have parts in
    C, whose files show up among a process's mappings."""
    if not Path("/proc/self/maps").exists():
        pytest.skip("this system has no /proc/PID/maps")
    router = cluster.router()
    worker = cluster.worker(model=tiny_model)
    frontend = cluster.frontend()
    cluster.wait_ready()
    wait_served(frontend)
    for node in (router, frontend, worker):
        found = HEAVY.search(mapped(node.process.pid))
        assert found is None, f"{node.name} carries {found[0]}"
    assert TEXT.search(mapped(router.process.pid)) is None
    assert TEXT.search(mapped(frontend.process.pid)), "the test sees libraries at all"
    (engine,) = psutil.Process(worker.process.pid).children()
    assert HEAVY.search(mapped(engine.pid)) is None, "the instant engine computes nothing"
