"""Seeds repeat, differ between tests and runs, and the slices of the long suites cover them all."""

from __future__ import annotations

import pytest

from tests.support.seeds import LONG_LIMIT, SLICES, drawn, in_slice, is_in_slice, number_for

LONG = """
import pytest

@pytest.mark.parametrize("i", range(40))
@pytest.mark.long
def test_long(i):
    pass

def test_short(seed, long):
    print("SEED", seed, "LONG", long)
"""

MARKED = """
import pytest

def test_plain():
    pass

@pytest.mark.timeout(240)
def test_short():
    pass

@pytest.mark.timeout(7200)
def test_hours():
    pass

@pytest.mark.timeout(0)
def test_unlimited():
    pass

@pytest.fixture(autouse=True)
def told(request):
    mark = request.node.get_closest_marker("timeout")
    print("LIMIT", request.node.name, mark and mark.args[0])
"""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs LONG under the suite's conftest with the given environment."""
    pytester.makeini(
        "[pytest]\nasyncio_default_fixture_loop_scope = function\nmarkers = long: a suite\n"
    )
    pytester.makepyfile(test_it=LONG)

    def run_with(*args: str, seed: str = "7", long: str = "") -> pytest.RunResult:
        monkeypatch.setenv("PDSERVE_TEST_SEED", seed)
        monkeypatch.setenv("PDSERVE_TEST_LONG", long)
        return pytester.runpytest_inprocess("-s", "-p", "tests.conftest", *args)

    return run_with


def seed_line(result: pytest.RunResult) -> str:
    return next(line for line in result.outlines if "SEED" in line and "LONG" in line)


def test_a_run_takes_a_slice_and_repeats_it(run) -> None:
    first, again, other = run(), run(), run(seed="8")
    taken = first.parseoutcomes()["passed"]
    assert 1 < taken < 41
    assert first.parseoutcomes()["deselected"] == 41 - taken
    assert seed_line(first) == seed_line(again) != seed_line(other)
    first.stdout.fnmatch_lines(["pdserve: PDSERVE_TEST_SEED=7, 1 in *"])


def test_long_runs_take_everything(run) -> None:
    result = run(long="1")
    result.assert_outcomes(passed=41)
    assert seed_line(result).endswith("LONG True")


@pytest.mark.parametrize(
    ("long", "args", "limits"),
    [
        ("1", (), [LONG_LIMIT, LONG_LIMIT, 7200, 0]),
        ("1", ("--timeout=5",), [None, 240, 7200, 0]),
        ("", (), [None, 240, 7200, 0]),
    ],
)
def test_long_runs_give_each_test_more_time(
    pytester: pytest.Pytester, run, long: str, args: tuple[str, ...], limits: list[float | None]
) -> None:
    pytester.makepyfile(test_it=MARKED)
    result = run(*args, long=long)
    result.assert_outcomes(passed=4)
    names = ("plain", "short", "hours", "unlimited")
    lines = [f"*LIMIT test_{name} {limit}*" for name, limit in zip(names, limits, strict=True)]
    result.stdout.fnmatch_lines(lines)


def test_a_test_asked_for_by_name_is_run(run) -> None:
    run("test_it.py::test_long").assert_outcomes(passed=40)


def test_slices_cover_every_long_test() -> None:
    seeds = [f"{commit:08x}" for commit in range(60)]
    assert {number_for(seed) % SLICES for seed in seeds} == set(range(SLICES))
    for nodeid in map(str, range(50)):
        share = sum(in_slice(nodeid, seed) for seed in seeds) / len(seeds)
        assert 0 < share < 0.5


@pytest.mark.parametrize(("mark", "share"), [("long", 1 / SLICES), ("long(one_in=3)", 1 / 3)])
def test_a_mark_may_ask_for_more_turns(pytester: pytest.Pytester, mark: str, share: float) -> None:
    module = pytester.getmodulecol(f"import pytest\n@pytest.mark.{mark}\ndef test(): pass")
    (item,) = pytester.genitems([module])
    turns = sum(is_in_slice(item, str(seed)) for seed in range(600))
    assert abs(turns / 600 - share) < 0.05


def test_turns_do_not_meet(pytester: pytest.Pytester) -> None:
    lines = ["import pytest"]
    for number, mark in enumerate(("one_in=4, turn=0", "one_in=8, turn=1", "one_in=8, turn=4")):
        lines += [f"@pytest.mark.long({mark})", f"def test_{number}(): pass"]
    items = pytester.genitems([pytester.getmodulecol("\n".join(lines))])
    seen = {tuple(is_in_slice(item, str(seed)) for item in items) for seed in range(200)}
    rare = (True, False, True)  # the turns 0 of 4 and 4 of 8 are the same commits
    assert seen == {(False,) * 3, (True, False, False), (False, True, False), rare}


@pytest.mark.parametrize(("mark", "shares"), [("long(whole_file=True)", {0, 40}), ("long", None)])
def test_a_file_may_be_taken_or_left_as_a_whole(
    pytester: pytest.Pytester, mark: str, shares: set[int] | None
) -> None:
    lines = [f"pytestmark = pytest.mark.{mark}", "@pytest.mark.parametrize('n', range(40))"]
    module = pytester.getmodulecol("\n".join(["import pytest", *lines, "def test(n): pass"]))
    items = pytester.genitems([module])
    taken = {sum(is_in_slice(item, str(seed)) for item in items) for seed in range(60)}
    assert len(items) == 40
    assert taken == shares if shares else 0 < min(taken) <= max(taken) < 40


def test_a_draw_takes_all_values_in_turn_and_all_at_once_in_long_mode(monkeypatch) -> None:
    values, seen = [1, 3, 15, 16, 17, 100], set()
    for commit in range(40):
        monkeypatch.setenv("PDSERVE_TEST_SEED", str(commit))
        monkeypatch.setenv("PDSERVE_TEST_LONG", "0")
        found = drawn(values, 2, "chunk")
        assert found == drawn(values, 2, "chunk") == sorted(found)
        assert len(set(found)) == 2
        seen.update(found)
        monkeypatch.setenv("PDSERVE_TEST_LONG", "1")
        assert drawn(values, 2, "chunk") == values
    assert seen == set(values)
