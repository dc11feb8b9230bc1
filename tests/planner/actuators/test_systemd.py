"""Units of a real systemd: started once, read, stopped, killed after their grace."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ActuatorDenied, ActuatorExhausted, ActuatorTransient, ConfigError
from pdserve.planner.actuators import read_actuator
from pdserve.planner.actuators.settings import CommandKind, Home
from pdserve.planner.actuators.systemd import (
    Systemd,
    SystemdConfig,
    WorkerUnit,
    parse_units,
    unit_instance,
)
from pdserve.testing.actuators.suite import ActuatorSuite
from tests.planner.actuators.workers import (
    COUNTS,
    DEAF,
    FAILS,
    POLITE,
    kill_worker,
    until,
    workers_of,
    write_program,
)
from tests.support import systemd as real

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from pdserve.planner.actuators.base import Actuator

SHOWN = """\
Result=success
ExecMainStatus=0
Id=pdserve-w-a-1.service
Description=pdserve my cluster gpu
ActiveState=active
SubState=running
StateChangeTimestampMonotonic=12000000

Id=pdserve-k-1795792000500-a-1.timer
Description=/usr/bin/systemctl kill
ActiveState=active
SubState=waiting

Id=pdserve-k-1795792009000-a-1.timer
ActiveState=active

Id=pdserve-w-b.service
Description=pdserve other gpu
ActiveState=active
"""


def test_units_of_this_cluster_only() -> None:
    (unit,) = parse_units(SHOWN, "my cluster")
    assert unit == WorkerUnit("a-1", "gpu", "active", "running", "success", "0", 12.0, 1795792000.5)


@pytest.mark.parametrize(
    ("active", "sub", "result", "asked", "state"),
    [
        ("activating", "start", "success", False, "booting"),
        ("active", "running", "success", False, "booting"),
        ("active", "running", "success", True, "ending"),
        ("deactivating", "stop-sigterm", "success", False, "ending"),
        ("active", "exited", "success", False, "ended"),
        ("failed", "failed", "exit-code", False, "failed"),
        ("failed", "failed", "oom-kill", False, "failed"),
        ("failed", "failed", "signal", True, "ended"),
    ],
)
def test_states_of_the_port(active: str, sub: str, result: str, asked: bool, state: str) -> None:
    unit = WorkerUnit("a", "k", active, sub, result, "9", 0.0)
    found = unit_instance(unit, asked=asked)
    assert found.state == state
    assert (found.reason == f"{result}, status 9: see journalctl") is (state == "failed")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"usr": True}, "'usr' is unknown; did you mean 'user'"),
        ({"kinds": {"a": {"flags": ["--unit=x"]}}}, "leave --unit out"),
        ({"worker": ["--mode=both"]}, "leave --mode out"),
    ],
)
def test_tables_that_cannot_be(more: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_actuator({"type": "systemd", "kinds": {"gpu": {}}} | more, "f")


async def test_a_manager_that_does_not_answer_says_nothing_of_units(tmp_path: Path) -> None:
    fake = tmp_path / "systemctl"
    fake.write_text("#!/bin/sh\necho 'Failed to connect to bus: No such file' >&2\nexit 1\n")
    fake.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    units = Systemd(SystemdConfig(kinds={"k": CommandKind()}), Home("c"), environ=environ)
    with pytest.raises(ActuatorTransient, match="systemctl: Failed to connect to bus"):
        await units.list()


# ---------------------------------------------------------------------- for real


@pytest.fixture(scope="module")
def systemd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[real.Systemd]:
    if (why := real.why_not()) is not None:
        pytest.skip(why)
    with real.Systemd(tmp_path_factory.mktemp("systemd")) as systemd:
        yield systemd


@pytest.fixture
def make(systemd: real.Systemd, tmp_path: Path) -> Callable[[], Systemd]:
    """Makes actuators of one cluster."""
    kinds = {"cpu": CommandKind(flags=("--setenv=SLOT=7",)), "few": CommandKind(slots=1)}
    config = SystemdConfig(kinds=kinds, program=write_program(tmp_path, POLITE), worker=("--x",))
    return lambda: Systemd(config, Home(tmp_path.name, ("--join=a:1",)), environ=systemd.environ)


class SystemdLab:
    """Units of one systemd."""

    kind = "cpu"
    up = "booting"
    deadline = 1.5
    patience = 30.0
    pause = 0.05
    cannot: Mapping[str, str] = {"deny": "process 1 refuses nothing to root"}

    def __init__(self, systemd: real.Systemd, folder: Path) -> None:
        self.systemd, self.folder = systemd, folder
        self._config = SystemdConfig(
            kinds={self.kind: CommandKind(slots=2)}, program=write_program(folder, POLITE)
        )
        self.actuator: Actuator = self.open()

    def open(self) -> Systemd:
        environ = self.systemd.environ
        return Systemd(self._config, Home("lab"), environ=environ, deadline=self.deadline)

    async def reopen(self) -> Actuator:
        return self.open()

    async def processes(self, change: str) -> int:
        return len(workers_of(self.folder, change))

    async def die(self, change: str) -> None:
        await kill_worker(self.folder, change)

    async def never_ready(self) -> None:
        """systemd does not know when a worker is ready: `booting` is the most that it says."""

    async def start_fails(self) -> None:
        write_program(self.folder, FAILS)

    async def deny(self) -> None:
        raise NotImplementedError

    async def silence(self) -> None:
        self.systemd.signal_first(signal.SIGSTOP)


@pytest.mark.long(one_in=3)
class TestSystemd(ActuatorSuite):
    @pytest.fixture
    def lab(self, tmp_path: Path) -> Iterator[SystemdLab]:
        """With a systemd of its own: units of the same names would meet there."""
        if (why := real.why_not()) is not None:
            pytest.skip(why)
        (tmp_path / "first").mkdir()
        with real.Systemd(tmp_path / "first") as systemd:
            yield SystemdLab(systemd, tmp_path)


async def test_a_unit_per_change_and_every_planner_finds_it(make, systemd) -> None:
    units = make()
    several = await asyncio.gather(*(make().start("cpu", "decode", "a-1.x") for _ in range(3)))
    assert {one.ref for one in several} == {"pdserve-w-a-1.x.service"}
    assert (await until(units, "a-1.x", "booting")).kind == "cpu"
    shown = systemd.run("systemctl", "show", "-pExecStart,Environment", "pdserve-w-a-1.x").stdout
    assert "--join=a:1 --x --role=worker --mode=decode --change=a-1.x" in shown
    assert "SLOT=7" in shown
    restarted = make()
    assert (await restarted.start("cpu", "decode", "a-1.x")).state == "booting"
    assert [one.change for one in await restarted.list()] == ["a-1.x"]
    await asyncio.sleep(0.3)  # the shell sets its trap
    await restarted.stop("a-1.x", 30.0)
    assert (await until(make(), "a-1.x", "ended")).reason == ""
    assert (await make().start("cpu", "decode", "a-1.x")).state == "ended"


async def test_a_worker_that_does_not_end_is_killed_after_its_grace(make, tmp_path) -> None:
    write_program(tmp_path, DEAF)
    units = make()
    await units.start("cpu", "decode", "b")
    await until(units, "b", "booting")
    await asyncio.sleep(0.3)
    await units.stop("b", 100.0)
    assert (await until(make(), "b", "ending")).ref
    restarted = make()
    await restarted.stop("b", 200.0)
    assert (await until(units, "b", "ending")).ref
    await restarted.stop("b", 0.5)
    assert (await until(restarted, "b", "ended")).reason == ""


async def test_a_planner_that_dies_before_its_timer_has_not_ended_the_worker(
    make, tmp_path, monkeypatch
) -> None:
    """Its successor tells the worker again, and a second SIGTERM would end it undrained."""
    write_program(tmp_path, COUNTS)
    units = make()
    await units.start("cpu", "decode", "t")
    await until(units, "t", "booting")
    while not workers_of(tmp_path, "t"):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)  # the shell sets its trap
    monkeypatch.setattr(units, "_kill_later", died)
    with pytest.raises(ActuatorTransient):
        await units.stop("t", 30.0)
    await make().stop("t", 30.0)
    await asyncio.sleep(0.5)
    assert len(workers_of(tmp_path, "t")) == 1
    assert (await until(make(), "t", "ending")).ref
    await make().stop("t", 0.0)
    await until(make(), "t", "ended")


async def died(*arguments: object) -> None:
    raise ActuatorTransient("the planner died here")


async def test_a_worker_that_fails_has_its_status(make, tmp_path) -> None:
    write_program(tmp_path, FAILS)
    units = make()
    await units.start("cpu", "decode", "c")
    failed = await until(units, "c", "failed")
    assert failed.reason == "exit-code, status 2: see journalctl"


async def test_a_unit_that_somebody_kills_has_failed(make, systemd) -> None:
    units = make()
    await units.start("cpu", "decode", "d")
    await until(units, "d", "booting")
    systemd.run("systemctl", "kill", "--signal=KILL", "pdserve-w-d.service")
    assert (await until(units, "d", "failed")).reason.startswith("signal, status 9")


async def test_slots_kinds_and_what_is_not_there(make) -> None:
    units = make()
    await units.start("few", "decode", "e")
    with pytest.raises(ActuatorExhausted, match="1 units of kind few run already"):
        await units.start("few", "decode", "f")
    with pytest.raises(ActuatorDenied, match="did you mean 'few'"):
        await units.start("fex", "decode", "f")
    await units.stop("never", 1.0)
    await units.stop("e", 0.0)
    await until(units, "e", "ended")
