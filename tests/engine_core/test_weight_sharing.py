"""A family: who shares with whom, who waits for whom, and what does not fit."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from pdserve.clock import SystemClock
from pdserve.engine_core.core import EngineCore
from pdserve.engine_core.weight_sharing import WeightSharingGroup
from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec, LoadProgress
from pdserve.testing.scripted import ENGINE, ScriptedExecutor

if TYPE_CHECKING:
    from collections.abc import Callable

CLOCK = SystemClock()


class SharingExecutor(ScriptedExecutor):
    """Knows from whom it comes."""

    owner: SharingExecutor | None = None

    def sibling(self) -> SharingExecutor:
        other = SharingExecutor()
        other.owner = self
        return other


def spec(factory: str = "SharingExecutor") -> EngineSpec:
    return EngineSpec(engine=f"{__name__}:{factory}", model="here", device="cpu", threads=1)


def unheard(progress: LoadProgress) -> None:
    raise AssertionError(f"nobody had to wait, but: {progress}")


def executor_of(family: WeightSharingGroup, wanted: EngineSpec) -> SharingExecutor:
    with family.turn(unheard):
        core = family.make_core(wanted, CLOCK)
    assert isinstance(core, EngineCore)
    executor = core._executor
    assert isinstance(executor, SharingExecutor)
    return executor


def test_the_first_loads_and_the_others_share_with_it():
    family = WeightSharingGroup()
    first = executor_of(family, spec())
    second = executor_of(family, replace(spec(), kv_memory=1, max_sequences=2, block_size=4))
    third = executor_of(family, spec())
    assert first.owner is None
    assert second.owner is first
    assert third.owner is first


@pytest.mark.parametrize("field", ["engine", "model", "device", "dtype", "threads"])
def test_cores_of_one_process_agree_on_what_the_weights_are(field: str):
    family = WeightSharingGroup()
    first = spec()
    executor_of(family, first)
    other = replace(first, **{field: 7 if field == "threads" else "other"})
    with pytest.raises(ConfigError, match=f"must agree on {field}: .* is loaded"):
        executor_of(family, other)
    assert executor_of(family, first).owner is not None  # as before


def test_what_failed_to_load_is_not_shared():
    family = WeightSharingGroup()

    def load() -> None:
        with family.turn(unheard):
            family.make_core(spec(), CLOCK)
            raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        load()
    assert executor_of(family, spec()).owner is None


def test_an_engine_that_cannot_share_loads_again_and_says_so(caplog: pytest.LogCaptureFixture):
    family = WeightSharingGroup()
    alone = replace(spec(), engine=ENGINE)
    with caplog.at_level(logging.WARNING, "pdserve.engine_core.weight_sharing"):
        with family.turn(unheard):
            family.make_core(alone, CLOCK)
        assert not caplog.messages
        with family.turn(unheard):
            family.make_core(alone, CLOCK)
    assert caplog.messages == [
        f"engine {ENGINE!r} cannot share weights: a further core loads its own"
    ]


@pytest.mark.parametrize("engine", ["sim", "instant"])
def test_engines_without_weights_are_not_complained_about(
    engine: str, caplog: pytest.LogCaptureFixture
):
    family = WeightSharingGroup()
    wanted = replace(spec(), engine=engine)
    cores = [family.make_core(wanted, CLOCK) for _ in range(2)]
    assert type(cores[0]) is type(cores[1])
    assert cores[0] is not cores[1]
    assert not caplog.messages


def test_one_loads_at_a_time_and_the_other_says_that_it_waits():
    family = WeightSharingGroup()
    order: list[str] = []
    waiting = threading.Event()

    def note(what: str) -> Callable[[LoadProgress], None]:
        def say(progress: LoadProgress) -> None:
            order.append(f"{what}: {progress.stage}")
            waiting.set()

        return say

    def second() -> None:
        with family.turn(note("second")):
            order.append("second loads")

    thread = threading.Thread(target=second)
    with family.turn(unheard):
        thread.start()
        assert waiting.wait(10)
        order.append("first has loaded")
    thread.join(10)
    assert order == [
        "second: waiting for another worker of this process to load",
        "first has loaded",
        "second loads",
    ]
