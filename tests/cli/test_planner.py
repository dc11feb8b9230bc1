from __future__ import annotations

from typing import Any

import pytest

from pdserve.cli.main import main
from pdserve.cli.planner import mix_of
from pdserve.cli.planner_tables import explained, overview_of, plan_rows
from pdserve.errors import ConfigError
from pdserve.ids import NodeId
from pdserve.launch import exit_codes
from pdserve.messages.planner import Change, Instance, PlannerReport, ScalingPlan
from pdserve.messages.planner_orders import PlannerAnswer, PlannerOrder, PlannerWish
from pdserve.messages.status import NodeReport
from tests.cli.test_status_tables import member, status

PLAN = ScalingPlan(
    term=7,
    number=3,
    model="m",
    target={"decode": 2, "prefill": 1},
    present={"decode": 1, "prefill": 1},
    changes=(
        Change(
            id="c-1", action="start", kind="gpu", mode="decode", state="booting", reason="8 % miss"
        ),
    ),
    binding="the budget of 3 leaves 0, and a worker costs 1",
    forecast={"0.5": 1.5, "0.9": 2.25},
    observed=1.25,
    miss_before=0.081,
    miss_after=0.012,
    cost=3.0,
)


def shown(report: PlannerReport, **fields: Any) -> str:
    planner = member("p1", "planner", NodeReport(planner=report, **fields))
    return overview_of(status(planner), [planner])


def test_a_plan_shows_what_there_is_what_is_done_and_what_binds():
    text = shown(PlannerReport(mode="act", owner=True, plans=(PLAN,), log=("m #3: more",)))
    for words in (
        "p1: acts",
        "m, plan 3",
        "1 decode + 1 prefill ready; wanted 2 decode + 1 prefill",
        "1.25 prefill seconds a second; forecast 1.50, at most 2.25 (p90)",
        "8.1% as it is, 1.2% by the plan",
        "start gpu as decode (booting): 8 %",
        "the budget of 3 leaves 0",
        "m #3: more",
    ):
        assert words in text


def test_workers_that_cannot_switch_are_named() -> None:
    nodes = tuple(NodeId(f"w{number}") for number in range(6))
    text = shown(PlannerReport(mode="act", plans=(PLAN,), fixed={"m": nodes}))
    assert "fixed     w0, w1, w2, w3 and 2 more: no mode switch" in text
    text = shown(PlannerReport(mode="act", plans=(PLAN,), fixed={"m": nodes[:2]}))
    assert "fixed     w0, w1: no mode switch" in text


def test_a_blind_planner_a_pause_a_pin_and_an_instance_that_waits():
    blind = ScalingPlan(term=1, number=1, model="m", blind="router r is silent", binding="blind")
    waits = Instance(change="c", kind="gpu", actuator="slurm", ref="17", reason="Priority")
    text = shown(
        PlannerReport(
            mode="act",
            plans=(blind,),
            instances=(waits,),
            paused={"": "eve until 10:00:00"},
            pins={"m": {"decode": 2}},
        ),
        degraded={"planner_blind": "m: for 61 s", "other": "no"},
    )
    for words in (
        "not known: router r is silent",
        "paused    by eve until 10:00:00",
        "pinned    to 2 decode",
        "slurm 17: gpu pending: Priority",
        "degraded (planner_blind): m: for 61 s",
    ):
        assert words in text
    assert "other" not in text


def test_without_planners_it_says_how_to_see_one():
    assert "--planner=advise" in overview_of(status(), [])


def test_a_plan_is_explained_in_full():
    text = explained(PlannerAnswer(plans=(PLAN,), log=("t m #3: more", "t n #3: other")))
    assert "plan 3 of term 7" in text
    assert "change c-1  start gpu as decode" in text
    assert "t m #3: more" in text
    assert "n #3" not in text


def test_what_holds_is_told_after_an_order():
    wish = PlannerWish(model="m", sort="pin", at=1.0, until=2.0, by="eve", mix={"decode": 2})
    order = PlannerOrder(verb="pin")
    row = plan_rows(order, PlannerAnswer(wishes=(wish,)))
    assert row.startswith("m: pinned to 2 decode until 19")
    assert row.endswith(", says eve")
    assert "nothing is paused" in plan_rows(order, PlannerAnswer())
    assert "gpu" in plan_rows(PlannerOrder(verb="enable", kind="gpu"), PlannerAnswer())


def test_workers_by_mode_are_read_with_hints():
    assert mix_of("prefill=2,decode=4") == {"prefill": 2, "decode": 4}
    for text, says in (
        ("prefil=2", "did you mean 'prefill'"),
        ("decode", "is not of the form"),
        ("decode=two", "not a whole number"),
        ("decode=1,decode=2", "names a mode twice"),
        (f"decode={2**64}", "must be between 0 and 10000"),
    ):
        with pytest.raises(ConfigError, match=says):
            mix_of(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["explian"], "did you mean 'explain'"),
        (["pin"], "needs a MODEL"),
        (["pin", "m"], "say which workers m is to have"),
        (["unpin", "m", "n"], "'n' is too much"),
        (["enable"], "needs a KIND"),
        (["check"], "needs FILE"),
        (["explain", "x"], "'x' is not a whole number"),
        (["explain", f"{2**63}"], "NUMBER: 9223372036854775808 is out of range"),
        (["pause", ""], "an argument of pdserve planner pause is empty"),
        (["pause", "--for", "soon"], "--for: 'soon' is not a duration"),
        (["pause", "--for", "0s"], "--for: '0s' must be more than 0 and at most 365d"),
        (["pin", "m", "decode=1", "--for", "366d"], "'366d' must be more than 0 and at most 365d"),
    ],
)
def test_wrong_words_are_told_before_anyone_is_asked(arguments, says, capsys):
    assert main(["planner", *arguments]) == exit_codes.USAGE
    assert says in capsys.readouterr().err


def test_a_file_is_checked(tmp_path, capsys):
    path = tmp_path / "planner.toml"
    pool = '[planner]\n[[planner.pool]]\nmodel = "m"\nmax = 4\n'
    path.write_text(f'{pool}slo-ttft = "1s"\n')
    assert main(["planner", "check", str(path)]) == exit_codes.OK
    assert "fine: m (1 to 4); ways" in capsys.readouterr().out
    path.write_text(pool)
    assert main(["planner", "check", str(path)]) == exit_codes.OK
    assert "m (1 to 4, whatever the load: it has no objective); ways" in capsys.readouterr().out
    second = '[[planner.pool]]\nmodel = "n"\nkinds = ["a"]\n[planner.actuator]\ntype = "agents"\n'
    path.write_text(f'{pool}slo-ttft = "1s"\n{second}')
    assert main(["planner", "check", str(path)]) == exit_codes.OK
    said = capsys.readouterr().out
    assert "m (1 to 4; nothing is started for it: it names no kinds), n (1 to 64, what" in said
    path.write_text('[planner]\n[[planner.pool]]\nmodl = "m"\n')
    assert main(["planner", "check", str(path)]) == exit_codes.USAGE
    assert "line 3 (planner.pool 1): 'modl': unknown field" in capsys.readouterr().err
