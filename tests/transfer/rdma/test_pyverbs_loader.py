"""pyverbs is found where the system has it, without side effects, or it is said why not."""

from __future__ import annotations

import importlib.machinery
import logging
import subprocess
import sys
from array import array
from pathlib import Path

import pytest

from pdserve.errors import TransferError
from pdserve.ids import NodeLife
from pdserve.testing.kv_oracle import layouts
from pdserve.transfer.base import Region
from pdserve.transfer.copy_plan import block_bytes
from pdserve.transfer.rdma import pyverbs_loader
from pdserve.transfer.rdma.adapter import region_address, slice_bytes
from pdserve.transfer.rdma.pyverbs_loader import unavailable_reason
from pdserve.transfer.rdma.transport import RdmaTransport

NOT_HERE = pyverbs_loader.missing_reason() is None and Path("/sys/class/infiniband").is_dir()


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=50)


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pyverbs on the path."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    pyverbs_loader.load_pyverbs.cache_clear()


@pytest.mark.usefixtures("nowhere")
def test_it_is_said_what_is_missing(tmp_path: Path) -> None:
    assert "apt install python3-pyverbs" in (pyverbs_loader.missing_reason([tmp_path]) or "")
    folder = tmp_path / "pyverbs"
    folder.mkdir()
    (folder / "qp.cpython-2-none.so").touch()
    assert "another Python" in (pyverbs_loader.missing_reason([tmp_path]) or "")
    (folder / f"qp{importlib.machinery.EXTENSION_SUFFIXES[0]}").touch()
    assert pyverbs_loader.missing_reason([tmp_path]) is None


def test_the_systems_pyverbs_comes_alone_and_leaves_logging_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "pyverbs"
    folder.mkdir()
    (folder / "__init__.py").write_text("import logging\nlogging.basicConfig(level=10)\n")
    for name in pyverbs_loader._MODULES:
        (folder / f"{name}.py").write_text("")
    (tmp_path / "beside.py").write_text("")
    script = f"""
import logging, sys
from pathlib import Path
from pdserve.transfer.rdma import pyverbs_loader
pyverbs_loader.SYSTEM = (Path({str(tmp_path)!r}),)
pyverbs_loader.missing_reason = lambda: None
pyverbs_loader._fits = lambda folder: True
verbs = pyverbs_loader.load_pyverbs()
assert verbs.qp.__name__ == "pyverbs.qp"
assert not logging.getLogger().handlers
assert logging.getLogger().level == logging.WARNING
try:
    import beside
except ImportError:
    print("alone")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50
    )
    assert (done.stdout, done.returncode) == ("alone\n", 0), done.stderr


def test_a_machine_without_adapters_is_told_so_and_not_what_to_install(tmp_path: Path) -> None:
    why = unavailable_reason(tmp_path / "infiniband")
    assert why == "the kernel offers no RDMA: no adapter, or its driver is not loaded"


@pytest.mark.skipif(NOT_HERE, reason="there is RDMA here")
async def test_without_it_nothing_connects_and_nothing_is_left() -> None:
    assert unavailable_reason()
    (layout,) = layouts(2, 1)
    memory = bytearray(4 * block_bytes(layout))
    region = Region(layout, 4, memoryview(memory))

    async def ask(*_: object) -> None:
        raise AssertionError("nobody is asked")

    transport = RdmaTransport("p", 1, [region], ask)  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(TransferError, match="set-up"):
            await transport.connect(NodeLife("d", 2), timeout=20)  # type: ignore[arg-type]
    await transport.close()
    await transport.close()
    region.view.release()  # type: ignore[union-attr]


def test_pools_are_cut_between_blocks() -> None:
    (layout,) = layouts(2, 1)
    block = block_bytes(layout)
    memory = array("B", bytes(10 * block))
    region = Region(layout, 10, memoryview(memory).cast("B"))
    assert slice_bytes(region, 1 << 40) == 10 * block
    assert slice_bytes(region, 3 * block + 1) == 3 * block
    assert slice_bytes(region, 1) == block
    assert region_address(region) == memory.buffer_info()[0]
    assert region_address(Region(layout, 10, None, None, 1 << 40)) == 1 << 40
    with pytest.raises(TransferError, match="needs its address"):
        region_address(Region(layout, 10))


def test_importing_it_imports_no_pyverbs() -> None:
    script = "import sys, pdserve.transfer.rdma.transport; print('pyverbs' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=50
    )
    assert done.stdout == "False\n", done.stderr


def test_the_root_logger_is_not_touched_by_a_failure() -> None:
    before = logging.getLogger().handlers[:]
    unavailable_reason()
    assert logging.getLogger().handlers == before
