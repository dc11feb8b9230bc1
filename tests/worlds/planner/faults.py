"""Faults of planners' worlds: of what starts workers, of the load, and by operators.

Some wait for a moment that would seldom be met by chance: a planner dies while a change of some
kind is under way, or a worker does while it is the one that changes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import PdserveError
from pdserve.ids import NodeId
from pdserve.messages.mode import SetMode
from pdserve.messages.planner_orders import PlannerOrder
from pdserve.messages.status import DrainOrder
from pdserve.runtime.rpc_methods import DRAIN, MODE, PLANNER
from pdserve.testing.actuators.fake import ActuatorFaults
from tests.worlds.planner.roles import OrderedWorker, Planner

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pdserve.ids import Seconds
    from pdserve.wire.codec import Method
    from tests.worlds.faults import Fault
    from tests.worlds.planner.stage import Stage
    from tests.worlds.world import VirtualHost, World

__all__ = ["PLANNER_FAULTS", "SILENT"]

_LOOKS: Final[Seconds] = 0.1
_ENDS: Final = ("done", "failed", "given_up")


def _stage(world: World) -> Stage:
    assert world.stage is not None
    return world.stage


def _is_last(world: World, fault: Fault) -> bool:
    """No other fault of its kind lasts at the same place."""
    others = [one for one in world.active if one is not fault and one.kind == fault.kind]
    return all(one.a != fault.a for one in others)


# ---------------------------------------------------------------------------- the load


async def _load(world: World, fault: Fault) -> bool:
    """Clients ask so many times as often."""
    usual = world.rate
    world.rate = usual * fault.amount
    _set_rates(world)
    await asyncio.sleep(fault.lasts)
    world.rate /= fault.amount
    _set_rates(world)
    return True


def _set_rates(world: World) -> None:
    for host in world.of_role("frontend"):
        if host.callers is not None and host.callers.rate:
            host.callers.rate = world.rate


# ---------------------------------------------------------------------------- starts


def _of_batch(name: str, value: object) -> Callable[[World, Fault], Awaitable[bool]]:
    """A fault of `testing.actuators.fake.ActuatorFaults`; felt if a worker was wanted meanwhile."""

    async def do(world: World, fault: Fault) -> bool:
        batch = _stage(world).batch
        if batch is None:
            return False
        before = batch.starts
        setattr(batch.faults, name, fault.amount if value is None else value)
        await asyncio.sleep(fault.lasts)
        if _is_last(world, fault):
            setattr(batch.faults, name, getattr(ActuatorFaults(), name))
        return name in _ALWAYS or batch.starts > before

    return do


_ALWAYS: Final = ("delay", "silent", "denied")


async def _lease(world: World, fault: Fault) -> bool:
    """Jobs that are started now are ended from outside after a while."""
    batch = _stage(world).batch
    if batch is None:
        return False
    before, batch.hard_end = batch.starts, fault.amount
    await asyncio.sleep(fault.lasts)
    if _is_last(world, fault):
        batch.hard_end = None
    return batch.starts > before


def _of_machine(name: str) -> Callable[[World, Fault], Awaitable[bool]]:
    """Starts by an agent fail, or load for ever."""

    async def do(world: World, fault: Fault) -> bool:
        machine = _stage(world).machines.get(fault.a)
        if machine is None:
            return False
        before = machine.processes.asked
        setattr(machine.processes, name, True)
        await asyncio.sleep(fault.lasts)
        if _is_last(world, fault):
            setattr(machine.processes, name, False)
        return machine.processes.asked > before

    return do


async def _of_agent(world: World, fault: Fault) -> bool:
    """An agent dies when it has started a worker, and comes back when that is over."""
    machine, host = _stage(world).machines.get(fault.a), world.hosts[fault.a]
    if machine is None:
        return False
    before = machine.processes.asked
    machine.processes.agent_dies = True
    await asyncio.sleep(fault.lasts)
    if _is_last(world, fault):
        machine.processes.agent_dies = False
    died = machine.processes.asked > before
    await asyncio.sleep(fault.amount)
    if host.wanted and not host.busy:
        world.start(host)
    return died


# ---------------------------------------------------------------------------- at the moment


def _planner_dies(action: str) -> Callable[[World, Fault], Awaitable[bool]]:
    """A planner dies while it has such a change under way."""

    async def do(world: World, fault: Fault) -> bool:
        until = world.loop.time() + fault.lasts
        while world.loop.time() < until:
            for host in world.of_role("planner"):
                if host.up and isinstance(host.part, Planner) and _has(host.part, action):
                    world.kill(host)
                    await asyncio.sleep(fault.amount)
                    if host.wanted and not host.busy:
                        world.start(host)
                    return True
            await asyncio.sleep(_LOOKS)
        return False

    return do


def _has(planner: Planner, action: str) -> bool:
    changes = [one for plan in planner.plans for one in plan.changes]
    return any(one.action == action and one.state not in _ENDS for one in changes)


async def _worker_dies(world: World, fault: Fault) -> bool:
    """A worker dies while it drains, changes its mode, or loads."""
    until = world.loop.time() + fault.lasts
    while world.loop.time() < until:
        for host in world.of_role("worker"):
            if _changes(host):
                world.kill(host)
                await asyncio.sleep(fault.amount)
                if host.wanted and not host.busy:
                    world.start(host)
                return True
        await asyncio.sleep(_LOOKS)
    return False


async def _crowd_at_drain(world: World, fault: Fault) -> bool:
    """Many ask at once, just when a planner has told a worker to drain."""
    until = world.loop.time() + fault.lasts
    while world.loop.time() < until:
        if any(_is_drained(host) for host in world.of_role("worker")):
            for host in world.of_role("frontend"):
                if host.up and host.callers is not None and host.process is not None:
                    for _ in range(int(fault.amount)):
                        host.process.context.copy().run(host.callers.ask)
            return True
        await asyncio.sleep(_LOOKS)
    return False


async def _others_die(world: World, fault: Fault) -> bool:
    """All other workers die when a planner has told one to drain."""
    until = world.loop.time() + fault.lasts
    while world.loop.time() < until:
        drained = [host for host in world.of_role("worker") if _is_drained(host)]
        others = [host for host in world.of_role("worker") if host.up and host not in drained]
        if drained:
            for host in others:
                world.kill(host)
            await asyncio.sleep(fault.amount)
            for host in others:
                if host.wanted and not host.busy:
                    world.start(host)
            return bool(others)
        await asyncio.sleep(_LOOKS)
    return False


def _is_drained(host: VirtualHost) -> bool:
    part = host.part
    if not host.up or not isinstance(part, OrderedWorker):
        return False
    state = part.orders.state()
    return state is not None and state.term > 0


def _changes(host: VirtualHost) -> bool:
    part = host.part
    if not host.up or not isinstance(part, OrderedWorker):
        return False
    loads = bool(host.settings.change) and not host.ready
    return loads or part.orders.begun or part.service.leaving


# ---------------------------------------------------------------------------- operators


def _operated(verb: str) -> Callable[[World, Fault], Awaitable[bool]]:
    """An operator says something to a planner, and takes it back later."""

    async def do(world: World, fault: Fault) -> bool:
        mix = {"aggregated": 2} if fault.amount < 1 else {"prefill": 1, "decode": 2}
        model = world.models[0]
        order = PlannerOrder(verb=verb, model=model, seconds=fault.lasts, by="eve")
        if verb == "pin":
            order = PlannerOrder(verb=verb, model=model, seconds=fault.lasts, by="eve", mix=mix)
        if not await _tell(world, "planner", PLANNER, order):
            return False
        await asyncio.sleep(fault.lasts)
        return True

    return do


async def _drained_by_hand(world: World, fault: Fault) -> bool:
    """An operator drains a worker, which stays away."""
    return await _tell(world, "worker", DRAIN, DrainOrder(False, 0, 0))


async def _switched_by_hand(world: World, fault: Fault) -> bool:
    """An operator changes a worker's mode."""
    mode = "decode" if fault.amount < 1 else "aggregated"
    return await _tell(world, "worker", MODE, SetMode(mode=mode, share=0.0, term=0, number=0))


async def _tell(world: World, role: str, method: Method[Any, Any], message: object) -> bool:
    """Asks the first of a role, from a router, as `pdserve` does; False: nobody answers."""
    asker = next((host for host in world.of_role("router") if host.up and host.ready), None)
    asked = next((host for host in world.of_role(role) if host.up and host.ready), None)
    if asker is None or asked is None or asker.part is None or asker.process is None:
        return False
    ref = asker.part.node.ref(NodeId(asked.name))
    work = ref.ask(method, message, timeout=2.0)
    asking = world.loop.start(asker.process, work, f"an operator asks {asked.name}")
    await asyncio.wait({asking}, timeout=3.0)
    if not asking.done() or asking.cancelled():
        return False
    return not isinstance(asking.exception(), PdserveError)


PLANNER_FAULTS: Final[dict[str, Callable[[World, Fault], Awaitable[bool]]]] = {
    "load": _load,
    "starts-slow": _of_batch("delay", None),
    "starts-silent": _of_batch("silent", value=True),
    "answers-lost": _of_batch("lost_answers", value=True),
    "starts-denied": _of_batch("denied", "the account has no right"),
    "starts-fail": _of_batch("start_fails", "the image cannot be pulled"),
    "never-ready": _of_batch("never_ready", value=True),
    "stuck-pending": _of_batch("stuck_pending", "QOSMaxJobsPerUserLimit"),
    "wrong-mode": _of_batch("wrong_mode", "decode"),
    "list-lies": _of_batch("lies", value=True),
    "hosts-unknown": _of_batch("unknown", value=True),
    "lease": _lease,
    "launch-fails": _of_machine("fails"),
    "launch-never-ready": _of_machine("never_ready"),
    "agent-dies-starting": _of_agent,
    "planner-dies-starting": _planner_dies("start"),
    "planner-dies-draining": _planner_dies("stop"),
    "planner-dies-switching": _planner_dies("mode"),
    "changing-worker-dies": _worker_dies,
    "crowd-at-drain": _crowd_at_drain,
    "others-die-at-drain": _others_die,
    "paused": _operated("pause"),
    "pinned": _operated("pin"),
    "drained-by-hand": _drained_by_hand,
    "switched-by-hand": _switched_by_hand,
}
"""How each is done; returns whether anybody felt it."""

SILENT: Final = frozenset(("starts-slow", "starts-silent", "starts-denied", "list-lies"))
"""Faults under which planners do not know what there is."""
