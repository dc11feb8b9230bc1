"""Each test is in one of the two parts that `make test` runs, and its status tells of both."""

from __future__ import annotations

import importlib.util
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.support import parts
from tests.support.parts import belongs, worker_number

SCRIPT = Path(__file__).parents[2] / ".ci" / "pytest.py"


def script():
    spec = importlib.util.spec_from_file_location("ci_pytest", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("alone", [True, False])
def test_a_test_is_in_one_part_and_in_a_run_without_parts(alone):
    assert belongs("", alone)
    assert belongs("vllm", alone)
    assert belongs("alone", alone) != belongs("together", alone)


def test_processes_that_run_tests_together_are_numbered(monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert worker_number() == 0
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    assert worker_number() == 3
    monkeypatch.setattr(parts, "PART", "vllm")
    assert worker_number() == 4 == script().MOST


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [(0, 0, 0), (1, 0, 1), (0, 1, 1), (2, 1, 2), (5, 0, 0), (0, 5, 0), (5, 5, 5), (5, 1, 1)],
)
def test_any_failure_is_the_status_and_a_part_without_tests_is_none(
    monkeypatch, first, second, status
):
    module = script()
    statuses = iter((first, second))
    monkeypatch.setattr(module, "part", lambda *arguments: next(statuses))
    assert module.main(["-q"]) == status


def test_the_first_failure_is_the_end_if_that_is_wanted(monkeypatch):
    module = script()
    statuses = iter((1,))  # a second part would find none
    monkeypatch.setattr(module, "part", lambda *arguments: next(statuses))
    assert module.main(["-x"]) == 1


def test_only_files_with_such_tests_are_collected_for_the_second_part():
    found = script().files_alone(["-q", "-m", "not vllm"])
    assert "tests/frontend/test_hostile.py" in found
    assert len(found) < 10
    assert script().files_alone(["-q", "tests/support"]) == []


LIMITS = {
    "test_a": "def test_1(): ...",
    "test_b": "@pytest.mark.timeout(90)\ndef test_1(): ...\ndef test_2(): ...",
    "test_c": "def test_1(): ...\n@pytest.mark.timeout(0)\ndef test_2(): ...",
    "test_d": "@pytest.mark.timeout(90)\ndef test_1(): ...",
}


@pytest.mark.parametrize(
    ("part", "order"),
    [("together", "c1 c2 b1 b2 d1 a1"), ("alone", "a1 b1 b2 c1 c2 d1"), ("", "a1 b1 b2 c1 c2 d1")],
)
def test_files_that_may_take_long_come_first_and_stay_whole(
    pytester: pytest.Pytester, monkeypatch, part, order
):
    monkeypatch.setattr(parts, "PART", part)
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    pytester.makepyfile(**{name: f"import pytest\n{text}" for name, text in LIMITS.items()})
    items, _ = pytester.inline_genitems()
    parts.long_files_first(items)
    assert " ".join(item.path.stem[-1] + item.name[-1] for item in items) == order


HALF = """
import pathlib, pytest, time

HERE = pathlib.Path(__file__).parent

@pytest.mark.vllm
def test_it():
    (HERE / "{name}").touch()
    end = time.monotonic() + 20
    while not (HERE / "{other}").exists():
        assert time.monotonic() < end, "the other half does not run"
        time.sleep(0.01)
    tries = HERE / "tries of {name}"
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    assert len(tries.read_text()) > {failures}
"""


@pytest.fixture
def module(monkeypatch):
    """The script, which has this interpreter for vLLM, too."""
    module = script()
    monkeypatch.setattr(module, "VLLM_PYTHON", sys.executable)
    monkeypatch.setattr(module, "CLUSTERS", ("test_clusters.py",))
    monkeypatch.setattr(module, "ENGINES", ("test_engines.py",))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # most of the time of its processes
    return module


@pytest.mark.parametrize(
    ("failures", "status", "said"),
    [((0, 0), 0, ""), ((0, 1), 0, "flaky"), ((1, 1), 0, "flaky"), ((2, 1), 1, "failed twice")],
)
def test_halves_with_vllm_run_at_the_same_time_and_what_failed_runs_once_more(
    pytester: pytest.Pytester, module, capfd, failures, status, said
):
    names = ("clusters", "engines")
    for name, other, count in zip(names, reversed(names), failures, strict=True):
        text = HALF.format(name=name, other=other, failures=count)
        (pytester.path / f"test_{name}.py").write_text(text)
    assert module.main(["vllm", "-q"]) == status
    printed = capfd.readouterr().out
    assert said in printed
    assert printed.count("1 passed") >= 2 - sum(map(bool, failures))
    assert ("once more" in printed) == bool(said)


ALL = """
import pathlib, pytest, time

RAN = pathlib.Path(__file__).parent / "ran"

@pytest.mark.vllm
def test_with():
    time.sleep(0.2)
    with RAN.open("a") as file:
        file.write("v")
    assert RAN.read_text().count("v") > 1

def test_without():
    with RAN.open("a") as file:
        file.write("h")
"""


def test_vllm_runs_beside_the_first_part_and_has_ended_before_the_second(
    pytester: pytest.Pytester, module, monkeypatch, capfd
):
    for name in ("clusters", "engines"):
        (pytester.path / f"test_{name}.py").write_text(ALL)
    monkeypatch.setattr(module, "MAKE_VLLM", ("true",))
    begun = threading.Event()

    def together(arguments, cache):
        status = module.part("together", *arguments, "test_clusters.py")
        begun.set()
        return status

    def halves(arguments, cache):
        assert begun.wait(20.0), "they do not run beside the first part"
        return all_halves(arguments, cache)

    all_halves = module.halves
    monkeypatch.setattr(module, "run_together", together)
    monkeypatch.setattr(module, "halves", halves)
    monkeypatch.setattr(module, "files_alone", lambda arguments: ["test_clusters.py"])
    assert module.main(["all", "-q"]) == 0
    assert (pytester.path / "ran").read_text() == "hvvh" + "v"  # which had failed
    assert "flaky" in capfd.readouterr().out


def test_an_environment_of_vllm_that_cannot_be_made_is_no_failed_test(module, monkeypatch, capfd):
    monkeypatch.setattr(module, "MAKE_VLLM", ("sh", "-c", "echo no network; false"))
    monkeypatch.setattr(module, "part", lambda *arguments: 1)
    monkeypatch.setattr(module, "failed_tests", lambda cache: ["one"])
    assert module.verdict_of(module.run_all([], Path("none"))) == [1, module.BROKEN, 1]
    assert module.main(["all"]) == 1
    printed = capfd.readouterr().out
    assert "no network" in printed
    assert "once more" not in printed


ONE = """
import pathlib, pytest, time

@pytest.mark.vllm
def test_it():
    with (pathlib.Path(__file__).parent / "ran").open("a") as file:
        file.write("{name} ")
    {body}
"""


def write_halves(folder: Path, **bodies: str) -> None:
    for name, body in bodies.items():
        (folder / f"test_{name}.py").write_text(ONE.format(name=name, body=body))


def test_a_first_failure_ends_the_halves_that_run_beside(
    pytester: pytest.Pytester, module, monkeypatch
):
    """The second half is not begun, and the first one does not go on for a minute."""
    write_halves(pytester.path, clusters="time.sleep(60)", engines="pass")
    monkeypatch.setattr(module, "MAKE_VLLM", ("true",))
    ran = pytester.path / "ran"

    def together(arguments, cache):
        end = time.monotonic() + 20
        while not ran.exists():
            assert time.monotonic() < end, "no half runs"
            time.sleep(0.01)
        return module.FAILED

    monkeypatch.setattr(module, "run_together", together)
    begun = time.monotonic()
    assert module.main(["all", "-q", "-x"]) == module.FAILED
    assert time.monotonic() - begun < 50.0
    assert ran.read_text() == "clusters "


def test_a_first_failure_with_vllm_is_the_end_of_all(
    pytester: pytest.Pytester, module, monkeypatch
):
    write_halves(pytester.path, clusters="assert False", engines="pass")
    monkeypatch.setattr(module, "MAKE_VLLM", ("true",))
    monkeypatch.setattr(module, "part", lambda *arguments: 0)
    assert module.main(["all", "-q", "-x"]) == module.FAILED
    assert (pytester.path / "ran").read_text() == "clusters "


def test_after_an_interrupt_no_half_begins(module, monkeypatch):
    interrupted, begun = threading.Event(), []
    all_halves = module.halves

    def halves(arguments, cache):
        assert interrupted.wait(20.0)
        return all_halves(arguments, cache)

    def together(arguments, cache):
        threading.Timer(0.1, interrupted.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(module.QuietHalves, "_make", lambda self: 0)
    monkeypatch.setattr(module, "halves", halves)
    monkeypatch.setattr(module, "run_together", together)
    monkeypatch.setattr(module, "start_vllm", lambda *arguments, output: begun.append(arguments))
    with pytest.raises(KeyboardInterrupt):
        module.main(["all", "-q"])
    assert not begun


def test_a_second_try_that_is_killed_is_a_failure(module, monkeypatch, tmp_path):
    class Killed:
        def wait(self) -> int:
            return -9

    monkeypatch.setattr(module, "failed_tests", lambda cache: ["one"])
    monkeypatch.setattr(module, "part", lambda *arguments: 0)
    monkeypatch.setattr(module, "start_vllm", lambda *arguments: Killed())
    assert module.run_again(tmp_path, ["-q"]) == -9


def test_a_condition_on_marks_holds_beside_that_of_the_part():
    assert script().marked("vllm", ["-q"]) == ["-m", "vllm", "-q"]
    found = script().marked("not vllm", ["-m", "not slow", "-x"])
    assert found == ["-m", "(not vllm) and (not slow)", "-x"]


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        (["-q"], [*script().CLUSTERS, *script().ENGINES]),
        (["-k", "bench"], [*script().CLUSTERS, *script().ENGINES]),
        (["tests/planner"], []),
        (["tests/e2e"], ["tests/e2e/vllm"]),
        (["tests/e2e/vllm/test_tiers.py::test_it"], ["tests/e2e/vllm/test_tiers.py::test_it"]),
        (["tests/contracts", "tests/e2e/vllm"], ["tests/e2e/vllm", "tests/contracts"]),
    ],
)
def test_of_vllms_tests_those_run_that_are_named(arguments, chosen):
    commands = script().halves(arguments, Path("cache"))
    found = [each for half in commands for each in half[half.index("-o") + 2 :]]
    assert found == chosen
    assert all("bench" in half for half in commands if "-k" in arguments)


def test_where_no_named_test_is_vllms_its_environment_is_not_made(module, monkeypatch):
    monkeypatch.setattr(module, "MAKE_VLLM", ("false",))
    monkeypatch.setattr(module, "part", lambda *arguments: 0)
    assert module.main(["all", str(Path(__file__))]) == 0
    assert module.main(["vllm", str(Path(__file__))]) == module.NONE_CHOSEN
