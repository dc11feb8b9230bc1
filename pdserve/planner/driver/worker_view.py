"""Reads from a member's card, load and report what the planner knows of a worker. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Final

from pdserve.ids import NodeLife
from pdserve.planner.changes.ids import model_tag, read_change_id
from pdserve.planner.demand_series import believed_speed
from pdserve.planner.pool import Worker

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.node import NodeCard
    from pdserve.messages.planner import Instance
    from pdserve.messages.routing import WorkerLoad
    from pdserve.messages.status import DrainState, NodeReport
    from pdserve.planner.config import PoolConfig
    from pdserve.planner.pool import WorkerState
    from pdserve.runtime.registry import Member

__all__ = ["Sighting", "fixed_workers", "live_mode", "model_of", "worker_view"]


@dataclass(frozen=True, slots=True)
class Sighting:
    """What is known of one member that is a worker."""

    member: Member
    load: WorkerLoad | None = None
    """None: it has published none."""
    report: NodeReport | None = None
    """Its own account; asked for while it drains or changes its mode."""
    instance: Instance | None = None
    """What its actuator lists; None: it was started by hand, or its actuator does not answer."""


def worker_view(seen: Sighting, model: str, speeds: Mapping[NodeId, float]) -> Worker | None:
    """One worker of `model`; None: it has told nothing yet. `speeds`: of the workers, as the
    routers have learnt them."""
    member, load, card = seen.member, seen.load, seen.member.card
    if card is None:
        return None
    mode = None if seen.report is None else seen.report.mode
    drain = None if seen.report is None else seen.report.drain
    block = card.models[0].block_size if card.models else 0
    instance = seen.instance
    return Worker(
        life=NodeLife(member.node, member.epoch),
        model=model,
        mode=live_mode(card),
        state=_state(seen, card),
        generation=card.mode_generation,
        target="" if mode is None or mode.state == "serving" else mode.target,
        change=card.change,
        kind="" if instance is None else instance.kind,
        can_switch=bool(card.transfers and card.mode_generation),
        share=card.prompt_share,
        disagg=card.disagg,
        transfer_token=_transfer_token(card, block),
        measured_token=0.0 if load is None else load.transfer_token,
        speed=believed_speed(speeds.get(member.node, 1.0)),
        kv_tokens=0 if load is None else load.blocks_total * block,
        max_sequences=card.max_sequences,
        running=0 if load is None else load.running + load.waiting,
        live_tokens=0 if load is None else load.kv_tokens,
        hot_tokens=0 if load is None else load.blocks_cached * block,
        hard_end=None if instance is None else instance.hard_end,
        ordered=drain is not None and drain.term > 0,
        drain_left=_drain_left(drain),
        failed="" if mode is None else mode.failed,
    )


_RATES: Final = {"cuda_ipc": 100e9, "rdma": 12.5e9, "shm": 5e9, "tcp": 1.25e9}
"""Bytes per second that a path of each kind has at least on usual machines: NVLink, 100 Gb/s, a
memory copy, 10 Gb/s. They count until a decode worker has measured its own."""


def _transfer_token(card: NodeCard, block: int) -> Seconds:
    """Seconds to move a token's KV by the fastest path between hosts that the worker has, or else
    by what it has; 0: unknown."""
    known = [one for one in card.transfers if one in _RATES]
    between = [one for one in known if one in ("rdma", "tcp")] or known
    if not (between and block and card.kv_block_bytes):
        return 0.0
    return card.kv_block_bytes / block / max(_RATES[one] for one in between)


def fixed_workers(
    pools: Iterable[PoolConfig], workers: Iterable[Worker]
) -> dict[str, tuple[NodeId, ...]]:
    """By model: the ready workers whose mode cannot change, where there are modes to choose
    from."""
    ready = [one for one in workers if one.state == "ready"]
    found: dict[str, tuple[NodeId, ...]] = {}
    for pool in pools:
        own = [one for one in ready if one.model == pool.model]
        names = tuple(sorted(one.node for one in own if not one.can_switch))
        if names and len(set(pool.modes) or {one.mode for one in own}) > 1:
            found[pool.model] = names
    return found


def live_mode(card: NodeCard) -> str:
    """The worker's mode; `both` has a value of its own on no card."""
    return "both" if card.mode == "aggregated" and card.prompt_share else card.mode


def _state(seen: Sighting, card: NodeCard) -> WorkerState:
    if card.draining:
        return "draining"
    if card.leaving:
        mode = None if seen.report is None else seen.report.mode
        return "proving" if mode is not None and mode.state == "proving" else "leaving"
    ready = bool(card.models) and not card.reason
    return "ready" if ready and (seen.load is None or seen.load.ready) else "loading"


def _drain_left(drain: DrainState | None) -> Seconds | None:
    """What it says of its own time limit; a time that cannot be is none."""
    if drain is None or not isfinite(drain.remaining):
        return None
    return max(0.0, drain.remaining)


def model_of(card: NodeCard, known: str, models: Iterable[str]) -> str:
    """The model that a worker serves or is about to serve; empty: nobody can tell.

    Args: `known` is what it served before in this life, `models` those of the planner's pools.
    """
    if card.models:
        return card.models[0].name
    name = read_change_id(card.change)
    started = "" if name is None else next((m for m in models if model_tag(m) == name.tag), "")
    return known or started
