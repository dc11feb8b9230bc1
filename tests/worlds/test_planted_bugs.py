"""Each planted bug is caught by the simulated worlds, within a stated number of seeds."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pdserve.router.bookings import Bookings
from pdserve.router.config import RouterConfig
from tests.worlds.faults import Fault
from tests.worlds.load_clients import DEFAULT_PROFILE, LONG_PROMPTS, ClientProfile
from tests.worlds.migration_scenarios import LONG_ANSWERS
from tests.worlds.plans import one_after_another, plan
from tests.worlds.planted_bugs import BUGS, HANDOFF_BUGS, MIGRATION_BUGS, planted
from tests.worlds.run import WorldFailure, WorldPlan, run, run_plan

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

    from pdserve.messages.handoff import WorkerMode

SEEDS = 20
"""Most worlds until a bug is caught; nearly all are caught by the first. The seeds are always the
same, since the cost of finding a bug is a property of the suite."""


PATIENCE = 0.4
"""Factor of the usual timeouts, for a bug that keeps all nodes busy with each other; enough for a
world without a bug, as is tested."""


RESETS = [Fault("reset", 0.0, 0.0, f, w) for f in ("f0", "f1") for w in ("w0", "w1")]
CUT_OFF = [Fault("isolate", 0.0, 15.0, "f1")]
CRASH = [Fault("crash", 0.0, 0.01, "w1")]
FAULTS = {
    "a lost channel ends nothing": RESETS,
    "channel outlives its end": RESETS,
    "epoch not compared": CRASH,
    "Gone told twice": CRASH,
    "an index keeps dead workers": CRASH,
    "a dead engine's blocks stay": [Fault("engine", 0.0, 0.0, "w0")],
    "LinkDown dropped": [Fault("reset", 0.0, 0.0, "w0", "w1")],
    "failed dials not told": [Fault("cut", 0.0, 30.0, "w0", "w1")],
    "own death not heard": CUT_OFF,
    "card not told in a later life": CUT_OFF,
    "refutation not spoken": [Fault("pause", 0.0, 5.0, "w1")],
    "watermark not checked": [Fault("amnesia", 0.0, 0.0, "r0")],
    "suspicion is a quarter as long": [Fault("pause", 0.0, 2.9, "w1")],
    "an attempt stays open when its worker is lost": CRASH,
    "what a move says is lost": CRASH,
    "traces are kept beyond their rate": CRASH,
    "a router refuses at a quarter of its bound": [Fault("crowd", 0.0, 0.0, "f0", "", 8.0)] * 3,
}
"""What must go wrong for a bug to show; the others show in any world."""


HABITS = {
    "a block that one token is in is not copied": ClientProfile(
        lengths=(2, 10, 18), answers=(10, 40), choices=(2, 3)
    ),
}
"""What clients must ask for a bug to show: here prompts that end at the first token of a block."""


HANDOFF_FAULTS = {
    "the end of a path takes writes": [Fault("kv-late", 0.0, 5.0, "w2", "w0", 0.3)],
    "checksums are not compared": [Fault("kv-wrong", 0.0, 5.0, "w2", "w0", 0.3)],
    "the first checksum alone is compared": [Fault("kv-wrong", 0.0, 5.0, "w2", "w0", 0.3)],
    "paths to the dead stay": [Fault("crash", 0.0, 0.01, "w2")],
    "a lost attempt keeps its room": [Fault("engine", 0.0, 0.0, "w2")] * 3,
    "shared blocks of an attempt stay held": [Fault("engine", 0.0, 0.0, "w2")] * 3,
    "a lease never lapses": [Fault("cut", 0.0, 9.0, w, "w0") for w in ("w2", "w3")],
}
SLOW = {"leases are not renewed": 1_500.0}
"""Factors of a KV write's usual duration; 100 suffices for the others."""


def made_for_handoffs(name: str, seed: int) -> WorldPlan:
    """Long prompts are handed over, clients turn away meanwhile, and something may go wrong."""
    faults = one_after_another(*HANDOFF_FAULTS.get(name, []), begin=5.0, gap=1.5)
    end = max([12.0, *(fault.at + fault.lasts for fault in faults)])
    modes: dict[str, WorkerMode] = {
        "w0": "decode",
        "w1": "decode",
        "w2": "prefill",
        "w3": "prefill",
    }
    return plan(
        seed,
        faults,
        until=end,
        rate=3.0,
        modes=modes,
        habits=LONG_PROMPTS,
        kv_time=SLOW.get(name, 100.0),
    )


THREE = ("w0", "w1", "w2")
CRASHES = [Fault("crash", 0.0, 0.5, worker) for worker in THREE]
DRAINS = [Fault("drain", 0.0, 0.5, worker, "", 10.0) for worker in THREE]
MIGRATION_FAULTS = {
    "a worker that is left goes on": DRAINS,
    "a warm-up outlives its request": DRAINS,
    "hints to migrate a request are ignored": DRAINS[:1],
    "a draining worker asks nobody": DRAINS[:1],
    "a draining worker asks for one request of each channel": DRAINS[:1],
    "poison is not counted": [],
    "a failed step is a request's end": [Fault("step", 0.0, 1.0, "w0", "", 1.0)],
    "a deadline begins anew": DRAINS[:1],
    "a stalled core is not noticed": [Fault("stall", 0.0, 25.0, "w0")],
}
"""What must go wrong; for the others workers die."""
PACES = {
    "hints to migrate a request are ignored": 0.15,
    "a draining worker asks nobody": 0.15,
    "a draining worker asks for one request of each channel": 0.15,
    "a deadline begins anew": 0.15,
}
"""Seconds of a step: so slow that requests do not end before something happens."""


def made_for_migrations(name: str, seed: int) -> WorldPlan:
    """Long answers, and workers that do not last."""
    pace = PACES.get(name, 0.02)
    faults = one_after_another(*MIGRATION_FAULTS.get(name, CRASHES), begin=7.0, gap=1.5)
    habits = LONG_ANSWERS
    if pace > 0.02:
        hurried = 0.9 if "deadline" in name else 0.0
        habits = replace(
            habits, answers=(120,), hurried=hurried, deadlines=(4.0, 9.0), choices=(1,)
        )
    if "poison" in name:
        habits = replace(habits, poison=0.05)
    return plan(
        seed,
        faults,
        until=max([18.0, *(fault.at + fault.lasts for fault in faults)]),
        rate=2.0 if pace == 0.02 else 0.7,
        modes=dict.fromkeys(THREE, "aggregated"),
        habits=habits,
        kv_time=100.0 if "warm-up" in name else 1.0,
        pace=pace,
    )


def made_for(name: str, seed: int) -> WorldPlan:
    """A busy world in which the bug must show."""
    if name in MIGRATION_BUGS:
        return made_for_migrations(name, seed)
    if name in HANDOFF_BUGS:
        return made_for_handoffs(name, seed)
    faults = one_after_another(*FAULTS.get(name, []), begin=8.0, gap=0.5)
    end = max([12.0, *(fault.at + fault.lasts for fault in faults)])
    habits = HABITS.get(name, DEFAULT_PROFILE)
    made = plan(seed, faults, until=end, rate=6.0, patience=PATIENCE, habits=habits)
    if "quarter of its bound" in name:
        few = RouterConfig(policy="least_loaded", hold_limit=16)
        settings = {host: replace(one, router=few) for host, one in made.settings.items()}
        return replace(made, settings=settings)
    return made


DRAWN_FROM = {"booking never expires": 24}
"""Where the seeds of drawn worlds begin, for bugs that the first ones do not show."""


def worlds_until_caught(name: str) -> int:
    """First the world that was made for it, then drawn ones."""
    with planted(name):
        for number in range(SEEDS):
            try:
                if number < 2 or name in HANDOFF_BUGS or name in MIGRATION_BUGS:
                    run_plan(made_for(name, number))
                else:
                    run(number + DRAWN_FROM.get(name, 0))
            except WorldFailure:
                return number + 1
    raise AssertionError(f"{SEEDS} worlds did not notice: {name}")


SLOWEST = {
    "a router refuses at a quarter of its bound",
    "refutation not spoken",
    "booking never expires",
    "suspicion is a quarter as long",
    "a block that one token is in is not copied",
    "own death not heard",
    "card not told in a later life",
}
"""Several times what others take: their turn comes with fewer commits."""


def parameters() -> list[ParameterSet]:
    """Parameters of every bug that shows without handoffs; each commit takes a sixth of them."""
    often, rarely = pytest.mark.long(one_in=6), pytest.mark.long
    names = sorted(BUGS.keys() - HANDOFF_BUGS.keys() - MIGRATION_BUGS.keys())
    return [pytest.param(n, marks=rarely if n in SLOWEST else often) for n in names]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", parameters())
def test_a_planted_bug_is_caught(name: str) -> None:
    assert worlds_until_caught(name) <= SEEDS


PARTS = 3


def some_of_handoffs(seed: int, part: int, *, long: bool) -> list[str]:
    """One for each part, another with every commit; all in long mode."""
    names = list(HANDOFF_BUGS)
    mine = names[part::PARTS]
    return mine if long else [mine[seed % len(mine)]]


@pytest.mark.long(one_in=2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
def test_planted_bugs_of_handoffs_are_caught(seed: int, part: int, long: bool) -> None:
    for name in some_of_handoffs(seed, part, long=long):
        assert worlds_until_caught(name) <= SEEDS


@pytest.mark.long(one_in=3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
def test_worlds_of_handoffs_without_a_bug_pass(seed: int, part: int, long: bool) -> None:
    for name in some_of_handoffs(seed, part, long=long):
        run_plan(made_for(name, 0))


def some_of_migrations(seed: int, part: int, *, long: bool) -> list[str]:
    """One bug for each part, another with every commit; all in long mode."""
    mine = list(MIGRATION_BUGS)[part::PARTS]
    return mine if long else [mine[seed % len(mine)]]


@pytest.mark.long(one_in=2)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_planted_bugs_of_migrations_are_caught(seed: int, part: int, long: bool) -> None:
    for name in some_of_migrations(seed, part, long=long):
        assert worlds_until_caught(name) <= SEEDS


@pytest.mark.long(one_in=3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_worlds_of_migrations_without_a_bug_pass(seed: int, part: int, long: bool) -> None:
    for name in some_of_migrations(seed, part, long=long):
        run_plan(made_for(name, 0))


@pytest.mark.timeout(240)
def test_a_world_without_a_bug_passes_with_that_patience(seed: int, long: bool) -> None:
    """Two of them, others with every commit."""
    names = ["no faults", *FAULTS]
    for name in names if long else [names[(seed + i) % len(names)] for i in range(2)]:
        run_plan(made_for(name, 0))


def test_a_bug_is_gone_afterwards() -> None:
    before = vars(Bookings)["expire"]
    with planted("booking never expires"):
        assert vars(Bookings)["expire"] is not before
    assert vars(Bookings)["expire"] is before


def test_there_are_enough_of_them() -> None:
    assert len(BUGS) >= 15
    assert all(bug.why for bug in BUGS.values())
