"""Tests over real verbs: they run where there is an adapter, above all in the virtual machine that
tests/e2e/test_rdma_vm.py starts."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pdserve.transfer.rdma.adapter import QueuePairOptions
from pdserve.transfer.rdma.pyverbs_loader import unavailable_reason
from pdserve.transfer.rdma.transport import RdmaTransport
from tests.support.seeds import is_long

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.ids import NodeLife
    from pdserve.transfer.base import CallPeer, Region

DEVICES = os.environ.get("RDMA_VM_DEVICES", "").split()
"""The virtual machine's adapters. On a real one name them here, two of them or one twice."""
LONG = (
    "test_a_lossy_link_only_takes_longer",
    "test_engines_hand_over_by_rdma",
    "test_workers_hand_over_by_rdma",
)
PATIENT = QueuePairOptions(depth=64, receives=64, timeout=17)
"""A virtual machine on a busy host stands still for a while: that is no lost peer."""


@pytest.hookimpl(tryfirst=True)  # before tests/conftest.py leaves out long ones
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = str(Path(__file__).parent) + os.sep
    here = {item: None for item in items if str(item.path).startswith(folder)}
    if not here:
        return
    reason = unavailable_reason()
    if reason is None and not DEVICES:
        reason = "RDMA_VM_DEVICES names no adapter to test with"
    for item in here:
        item.add_marker(pytest.mark.rdma)
        item.add_marker(pytest.mark.timeout(600))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    if not is_long():  # each takes seconds in a virtual machine
        items[:] = [item for item in items if item not in here or not _takes_long(item)]


def _takes_long(item: pytest.Item) -> bool:
    """In a virtual machine: the largest tests, and what has been run with one rail already."""
    parent = getattr(item, "cls", None)
    again = parent is not None and parent.__name__ == "TestRails"
    named = getattr(item, "originalname", item.name)
    large = named in LONG or (named == "test_any_two_sizes" and "24" in item.name)
    return large or (again and named not in vars(parent))


def transport(
    key: NodeLife,
    regions: Sequence[Region],
    ask: CallPeer,
    options: QueuePairOptions = PATIENT,
    devices: Sequence[str] = (),
) -> RdmaTransport:
    """One side; by default the source has the first adapter and the destination the last."""
    named = list(devices) or [DEVICES[0] if key.node == "p" else DEVICES[-1]]
    return RdmaTransport(key.node, key.epoch, regions, ask, devices=named, options=options)


def sent(device: str) -> int:
    """Packets that an adapter has sent so far."""
    counters = Path(f"/sys/class/infiniband/{device}/ports/1/hw_counters")
    return int((counters / "sent_pkts").read_text())


def held() -> dict[str, dict[str, int]]:
    """What there is on each adapter: queue pairs, completion queues, memory regions, domains."""
    command = ["rdma", "-j", "resource", "show"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=50)
    kinds = ("qp", "cq", "mr", "pd", "ctx")
    return {
        device["ifname"]: {kind: device.get(kind, 0) for kind in kinds}
        for device in json.loads(done.stdout)
    }


@pytest.fixture(scope="session")
def untouched() -> dict[str, dict[str, int]]:
    """The adapters as they were: the kernel has objects of its own there."""
    return held()


@pytest.fixture(autouse=True)
def nothing_is_left_on_the_adapters(untouched: dict[str, dict[str, int]]) -> Iterator[None]:
    yield
    assert held() == untouched
