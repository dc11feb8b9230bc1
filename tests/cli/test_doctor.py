import importlib.metadata
import json

import pytest

from pdserve import accel
from pdserve.cli import doctor
from pdserve.launch import exit_codes, machine
from pdserve.launch.machine import MachineFact
from pdserve.limits.memory import MemoryBound


@pytest.fixture
def no_torch_process(monkeypatch):
    """Loading torch takes seconds; what it says is given."""
    answer = {"version": "2.9", "built_for": "12.8", "gpus": [["H200", 2**37, "9.0"]]}
    monkeypatch.setattr(machine, "_ask_torch", lambda: answer)


@pytest.mark.usefixtures("no_torch_process")
def test_the_report_covers_what_matters_here():
    facts = {(fact.section, fact.name): fact for fact in machine.read_facts()}
    for key in [
        ("software", "python"),
        ("software", "hot loops"),
        ("cpu", "affinity"),
        ("shared memory", "/dev/shm"),
        ("limits", "open files"),
        ("rdma", "pyverbs"),
        ("compiler", "C++"),
        ("engines", "registered"),
        ("pdserve will use", "compute threads"),
        ("pdserve will use", "KV memory"),
        ("pdserve will use", "model"),
    ]:
        assert key in facts
    assert "H200, 128.0 GiB, compute capability 9.0" in facts["gpu", "cuda:0"].value
    assert "?" not in {name for _, name in facts}


def test_a_reader_that_breaks_is_a_problem_and_not_a_crash():
    def _strange():
        yield MachineFact("x", "fine", "1")
        raise OSError("no such machine")

    first, second = machine._guarded(_strange)
    assert first.state == "ok"
    assert second.state == "problem"
    assert "no such machine" in second.value


def test_a_torch_that_does_not_load_is_reported_by_its_last_line(monkeypatch):
    monkeypatch.setattr(machine, "_TORCH_PROBE", "raise ImportError('libcudart is missing')")
    assert machine._ask_torch() == "cannot be imported: ImportError: libcudart is missing"


def test_a_torch_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(machine, "_TORCH_PROBE", "import threading; threading.Event().wait()")
    monkeypatch.setattr(machine, "_PROBE_TIMEOUT", 0.2)
    assert "does not answer" in machine._ask_torch()


@pytest.mark.parametrize(
    ("state", "status"), [("ok", exit_codes.OK), ("absent", 0), ("problem", exit_codes.FAILED)]
)
def test_the_exit_status_tells_of_problems(monkeypatch, capsys, state, status):
    monkeypatch.setattr(doctor, "read_facts", lambda: [MachineFact("a", "b", "c", state)])
    assert doctor.run(["--json"]) == status
    assert json.loads(capsys.readouterr().out) == [
        {"section": "a", "name": "b", "value": "c", "state": state}
    ]


def test_the_report_is_grouped_and_aligned():
    facts = [
        MachineFact("cpu", "model", "x"),
        MachineFact("cpu", "affinity", "y", "problem"),
        MachineFact("gpu", "n", "z"),
    ]
    assert doctor.report(facts) == ("cpu\n  ✓ model     x\n  ✗ affinity  y\ngpu\n  ✓ n         z")
    assert doctor.report(facts, unicode=False).isascii()


def test_every_limit_on_memory_is_named(monkeypatch):
    bounds = [
        MemoryBound("the machine", 16 << 30, 8 << 30),
        MemoryBound("SLURM_MEM_PER_NODE", 4 << 30, 3 << 30),
    ]
    monkeypatch.setattr(machine, "read_bounds", lambda: bounds)
    facts = [fact.value for fact in machine._memory() if fact.name == "limit"]
    assert facts == ["3.0 GiB of 4.0 GiB left: SLURM_MEM_PER_NODE"]
    monkeypatch.setattr(machine, "available", lambda: bounds[1])
    plan = {fact.name: fact.value for fact in machine._plan()}
    assert plan["KV memory"].startswith("up to 768.0 MiB on a CPU: a quarter of what SLURM_MEM")


def test_pure_python_is_slower_and_no_problem(monkeypatch):
    monkeypatch.setattr(accel, "NATIVE", False)
    loops = next(fact for fact in machine._software() if fact.name == "hot loops")
    assert loops.state == "absent"


def test_plain_asyncio_is_slower_and_no_problem(monkeypatch):
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    loop = next(fact for fact in machine._software() if fact.name == "uvloop")
    assert (loop.state, loop.value) == ("absent", "not installed: plain asyncio serves, slower")


@pytest.mark.usefixtures("no_torch_process")
def test_engines_without_their_library_are_named_with_the_remedy(monkeypatch):
    lacks = {"sim": ["the package x: pip install x"]}
    module = "pdserve.engine_core.engine_loader.missing_parts"
    monkeypatch.setattr(module, lambda name: lacks.get(name, []))
    facts = [fact for fact in machine._engines() if fact.name != "registered"]
    assert facts == [MachineFact("engines", "sim", "needs the package x: pip install x", "absent")]
