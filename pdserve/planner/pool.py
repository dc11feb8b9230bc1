"""What there is of one model: its workers, and instances that have not become workers yet. Pure.

Three numbers must not be mixed up. *Serving* workers take load now. *Charged* is everything that
costs or may soon cost, and bounds what may be started. *Coming* will serve, and counts as capacity
only from the time at which it is expected.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from pdserve.planner.changes.ids import model_tag, read_change_id

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from pdserve.ids import Epoch, NodeId, NodeLife, Seconds
    from pdserve.messages.planner import Instance

__all__ = [
    "Coming",
    "Mix",
    "Pool",
    "Worker",
    "WorkerState",
    "gather",
    "last_of_its_job",
    "serves",
    "valid_mix",
]

WorkerState = Literal["loading", "ready", "leaving", "proving", "draining"]
Mix = dict[str, int]
"""Workers by mode."""

_ALIVE = ("pending", "booting", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One life of a worker, from its card, its load and its actuator's list."""

    life: NodeLife
    model: str
    mode: str
    """Its live mode: `both` is named so, whatever its card says to earlier releases."""
    state: WorkerState = "ready"
    """`loading`: no model yet, or its engine restarts; `leaving` and `proving`: it changes its
    mode."""
    generation: int = 0
    """Of its mode; 0: not said."""
    target: str = ""
    """The mode that it changes to."""
    change: str = ""
    """Id of the change that started it; empty: it was started by hand."""
    kind: str = ""
    can_switch: bool = True
    """False: its engine moves no KV, so its mode is fixed."""
    pinned: bool = False
    """An operator has said that it stays, or that it is maintained."""
    share: float = 0.0
    """With mode `both`: the share of a step for other workers' prompts."""
    speed: float = 1.0
    """Factor by which it is slower than the learnt times."""
    disagg: str = ""
    """How it decides where the prompts that it decodes are computed; empty: not said."""
    transfer_token: Seconds = 0.0
    """Seconds to move a token's KV that its kind of path takes; 0: unknown."""
    measured_token: Seconds = 0.0
    """The same, as measured when its paths were made; 0: none was."""
    kv_tokens: int = 0
    """KV that it can hold; 0: unknown."""
    max_sequences: int = 0
    running: int = 0
    """Requests that it has, waiting ones included."""
    waiting_tokens: int = 0
    """Prompt tokens that it has and no step has computed yet."""
    live_tokens: int = 0
    """KV tokens of running requests: what a drain must move."""
    hot_tokens: int = 0
    """Cached prompt tokens that only this worker has, as far as known: what is computed again when
    it goes."""
    hard_end: Seconds | None = None
    """Seconds until it is ended from outside; None: it is not."""
    ordered: bool = False
    """A planner has ordered its drain, as far as known. What an operator drains is left alone."""
    drain_left: Seconds | None = None
    """Seconds until its own drain timeout ends its drain; None: it has not said."""
    failed: str = ""
    """Why its last mode switch did not happen."""

    @property
    def node(self) -> NodeId:
        """Its name."""
        return self.life.node

    @property
    def epoch(self) -> Epoch:
        """Its life's number."""
        return self.life.epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """A start that is not a ready worker yet."""

    change: str
    kind: str
    mode: str
    state: str
    """`asked`, or the state of its instance, or `loading`."""
    price: float = 1.0
    ready_in: Seconds | None = None
    """Seconds until it is expected to serve; None: nobody knows, so it is no capacity."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One model's workers and starts at one moment."""

    model: str
    workers: tuple[Worker, ...] = ()
    coming: tuple[Coming, ...] = ()
    """Starts that are charged and do not serve, loading workers included."""
    others: float = 0.0
    """Cost for an hour of instances that end, and have no worker any more."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Price for an hour by kind; a kind without one, and a worker started by hand, costs 1."""

    def in_state(self, *states: WorkerState) -> tuple[Worker, ...]:
        """The workers in these states."""
        return tuple(one for one in self.workers if one.state in states)

    @property
    def serving(self) -> tuple[Worker, ...]:
        """Workers that take load now."""
        return self.in_state("ready")

    @property
    def mix(self) -> Mix:
        """Serving workers by mode; a worker that changes its mode counts as what it becomes."""
        kept = Counter(one.mode for one in self.serving)
        kept.update(one.target or one.mode for one in self.in_state("leaving", "proving"))
        return dict(kept)

    @property
    def size(self) -> int:
        """Workers that stay, and starts: what `max` bounds."""
        loading = {one.change for one in self.in_state("loading") if one.change}
        unknown = [one for one in self.in_state("loading") if not one.change]
        starts = {one.change for one in self.coming} | loading
        return len(self.in_state("ready", "leaving", "proving")) + len(unknown) + len(starts)

    @property
    def cost(self) -> float:
        """Cost for an hour of all that is charged: serving, draining, loading, asked for."""
        listed = {one.change for one in self.workers if one.change}
        waiting = sum(one.price for one in self.coming if one.change not in listed)
        return sum(self.price(one.kind) for one in self.workers) + waiting + self.others

    def price(self, kind: str) -> float:
        """Price of a worker of a kind for an hour."""
        return self.prices.get(kind, 1.0)

    def worker(self, life: NodeLife) -> Worker | None:
        """One of its workers, if that life still exists."""
        return next((one for one in self.workers if one.life == life), None)


def serves(mix: Mapping[str, int]) -> bool:
    """True if some worker takes requests. A decode worker without prefill workers computes the
    prompts itself."""
    return mix.get("aggregated", 0) + mix.get("decode", 0) + mix.get("both", 0) > 0


def valid_mix(mix: Mapping[str, int]) -> bool:
    """True if every worker of the mix has something to do: it serves, prefill workers have decode
    workers to compute for, and decode workers others that compute prompts."""
    prompts = mix.get("prefill", 0) + mix.get("both", 0)
    decode = mix.get("decode", 0)
    if not serves(mix) or (mix.get("prefill", 0) and not decode):
        return False
    return prompts > 0 or not decode


def last_of_its_job(mix: Mix, mode: str, target: str) -> bool:
    """True if no other worker would decode, or compute prompts, after this switch. The worker
    refuses such a switch unless the order says `last`."""
    others = Counter(mix) - Counter([mode])
    alike = _ALIKE.get(mode, frozenset())
    return bool(alike) and target not in alike and not any(others[one] for one in alike)


_ALIKE: Mapping[str, frozenset[str]] = {
    "decode": frozenset(("decode",)),
    "prefill": frozenset(("prefill", "both")),
    "both": frozenset(("prefill", "both")),
}
"""Modes of the workers that do what one of this mode does, besides taking requests."""


def gather(
    model: str,
    workers: Iterable[Worker],
    instances: Iterable[Instance],
    asked: Iterable[Coming],
    *,
    prices: Mapping[str, float],
    ready_in: Callable[[str, str], Seconds],
    given_up: Collection[str] = (),
) -> Pool:
    """The pool of a model.

    Args: `asked` are starts of this planner that no list shows yet; `ready_in` tells, by change and
    kind, the seconds until a start whose process runs is expected to serve; `given_up` are starts
    of which nothing is expected any more: they only cost.
    """
    mine = tuple(_going(one, given_up) for one in workers if one.model == model)
    joined = {one.change for one in mine if one.change}
    coming = {one.change: one for one in asked if one.change not in joined}
    others = 0.0
    for one in _unjoined(model, instances, joined):
        price = prices.get(one.kind, 1.0)
        if one.state in _ALIVE and one.change not in given_up:
            coming[one.change] = _coming(one, price, ready_in(one.change, one.kind))
        elif one.state == "unknown" and one.change in coming:
            continue  # its host does not answer: it may run, and is charged until it is given up
        else:
            coming.pop(one.change, None)
            lost = one.state == "unknown" and one.change in given_up
            others += price if lost or one.state in (*_ALIVE, "ending") else 0.0
    for worker in mine:
        if worker.state == "loading" and worker.change:
            price = prices.get(worker.kind, 1.0)
            coming[worker.change] = _loading(worker, price, ready_in(worker.change, worker.kind))
    return Pool(model, mine, tuple(coming.values()), others, prices)


def _going(worker: Worker, given_up: Collection[str]) -> Worker:
    """A worker that loads although it is given up is as good as gone; one that serves after all
    serves."""
    if worker.state == "loading" and worker.change in given_up:
        return replace(worker, state="draining", ordered=True)
    return worker


def _unjoined(
    model: str, instances: Iterable[Instance], joined: Collection[str]
) -> Iterator[Instance]:
    """The model's instances that no worker belongs to."""
    tag = model_tag(model)
    for one in instances:
        name = read_change_id(one.change)
        if name is not None and name.tag == tag and one.change not in joined:
            yield one


def _coming(one: Instance, price: float, boot: Seconds) -> Coming:
    name = read_change_id(one.change)
    return Coming(
        change=one.change,
        kind=one.kind,
        mode=name.mode if name else "",
        state=one.state,
        price=price,
        ready_in=_until_ready(one, boot),
    )


def _until_ready(one: Instance, boot: Seconds) -> Seconds | None:
    """A pending instance will be capacity only if its actuator says when it starts."""
    if one.state != "pending":
        return boot
    return None if one.expected is None else one.expected + boot


def _loading(worker: Worker, price: float, boot: Seconds) -> Coming:
    return Coming(
        change=worker.change,
        kind=worker.kind,
        mode=worker.mode,
        state="loading",
        price=price,
        ready_in=boot,
    )
