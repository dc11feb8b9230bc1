"""A decode worker knows the network's rate before its first long prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pdserve.ids import NodeId, NodeLife
from pdserve.messages.engine import PathState
from pdserve.worker.disagg.first_guess import PATHS, FirstGuess, measured_token, rate_of
from pdserve.worker.disagg.policy import DisaggPolicy

if TYPE_CHECKING:
    from pdserve.engine.port import Engine
    from pdserve.net.timers import Timers

LIVES = [NodeLife(NodeId(f"p{n}"), 1) for n in range(8)]


class Clock:
    """Timers that a test advances."""

    def __init__(self) -> None:
        self.time = 0.0
        self.due: dict[float, Any] = {}

    def now(self) -> float:
        return self.time

    def call_at(self, due: float, call):
        timer = SimpleNamespace(due=due, call=call, gone=False)
        timer.cancel = lambda: setattr(timer, "gone", True)
        self.due[due] = timer
        return timer

    def run(self, seconds: float) -> int:
        """Returns how many timers have fired."""
        end, fired = self.time + seconds, 0
        while due := min((d for d in self.due if d <= end), default=0.0):
            timer = self.due.pop(due)
            if not timer.gone:
                self.time, fired = due, fired + 1
                timer.call()
        self.time = end
        return fired


class World:
    def __init__(self, mode="predict", lives=LIVES, own="d0", ready=True) -> None:
        self.lives: list[NodeLife] = list(lives)
        self.made: list[NodeLife] = []
        self.states: list[PathState] = []
        self.capabilities: Any = None
        if ready:
            self.load()
        self.clock = Clock()
        self.chooser = DisaggPolicy(mode)
        clock, engine = cast("Timers", self.clock), cast("Engine", self)
        self.guess = FirstGuess(NodeId(own), clock, engine, self.chooser, lambda: self.lives)

    def load(self) -> None:
        self.capabilities = SimpleNamespace(
            transfers=("tcp",), block_bytes=16 * 131_072, block_size=16
        )

    def make_path(self, node, epoch) -> None:
        self.made.append(NodeLife(node, epoch))

    def paths(self):
        return self.states

    def measured(self, rate: float, **fields) -> None:
        for life in self.made:
            self.states.append(path(life, measured=rate, **fields))

    @property
    def slope(self) -> float:
        return self.chooser.learnt.transfer.slope


def path(life: NodeLife, **fields) -> PathState:
    return PathState(node=life.node, epoch=life.epoch, backend="tcp", **fields)


def test_a_few_paths_are_made_and_their_rate_is_the_first_guess() -> None:
    world = World()
    assert len(set(world.made)) == len(world.made) == PATHS
    world.measured(1.25e9)
    world.clock.run(0.2)
    assert world.slope == pytest.approx(131_072 / 1.25e9)
    assert len(world.made) == PATHS


def test_workers_do_not_all_take_the_same_few() -> None:
    taken = {life for n in range(20) for life in World(own=f"d{n}").made}
    assert len(taken) > PATHS + 2


def test_other_modes_need_no_guess() -> None:
    for mode in ("rule", "always", "never"):
        world = World(mode)
        world.clock.run(5.0)
        assert world.made == []


def test_an_engine_that_is_ready_late_is_found() -> None:
    world = World(ready=False)
    world.clock.run(20.0)
    assert world.made == []
    world.load()
    world.clock.run(1.1)
    assert len(world.made) == PATHS


def test_prefill_workers_that_come_later_are_found() -> None:
    world = World(lives=[])
    world.clock.run(20.0)
    world.lives = LIVES[:1]
    world.guess.wake()
    world.clock.run(0.2)
    assert world.made == LIVES[:1]


def test_one_that_has_gone_is_replaced() -> None:
    world = World()
    world.measured(1e9)
    gone = world.made[0]
    world.lives.remove(gone)
    world.guess.wake()
    world.clock.run(2.0)
    assert len(world.made) == PATHS + 1
    assert world.made[-1] != gone


def test_what_was_learnt_is_never_overwritten_and_looking_ends() -> None:
    world = World()
    world.chooser.learnt.remote(1000, 0, 1000, prefill=0.1, whole=0.2)
    slope = world.slope
    world.measured(1e6)
    world.clock.run(5.0)
    assert world.slope == slope
    assert world.clock.run(60.0) == 0


def test_the_device_is_believed_where_nothing_was_measured() -> None:
    states = [
        path(LIVES[0], measured=2e9, expected=9e9),
        path(LIVES[1], expected=4e9),
        path(LIVES[2], measured=5e9),
        path(LIVES[3], measured=1e3, down="it is gone"),
        path(LIVES[4], measured=1e3),
        path(LIVES[5]),
    ]
    wanted = [LIVES[n] for n in (0, 1, 2, 3, 5)]
    assert rate_of(states, wanted) == 4e9
    assert rate_of(states, LIVES[5:6]) == 0.0


def test_what_paths_move_is_told_once_one_is_measured() -> None:
    world = World()
    engine = cast("Engine", world)
    world.states = [path(LIVES[0], expected=9e9), path(LIVES[1], measured=1e3, down="it is gone")]
    assert measured_token(engine) == 0.0
    for number, rate in enumerate((2e9, 1e9, 4e9), 2):
        world.states.append(path(LIVES[number], measured=rate))
    assert measured_token(engine) == 131_072 / 2e9
    world.capabilities = None
    assert measured_token(engine) == 0.0
