"""The rdma back end over real verbs, in a virtual machine with software adapters.

The machine is started by a tool of its own: PDSERVE_RDMA_VM, or `rdma-vm` on the PATH. Without it
these tests are skipped, with PDSERVE_REQUIRE_RDMA=1 they fail.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.seeds import is_long, run_seed

ROOT = Path(__file__).parents[2]
BUDGET = 1500 if is_long() else 480
"""Seconds for one machine, its start included; on a quiet host it takes a sixth of that."""
WORKERS = "tests/rdma/test_workers.py"
PLUGINS = ("pytest_asyncio.plugin", "pytest_timeout")
"""Looking for all that are installed takes half a minute there."""


def tool() -> str | None:
    named = os.environ.get("PDSERVE_RDMA_VM", "")
    return shutil.which(named or "rdma-vm")


def required() -> bool:
    return os.environ.get("PDSERVE_REQUIRE_RDMA", "") not in ("", "0")


@pytest.fixture
def machine() -> str:
    """The tool, or no test."""
    found = tool()
    if found is None:
        reason = "no rdma-vm here (PDSERVE_RDMA_VM): real verbs are not tested"
        (pytest.fail if required() else pytest.skip)(reason)
    return found


def run(machine: str, *tests: str, hosts: int, memory: int = 0) -> str:
    """What pytest said in there; it must have passed something. `memory`: MiB, if it takes more."""
    settings = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PDSERVE_TEST_SEED": run_seed(),
        "PDSERVE_TEST_LONG": "1" if is_long() else "0",
    }
    command = [machine, "run", "--python", sys.executable, "--hosts", str(hosts)]
    command += ["--timeout", str(BUDGET)]
    command += ["--memory", str(memory)] if memory else []
    command += [part for item in settings.items() for part in ("--env", "=".join(item))]
    command += ["--", "python", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [part for name in PLUGINS for part in ("-p", name)]
    status, output = ended([*command, *tests])
    if status == 125 and not required():
        pytest.skip(f"the virtual machine does not start: {output.strip().splitlines()[-1]}")
    assert status == 0, f"status {status}\n{output[-20_000:]}"
    return output


def ended(command: list[str]) -> tuple[int, str]:
    """Of a tool that has processes of its own: none outlives the test."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=BUDGET + 120)
        return process.returncode, output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def passed(output: str) -> list[int]:
    """How many tests each machine has passed."""
    return [int(number) for number in re.findall(r"(\d+) passed", output)]


@pytest.mark.slow
@pytest.mark.long(one_in=3)
@pytest.mark.timeout(BUDGET + 180)
def test_in_one_machine(machine: str) -> None:
    output = run(machine, "tests/rdma", f"--ignore={WORKERS}", hosts=1)
    assert sum(passed(output)) >= 26, output[-5_000:]


@pytest.mark.slow
@pytest.mark.long(one_in=3)
@pytest.mark.timeout(BUDGET + 180)
def test_between_two_machines(machine: str) -> None:
    output = run(machine, "tests/rdma/test_two_hosts.py", hosts=2)
    assert passed(output) == [1, 1], output[-5_000:]


@pytest.mark.slow
@pytest.mark.timeout(BUDGET + 180)
@pytest.mark.skipif(not is_long(), reason="eight programs start there: of the long tests")
def test_whole_workers_in_one_machine(machine: str) -> None:
    output = run(machine, WORKERS, hosts=1, memory=3000)
    assert passed(output) == [3], output[-5_000:]


def test_a_missing_tool_fails_where_it_is_required(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_RDMA_VM", "/nowhere/rdma-vm")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile("from tests.e2e.test_rdma_vm import machine, test_in_one_machine")
    for value, outcome in (("0", {"skipped": 1}), ("1", {"errors": 1})):
        monkeypatch.setenv("PDSERVE_REQUIRE_RDMA", value)
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "ignore")
        result.assert_outcomes(**outcome)
