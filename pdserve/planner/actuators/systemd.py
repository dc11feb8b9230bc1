"""Starts each worker of this host as a transient unit of systemd.

The unit's name has the change id, so systemd itself refuses a second life. A stop leaves a timer
that kills the unit when the grace is over: it outlives this process. It does not know when a worker
has joined, and it does not start a worker again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from pdserve.errors import ActuatorDenied, ActuatorError, ActuatorExhausted, ActuatorTransient
from pdserve.messages.planner import Instance
from pdserve.planner.actuators.base import DEADLINE, KEEP_ENDED, check_order, within
from pdserve.planner.actuators.commands import run_command
from pdserve.planner.actuators.settings import (
    CommandKind,
    find_kind,
    kinds_of,
    read_kinds,
    refuse_flags,
    refuse_worker_flags,
    worker_command,
)
from pdserve.toml import read_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.ids import Seconds
    from pdserve.messages.planner import Kind
    from pdserve.planner.actuators.settings import Home

__all__ = ["Systemd", "SystemdConfig", "WorkerUnit", "parse_units", "read_config", "unit_instance"]

_log = logging.getLogger(__name__)

_COMMAND: Final[Seconds] = 8.0
_OWN: Final = (
    *("--unit", "-u", "--description", "--user", "--system", "--collect", "-G", "--no-block"),
    *("--remain-after-exit", "-r", "--service-type", "--wait", "--pty", "-t", "--pipe", "-P"),
)
_SHOWN: Final = (
    "Id,ActiveState,SubState,Result,ExecMainStatus,Description,StateChangeTimestampMonotonic"
)
_TIMER: Final = re.compile(r"pdserve-k-(\d+)-(.+)\.timer")
_PASSES: Final = ("failed to connect", "timed out", "reset by peer", "endpoint", "no such process")


class SystemdConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How workers become units: `[planner.actuator]` with type `systemd`."""

    kinds: dict[str, CommandKind]
    """By name; `flags` are for `systemd-run`, as `--property=MemoryMax=40G`."""
    worker: tuple[str, ...] = ()
    """Flags of every worker."""
    program: str = "pdserve"
    """The executable."""
    user: bool = False
    """True: units of the user's own manager, which ends with the last session unless the user
    lingers; False: of the system's, for which the planner needs the right to manage units."""


def read_config(table: object, place: str) -> SystemdConfig:
    """Reads the table; `place` names it in errors. Errors: `ConfigError`."""
    config = read_table(table, SystemdConfig, place)
    assert isinstance(table, dict)
    refuse_worker_flags(config.worker, place)
    for name, kind in read_kinds(table, CommandKind, place).items():
        refuse_flags(kind.flags, _OWN, f"{place} kinds.{name}")
        refuse_worker_flags(kind.worker, f"{place} kinds.{name}")
    return config


class WorkerUnit(NamedTuple):
    """A worker's unit, as `systemctl show` has it."""

    change: str
    kind: str
    active: str
    sub: str
    result: str
    status: str
    since: Seconds
    """When its state changed, on the monotonic clock."""
    until: float | None = None
    """Unix second at which it is killed; None: no stop was ordered."""

    @property
    def live(self) -> bool:
        """True if its process runs, or is being started or ended."""
        return self.active in ("activating", "active", "deactivating") and self.sub != "exited"


def parse_units(text: str, cluster: str) -> list[WorkerUnit]:
    """Reads `systemctl show`: the units of a cluster's workers, and the timers that end them."""
    blocks = [
        dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        for block in text.split("\n\n")
    ]
    marks: dict[str, float] = {}
    for block in blocks:
        if found := _TIMER.fullmatch(block.get("Id", "")):
            until = int(found[1]) / 1000
            marks[found[2]] = min(until, marks.get(found[2], until))
    return [unit for block in blocks if (unit := _unit(block, cluster, marks))]


def _unit(block: Mapping[str, str], cluster: str, marks: Mapping[str, float]) -> WorkerUnit | None:
    name, words = block.get("Id", ""), block.get("Description", "").rsplit(" ", 1)
    if not name.startswith("pdserve-w-") or words[0] != f"pdserve {cluster}" or len(words) < 2:
        return None
    change = name.removeprefix("pdserve-w-").removesuffix(".service")
    since = int(block.get("StateChangeTimestampMonotonic") or 0) / 1e6
    return WorkerUnit(
        change=change,
        kind=words[1],
        active=block.get("ActiveState", ""),
        sub=block.get("SubState", ""),
        result=block.get("Result", ""),
        status=block.get("ExecMainStatus", ""),
        since=since,
        until=marks.get(change),
    )


def unit_instance(unit: WorkerUnit, *, asked: bool) -> Instance:
    """What the port tells of a unit. Args: `asked` if this planner has had it stopped."""
    asked = asked or unit.until is not None
    if unit.live:
        state, reason = ("ending" if asked or unit.active == "deactivating" else "booting"), ""
    elif unit.result == "success" or asked:
        state, reason = "ended", ""
    else:
        state, reason = "failed", f"{unit.result}, status {unit.status}: see journalctl"
    return Instance(
        change=unit.change,
        kind=unit.kind,
        actuator="systemd",
        ref=_service(unit.change),
        state=state,
        reason=reason,
    )


def _service(change: str) -> str:
    return f"pdserve-w-{change}.service"


def _told(change: str) -> str:
    return f"pdserve-t-{change}.service"


class Systemd:
    """The actuator `systemd`."""

    name = "systemd"

    def __init__(
        self,
        config: SystemdConfig,
        home: Home,
        *,
        environ: Mapping[str, str] | None = None,
        deadline: Seconds = DEADLINE,
    ) -> None:
        """Args: `environ` is that of systemd's commands; `deadline` is the longest that a call
        takes."""
        self._deadline = deadline
        self._config, self._home = config, home
        self._environ = dict(os.environ if environ is None else environ) | {"LC_ALL": "C.UTF-8"}
        self._manager = ("--user",) if config.user else ("--system",)
        self._starting = asyncio.Lock()
        self._asked: set[str] = set()
        """Changes that this planner has had stopped: a timer that has fired is gone."""

    async def kinds(self) -> Sequence[Kind]:
        """The kinds of the settings; systemd is not asked."""
        return kinds_of(self.name, self._config.kinds)

    async def start(self, kind: str, mode: str, change: str) -> Instance:
        """Starts a unit. One that cannot run has failed, with its status."""
        check_order(mode, change)
        settings = find_kind(self._config.kinds, kind)
        async with within(self._deadline, "start a unit"), self._starting:
            units = await self._units()
            if unit := _of(units, change):
                return self._instance(unit)
            if settings.slots and _live(units, kind) >= settings.slots:
                raise ActuatorExhausted(f"{settings.slots} units of kind {kind} run already")
            try:
                await self._run(kind, settings, mode, change)
            except ActuatorDenied:  # it has ended already, or an order with a lost answer had it
                if unit := _of(await self._units(), change):
                    return self._instance(unit)
                raise
            return Instance(
                change=change, kind=kind, actuator=self.name, ref=_service(change), state="booting"
            )

    async def _run(self, kind: str, settings: CommandKind, mode: str, change: str) -> None:
        """`RemainAfterExit` keeps the unit, so that its end can be read and its name is taken.

        It waits until the process runs, some milliseconds: a signal to a unit that has none yet is
        lost.
        """
        config = self._config
        worker = worker_command(
            config.program, mode, change, self._home, config.worker, settings.worker
        )
        await self._ask(
            "systemd-run",
            *settings.flags,
            f"--unit={_service(change)}",
            f"--description=pdserve {self._home.cluster} {kind}",
            "--remain-after-exit",
            "--service-type=exec",
            "--quiet",
            "--property=KillMode=mixed",
            "--",
            *worker,
        )

    async def stop(self, change: str, grace: Seconds) -> None:
        """Sends SIGTERM to the worker once; a timer of systemd kills the unit after the grace."""
        async with within(self._deadline, "stop a unit"), self._starting:
            unit = _of(await self._units(), change)
            if unit is None or not unit.live:
                return
            until = time.time() + grace
            if unit.until is None:
                await self._tell(change)
            if unit.until is None or until < unit.until:
                await self._kill_later(change, until, grace)
            self._asked.add(change)

    async def _tell(self, change: str) -> None:
        """Sends SIGTERM, by a unit whose name can be used once: a second one would end a worker at
        once, and this planner may die before the timer says that it was told."""
        # Before 252 the option had this name; later ones take it as short for --kill-whom.
        kill = ("systemctl", *self._manager, "kill", "--kill-who=main", _service(change))
        flags = (f"--unit={_told(change)}", "--remain-after-exit", "--quiet")
        try:
            await self._ask("systemd-run", *flags, *kill)
        except ActuatorDenied as error:
            if "already" not in error.message:
                raise

    async def _kill_later(self, change: str, until: float, grace: Seconds) -> None:
        await self._ask(
            "systemd-run",
            f"--unit=pdserve-k-{until * 1000:.0f}-{change}",
            "--collect",
            "--quiet",
            f"--on-active={max(0.001, grace):.3f}",
            "--timer-property=AccuracySec=100ms",  # else a minute
            "systemctl",
            *self._manager,
            "kill",
            "--signal=KILL",
            _service(change),
        )

    async def _remove(self, unit: WorkerUnit) -> None:
        verb = "reset-failed" if unit.active == "failed" else "stop"
        try:
            for each in ("stop", "reset-failed"):
                await self._gone("systemctl", each, _told(unit.change))
            await self._gone("systemctl", verb, _service(unit.change))
        except ActuatorError as error:  # the next list finds it again
            _log.warning("systemd: %s stays: %s", _service(unit.change), error.message)

    def _instance(self, unit: WorkerUnit) -> Instance:
        return unit_instance(unit, asked=unit.change in self._asked)

    async def _units(self) -> list[WorkerUnit]:
        shown = await self._ask("systemctl", "show", f"--property={_SHOWN}", "pdserve-[wk]-*")
        return parse_units(shown, self._home.cluster)

    async def _gone(self, command: str, *arguments: str) -> None:
        """Runs a command for a unit that may have ended meanwhile."""
        try:
            await self._ask(command, *arguments)
        except ActuatorDenied as error:
            if not re.search("not loaded|not active|no process|not found", error.message, re.I):
                raise

    async def _ask(self, command: str, *arguments: str) -> str:
        line = (command, *self._manager, "--no-ask-password", *arguments)
        done = await run_command(line, self._environ, min(_COMMAND, self._deadline))
        if done.code == 0:
            return done.out
        low = done.words.lower()
        sort = ActuatorTransient if any(sign in low for sign in _PASSES) else ActuatorDenied
        raise sort(f"{command}: {done.words}")

    async def list(self) -> Sequence[Instance]:
        """Reads the units, and removes those that ended long ago."""
        async with within(self._deadline, "read the units"):
            units = await self._units()
            now = time.monotonic()
            old = [one for one in units if not one.live and now - one.since > KEEP_ENDED]
            for unit in old if self._home.acts else ():
                await self._remove(unit)
            self._asked &= {one.change for one in units}
            return [self._instance(one) for one in units if one not in old]

    async def close(self) -> None:
        """Nothing is held: units go on."""


def _of(units: Sequence[WorkerUnit], change: str) -> WorkerUnit | None:
    return next((one for one in units if one.change == change), None)


def _live(units: Sequence[WorkerUnit], kind: str) -> int:
    return sum(one.kind == kind and one.live for one in units)
