"""What binds a plan is said in words, and is true: an oracle computes the figures again."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

import pdserve.planner
from pdserve.messages.planner import Change, ScalingPlan
from pdserve.planner import explain
from pdserve.planner.changes.book import Ended
from pdserve.planner.changes.table import ChangeState
from pdserve.planner.explain import Binding, ended_line, plan_line
from pdserve.planner.outlook import Load, PoolCandidate, Slot
from tests.planner.plant import Plant
from tests.planner.support import LinearJudge, config, pool
from tests.planner.test_plant import MEAN, World

ROOT = Path(inspect.getfile(pdserve.planner)).parent


def used() -> set[str]:
    """Names of bindings that the planner gives."""
    found = set()
    for path in ROOT.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "Binding" and call.args:
                found.add(ast.literal_eval(call.args[0]))
    return found


def test_every_binding_has_words_and_every_word_is_used():
    assert used() == {*explain._WORDS}


@pytest.mark.parametrize("name", sorted(explain._WORDS))
def test_words_need_only_figures(name):
    fields = re.findall(r"{(\w+)(:[^}]*)?}", explain._WORDS[name])
    figures = {field: 2.0 if form else "x" for field, form in fields}
    words = Binding(name, figures).words
    assert "{" not in words
    assert not words.endswith(".")


def test_a_plan_is_one_line_that_a_person_can_read():
    start = Change(id="x", action="start", kind="gpu", mode="decode")
    stop = Change(id="y", action="stop", node="w3")  # type: ignore[arg-type]
    plan = ScalingPlan(
        term=1,
        number=12,
        model="m",
        target={"prefill": 1, "decode": 3},
        binding="max is 4 workers, and there are 4",
        forecast={"0.9": 3.456},
        observed=2.5,
        miss_before=0.21,
        miss_after=0.034,
    )
    assert plan_line(plan, (start, stop), {"prefill": 1, "decode": 2}) == (
        "m #12: 3 decode+1 prefill (was 2 decode+1 prefill); start gpu as decode, stop w3; "
        "2.50 work/s, forecast 3.46; miss 21.0% -> 3.4%; max is 4 workers, and there are 4"
    )
    blind = ScalingPlan(term=1, number=1, model="m", blind="r1 is silent", binding="blind: r1")
    assert plan_line(blind, (), {}) == ("m #1: none; no change; blind: r1 is silent; blind: r1")
    same = replace(blind, binding="blind: r1 is silent")
    assert plan_line(same, (), {}) == "m #1: none; no change; blind: r1 is silent"


def test_a_change_that_ended_is_one_line():
    done = Change(id="x", action="mode", node="w1", mode="prefill")  # type: ignore[arg-type]
    ended = Ended(done, "m", ChangeState.DONE, 3.2)
    assert ended_line(ended) == "m: mode w1 as prefill after 3 s: done"


# ---------------------------------------------------------------------- the oracle


def recomputed(world: World, binding: Binding) -> bool:
    """True if the binding holds by the cluster as it is, without the planner's own books."""
    plant, target, figures = world.plant, world.settings.pools[0], binding.figures
    if binding.name in ("ttft", "miss"):
        outcome = judged(target, figures)
        value = outcome.wait_p95 if binding.name == "ttft" else outcome.miss
        return value > float(figures["limit"])
    if binding.name == "max":
        return figures["max"] == target.max == figures["workers"]
    if binding.name == "floor":
        serving = sum(plant.serving.values())
        return figures == {"floor": target.min, "workers": serving} and serving <= target.min + 1
    if binding.name == "budget":
        spare = world.settings.budget - plant.charged
        return float(figures["spare"]) <= spare + 1e-9 and spare < float(figures["price"])
    if binding.name in ("enough", "waiting"):
        return float(figures["value"]) <= 1.0
    return binding.name in explain._WORDS


def judged(target, figures):
    """The outcome with so many workers, by the judge itself: caches of fewer remember less."""
    workers = int(figures["workers"])
    slots = tuple(Slot("aggregated") for _ in range(workers))
    load = Load(float(figures["work"]), cached=workers / (workers + 1))
    (outcome,) = LinearJudge().judge(None, (target.ttft, None), load, [PoolCandidate(slots)])
    return outcome


@pytest.mark.parametrize("number", range(3))
def test_what_binds_is_true(seed, number):
    random = Random(seed + number)
    settings = config(pool(min=1 + number, max=6), budget=5.0 + 2 * number)
    world = World(settings, Plant(lambda now: random.uniform(0, 5), random, MEAN))
    names = set()
    for _ in range(300):
        world.plant.step()
        output = world.core.tick(world.plant.now, world.plant.seen())
        (binding,) = output.bindings.values()
        fresh = any(" #" in line for line in output.log)
        world.plant.obey(output)
        if fresh:
            names.add(binding.name)
            assert recomputed(world, binding), binding.words
        assert output.plans[0].binding == binding.words
    assert len(names) >= 4
