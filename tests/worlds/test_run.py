"""Whole worlds: a rotating slice of seeds, every fault on purpose, and the same run twice.

A failure names the one command that replays it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.tracing.rules import TraceRules
from tests.engine_core.tiers.test_planted_bugs import planted as planted_in_tiers
from tests.worlds.batch import BatchResult, run_blocks, total
from tests.worlds.faults import KINDS, TIER_KINDS, Fault
from tests.worlds.handoff_scenarios import draw_handoffs
from tests.worlds.migration_scenarios import draw_migrations
from tests.worlds.oracle.coverage import Cells, count_visits
from tests.worlds.oracle.outcomes import completed_of
from tests.worlds.oracle.tier_coverage import TIER_ON_PURPOSE
from tests.worlds.plans import everything, handed_over, plan, with_tiers
from tests.worlds.planted_bugs import planted
from tests.worlds.run import WorldFailure, draw_plan, run, run_plan
from tests.worlds.tier_scenarios import draw_tiers

if TYPE_CHECKING:
    from pathlib import Path

PARTS = 4
"""Worlds of the short slice of each kind; of handoffs and migrations half of them in turns."""
TURNS = [0, 1, *(pytest.param(part, marks=pytest.mark.long(one_in=3)) for part in (2, 3))]
LOADED = 4.0
"""Seconds after which no request is refused in a world without faults."""
LONG_SEEDS = 2_000
"""Three of five are worlds of handoffs, of migrations or of tiers."""


@pytest.mark.timeout(240)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_slice_of_seeds(seed: int, part: int) -> None:
    run(seed % 10**9 + part)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("part", TURNS)
def test_a_slice_of_handoffs(seed: int, part: int) -> None:
    run_plan(draw_handoffs(seed % 10**9 + part))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("part", TURNS)
def test_a_slice_of_migrations(seed: int, part: int) -> None:
    run_plan(draw_migrations(seed % 10**9 + part))


@pytest.mark.timeout(240)
def test_a_slice_of_tiers(seed: int, long: bool) -> None:
    for number in range(40 if long else 2):
        run_plan(draw_tiers(seed % 10**9 + number))


@pytest.mark.long(one_in=3)
@pytest.mark.timeout(300)
def test_fifty_nodes(seed: int) -> None:
    assert len(run(seed % 10**9, nodes=50).plan.roles) == 50


@pytest.mark.timeout(4 * 3600)
def test_many_seeds_visit_everything(seed: int, long: bool) -> None:
    if not long:
        pytest.skip("an hour: PDSERVE_TEST_LONG=1; in parts by python -m tests.worlds --seeds")
    given = os.environ.get("PDSERVE_SIM_SEEDS", f"{seed % 10**9}:{LONG_SEEDS}")
    first, count = map(int, given.split(":"))
    whole = total(run_blocks(first, first + count, None))
    assert not whole.failures, "\n".join(whole.failures)
    assert not whole.too_few
    if count >= LONG_SEEDS:
        assert whole.missing == []


def test_blocks_are_taken_up_where_they_ended(tmp_path: Path, seed: int) -> None:
    file, first = tmp_path / "worlds.json", 5 * (seed % 10**6)
    once = run_blocks(first, first + 2, file)
    again = run_blocks(first, first + 2, file)
    assert once == again, "nothing was run twice"
    assert total(again).count == 2
    assert total(again).outcomes == once[0].outcomes


# ---------------------------------------------------------------------- on purpose


@pytest.mark.long(one_in=5)
@pytest.mark.timeout(240)
def test_every_fault_is_felt_where_it_is_made_on_purpose(seed: int) -> None:
    cells: Cells = Counter()
    with count_visits(cells):
        report = everything(seed % 10**9)
    assert report.effects == report.faults
    assert set(report.effects) == set(KINDS)
    for cell in (
        ("member -", "ALIVE"),
        ("member ALIVE", "SUSPECT"),
        ("member SUSPECT", "ALIVE"),
        ("member SUSPECT", "DEAD"),
        ("member ALIVE", "LEFT"),
        ("member LEFT", "later ALIVE"),
        ("member DEAD", "later ALIVE"),
        ("life", "NEW JOINING"),
        ("life", "JOINING UP"),
        ("life", "UP OUT"),
        ("life", "UP LEAVING"),
        ("life", "LEAVING OUT"),
        ("booking placed", "held"),
        ("booking seen", "reported"),
        ("booking counted", "RELEASED"),
        ("booking peer's placed", "held"),
    ):
        assert cells[cell], cell
    assert report.outcomes["completed"]
    assert report.events["own-rejoin"], "who was cut off for long has restarted"


@pytest.mark.long(one_in=2)
@pytest.mark.timeout(240)
def test_handoffs_take_every_usual_turn(seed: int) -> None:
    cells: Cells = Counter()
    with count_visits(cells):
        report = handed_over(seed % 10**9)
    assert report.effects == report.faults
    for cell in (
        ("decode worker admit", "admitted"),
        ("decode worker queue", "claim"),
        ("decode worker attempt", "opened"),
        ("decode worker verify", "renew"),
        ("decode worker fill", "notify"),
        ("decode worker verify", "died"),
        ("decode worker verify", "first token"),
        ("decode worker active", "done"),
        ("prefill worker claimed", "linked"),
        ("prefill worker opening", "opened"),
        ("prefill worker computing", "prefilled"),
        ("prefill worker notifying", "taken"),
        ("prefill worker notified", "sent"),
    ):
        assert cells[cell], cell


@pytest.mark.long(one_in=3)
@pytest.mark.timeout(240)
def test_tiers_and_fetches_are_used_whatever_goes_wrong(seed: int) -> None:
    cells: Cells = Counter()
    with count_visits(cells):
        report = with_tiers(seed % 10**9)
    for cell in (
        ("residency free", "reserve"),
        ("residency filling", "commit"),
        ("residency valid", "claim"),
        ("residency valid", "touch"),
        ("residency valid", "shadow"),
        ("residency valid", "evict"),
        ("residency claimed", "release"),
        ("quarantine", "fenced"),
        ("job copy out", "ok"),
        ("job copy in", "ok"),
        ("job read", "ok"),
        ("job write", "ok"),
        ("job write", "failed"),
        ("bring up", "whole"),
        ("pull", "whole"),
        ("serve", "whole"),
    ):
        assert cells[cell], cell
    assert TIER_ON_PURPOSE & cells.keys(), "no read that failed was waited for"
    assert report.effects == report.faults
    assert set(TIER_KINDS) <= set(report.effects)
    assert {name for name, count in report.tiers.items() if count} == {
        *("host stored", "host hits", "disk stored", "disk hits"),
        *("fetched", "fetches failed"),
    }


@pytest.mark.long(one_in=3)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["failed_reads_are_valid", "a_full_disk_keeps_the_frames_claimed"])
def test_a_cluster_notices_bugs_of_tiers(seed: int, name: str) -> None:
    def some_worlds() -> None:
        for number in range(3):
            with_tiers(seed % 10**9 + number)

    with planted_in_tiers(name), pytest.raises(WorldFailure):
        some_worlds()


def test_nothing_goes_wrong_without_faults(seed: int) -> None:
    report = run_plan(plan(seed % 10**9, [], until=15.0))
    assert report.faults == {}
    # A client's own deadline is no fault of ours, nor is its turning away.
    asked, gone = report.events["ask"], sum(report.cancelled.values())
    assert report.outcomes["completed"] >= 0.8 * (asked - gone)
    ours = {k for k in report.outcomes if k.startswith("failed")}
    assert ours <= {"failed DeadlineExceeded"}
    refused = {k for k in report.outcomes if k.startswith("refused")}
    assert refused <= {"refused NoRouter", "refused NoWorker", "refused NotReady"}
    late = [line for line in report.lines if " refused " in line and seconds(line) > LOADED]
    assert not late, "every worker has loaded by then, and everybody has heard of it"


def seconds(line: str) -> float:
    """The seconds of a line of the trace."""
    return float(line.split()[0])


def test_a_world_in_which_few_complete_fails() -> None:
    """Before the first worker has loaded some are refused."""
    with pytest.raises(WorldFailure, match=r"of [0-9]+ requests completed, less than 100%"):
        run_plan(replace(plan(5, [], until=8.0), least=1.0))


def test_shares_leave_out_what_clients_ended() -> None:
    outcomes = Counter({"completed": 6, "cancelled": 3, "cancelled early": 1, "failed NoWorker": 1})
    outcomes += Counter({"refused Overloaded": 2, "failed Poisoned": 4, "taken for poison": 1})
    outcomes += Counter({"connection lost with its frontend": 5, "failed DeadlineExceeded": 1})
    assert completed_of(outcomes) == (6, 10)
    assert BatchResult(0, 20, outcomes={"completed": 4, "refused NoWorker": 6}).too_few == ""
    few = BatchResult(0, 20, outcomes={"completed": 3, "refused NoWorker": 7})
    assert few.too_few == "3 of 10 requests completed, less than 40%"
    assert BatchResult(0, 19, outcomes=few.outcomes).too_few == "", "too few worlds to tell"


def test_every_request_has_one_outcome() -> None:
    report = run_plan(plan(6, [Fault("crash", 5.0, 1.0, "f1")], until=9.0))
    assert report.traces["pdserve.decode"]
    assert sum(report.outcomes.values()) == report.events["ask"]
    assert report.outcomes["connection lost with its frontend"]


# ---------------------------------------------------------------------- repeating


def test_a_plan_is_its_seeds(seed: int) -> None:
    assert draw_plan(seed) == draw_plan(seed)
    assert draw_plan(seed) != draw_plan(seed + 1)
    assert len(draw_plan(seed, nodes=9).roles) == 9


def replay(seed: int, **environment: str) -> str:
    """The command that a failure names, in a process of its own; returns the trace's digest."""
    command = [sys.executable, "-m", "tests.worlds", str(seed), "--nodes", "6", "--quiet"]
    done = subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.search(r"^trace +([0-9a-f]+),", done.stdout, re.MULTILINE)
    assert found, done.stdout + done.stderr
    return found[1]


@pytest.mark.parametrize(
    "environ",
    [{"PYTHONHASHSEED": "1"}, {"PYTHONHASHSEED": "2", "PDSERVE_PURE": "1"}],
    ids=["native", "pure"],
)
@pytest.mark.long(one_in=2)
def test_a_seed_is_one_run_in_every_process(seed: int, environ: dict[str, str]) -> None:
    number = seed % 10**9
    assert replay(number, **environ) == run(number, nodes=6).digest


def test_traces_change_nothing(seed: int, long: bool) -> None:
    """With all kept, with some and with none, a world goes the same way."""
    made, digests = plan(seed % 10**9, [Fault("crash", 5.0, 1.0, "w1")], until=8.0), set()
    if long:
        made = (draw_plan, draw_handoffs, draw_migrations)[seed % 3](seed % 10**9)
    for rules in (TraceRules(sample=1.0, rate=1e6), TraceRules(rate=0.0)):
        settings = {name: replace(one, traces=rules) for name, one in made.settings.items()}
        report = run_plan(replace(made, settings=settings))
        digests.add(report.digest)
        assert bool(report.traces) == bool(rules.rate)
    assert len(digests) == 1


def test_a_failure_names_the_command_that_replays_it() -> None:
    with planted("end of a booking not told"), pytest.raises(WorldFailure) as failure:
        run_plan(plan(5, [], until=12.0))
    assert "python -m tests.worlds 5" in str(failure.value)
    assert "until all is at rest: " in str(failure.value)
