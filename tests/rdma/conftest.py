"""Tests over real verbs: they run where there is an adapter, above all in the virtual machine that
tests/e2e/test_rdma_vm.py starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.transfer.rdma import available

DEVICES = os.environ.get("RDMA_VM_DEVICES", "").split()
"""The virtual machine's adapters; on a real one, name them here."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = available() if here else None
    if reason is None and here and not DEVICES:
        reason = "RDMA_VM_DEVICES names no adapter to test with"
    for item in here:
        item.add_marker(pytest.mark.rdma)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def sent_packets(device: str) -> int:
    """What the adapter has sent so far."""
    path = Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts")
    return int(path.read_text())


def packets() -> int:
    """Of all adapters."""
    return sum(sent_packets(device) for device in DEVICES)


@pytest.fixture(autouse=True)
def really_over_rdma():
    """A test that says it moved bytes did it by an adapter."""
    yield
