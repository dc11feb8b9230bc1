"""Carries out a change of a worker's mode; the states are in `state_table`.

    order    an operator's wish, answered with a `ModeReport`: what happens now, or why nothing does
    leave    no prompts go to prefill queues or come from them. If one of the modes takes no
             requests, none are taken now, and streams that cannot stay move with their KV
    flip     the clients of the prefill queues are replaced under the next generation
    prove    one token is computed; a worker that computes prompts reaches a decode worker
    return   if that fails: the former clients, under yet another generation

The engine and its prefix cache take no part: blocks mean the same in every mode. A worker refuses
to leave if no other one would do its job. If two leave at once, each sees the other go: the one
with the greater name stays, and the other one waits until it does. Owned by the worker's agent; the
task is the node's.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Literal, Protocol, cast

from pdserve.engine.port import EngineState
from pdserve.errors import Draining, EngineDied, NotReady, Overloaded, PdserveError
from pdserve.gossip.suspicion import spread
from pdserve.messages.mode import ModeReport
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.runtime.orders.order_fence import OrderFence
from pdserve.runtime.peers.handlers import answers
from pdserve.runtime.rpc_methods import MODE
from pdserve.token_ids import token_ids
from pdserve.tracing.steps import StepTrace
from pdserve.worker.mode.jobs import LIVE_MODES, jobs_of, undone_without, unreachable_decode
from pdserve.worker.mode.state_table import ModeEvent, ModeState, next_state

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.messages.card import ModelCard
    from pdserve.messages.mode import SetMode
    from pdserve.messages.request import TokenDelta
    from pdserve.net.base import IncomingCall
    from pdserve.observe.degraded import Degradations
    from pdserve.runtime.node import Node
    from pdserve.worker.mode.jobs import LiveMode
    from pdserve.worker.service import WorkerService

__all__ = ["DEGRADED", "ModeParts", "ModeSwitch"]

_log = logging.getLogger(__name__)

DEGRADED: Final = "mode_switch"
"""Name of the degradation after a change that failed, until one succeeds. Two workers of a process
have names that begin with the mode that each was started in."""
_LOOK: Final[Seconds] = 0.05
"""Seconds between two looks at what is left, and whether the change is still allowed."""
_SEEN: Final = 2.0
"""News of a card count as known after so many times as long as gossip takes to reach all members.
Where a job is given up, a worker leaves for that long at least: so of two that leave at once, one
learns that it has to stay. An order waits as long for a worker to do the job."""
_PROOF: Final[Seconds] = 10.0
"""Seconds for the self-test, which waits its turn among the streams that stayed, and for an engine
that restarts meanwhile."""


class ModeParts(Protocol):
    """What a change needs of the worker; `worker.agent.WorkerAgent` implements it."""

    @property
    def moves_kv(self) -> bool: ...

    @property
    def left(self) -> int: ...

    def pause_queues(self, *, paused: bool) -> None: ...

    def ask_to_leave(self) -> None: ...

    def left_for(self, mode: LiveMode) -> int: ...

    def use_queues(self, mode: LiveMode, generation: int, share: float) -> None: ...

    def tell(self) -> None: ...


class ModeSwitch:
    """The mode of one worker."""

    def __init__(
        self,
        node: Node,
        service: WorkerService,
        parts: ModeParts,
        degradations: Degradations | None = None,
    ) -> None:
        """`degradations`: the process's list of degradations, if it has one."""
        self.generation = 1
        self.share = 0.0
        """Share of each step for other workers' prompts beside its own requests."""
        self._node = node
        self._service = service
        self._parts = parts
        self._degradations = degradations
        self._degraded = DEGRADED if service.mode == "aggregated" else f"{service.mode}_{DEGRADED}"
        self._state = ModeState.SERVING
        self._target: LiveMode = service.mode
        self._wanted_share = 0.0
        self._last = False
        """The order holds even if no other worker would do the job."""
        self._keeps = False
        """Both modes take requests: the worker takes them during the change, too."""
        self._until: Seconds = 0.0
        self._began: Seconds = 0.0
        self._failed = ""
        self.on_traced: Callable[[StepTrace, str, str], None] = lambda trace, outcome, failed: None
        """Is called with the steps of each change that is over, its outcome and why it failed."""
        self._trace: StepTrace | None = None
        self._task: asyncio.Task[None] | None = None
        self._orders = OrderFence()
        self._cancelled: ModeEvent | None = None
        """The event that ends the change at the next look."""
        node.host(self)

    def report(self, refused: str = "") -> ModeReport:
        """The mode, and how far a change of it is."""
        serves, parts = self._state is ModeState.SERVING, self._parts
        return ModeReport(
            mode=self._service.mode,
            generation=self.generation,
            state=self._state.value,
            target="" if serves else self._target,
            left=parts.left if serves else parts.left_for(self._target),
            remaining=0.0 if serves else max(0.0, self._until - self._node.now()),
            share=self.share,
            failed=self._failed,
            refused=refused,
            newest=self._orders.newest,
        )

    def cancel(self, event: ModeEvent = ModeEvent.DRAINING) -> None:
        """Ends a change that has not happened yet, at the next look."""
        self._cancelled = event

    def needed(self) -> str:
        """The job that no other ready worker is sure to do if this one stops; empty: none."""
        return self._undone("", sure=True)

    # ------------------------------------------------------------------ orders

    @answers(MODE)
    def _ordered(self, order: SetMode, call: IncomingCall) -> ModeReport | None:
        if self._needed(order) and not self._obstacle(order):
            _ = self._node.tasks.spawn(self._obey_late(order, call), "an order that may be early")
            return None
        return self._obey(order, call)

    async def _obey_late(self, order: SetMode, call: IncomingCall) -> None:
        """Waits for news of a worker that does the job of this one: it may have changed its mode
        just now. Refuses the order if none come."""
        until = self._node.now() + self._news
        while True:
            if not self._needed(order) or self._node.now() >= until:
                break
            await asyncio.sleep(_LOOK)
        call.reply(self._obey(order, call))

    def _obey(self, order: SetMode, call: IncomingCall) -> ModeReport:
        refused = self._refusal(order)
        if refused:
            self._count("refused")
            _log.warning(
                "%s wants mode %r, which is refused: %s", call.life.node, order.mode, refused
            )
            return self.report(refused)
        self._orders.obeyed(order.term, order.number)
        if self._is_wanted(order):
            self._last = self._last or order.last
            return self.report()
        same = order.mode == self._service.mode
        if same and self._state is ModeState.LEAVING:
            self.cancel(ModeEvent.CANCELLED)
        elif not same or (order.mode == "both" and order.share != self.share):
            self._begin(order, call.life.node)
        return self.report()

    def _refusal(self, order: SetMode) -> str:
        """Why the order is not obeyed; empty: it is."""
        needed = self._needed(order)
        return self._obstacle(order) or (f"{needed}; --last does it anyway" if needed else "")

    def _obstacle(self, order: SetMode) -> str:
        """Why it is not obeyed, whatever other workers do; empty: it can be."""
        if order.mode not in LIVE_MODES:
            return f"this release knows no mode {order.mode!r}: there are {', '.join(LIVE_MODES)}"
        if late := self._orders.refusal(order.term, order.number):
            return late
        if order.generation not in (0, self.generation):
            return f"stale: it was meant for generation {order.generation} of the mode"
        if order.mode == "both" and not order.share:
            return "a share of 0 leaves nothing for other workers' prompts: use aggregated"
        if self._service.draining:
            return "it drains"
        if self._is_wanted(order):
            return ""
        if order.mode == self._service.mode:
            cancels = self._state in (ModeState.SERVING, ModeState.LEAVING)
            return "" if cancels else f"it is {self._state.value} already"
        return self._inability(order)

    def _is_wanted(self, order: SetMode) -> bool:
        """True if this change is under way already: the order was repeated."""
        same = order.mode == self._target and _share_of(order) == self._wanted_share
        return same and self._state not in (ModeState.SERVING, ModeState.RETURNING)

    def _inability(self, order: SetMode) -> str:
        """Why this worker cannot change to another mode now; empty: it can."""
        if self._state is not ModeState.SERVING:
            return f"it changes to {self._target} already"
        if self._service.engine.state is not EngineState.READY or not self._service.cards():
            return f"it is not ready: {self._service.unready_reason()}"
        if order.mode != "aggregated" and not self._parts.moves_kv:
            return "no KV moves between it and other workers"
        return ""

    def _needed(self, order: SetMode) -> str:
        """Returns the job that no other worker is sure to do after it; empty: none."""
        if order.last or order.mode == self._service.mode or self._is_wanted(order):
            return ""
        return self._undone(cast("LiveMode", order.mode), sure=True)

    @property
    def _news(self) -> Seconds:
        """Seconds after which the others know of a change here, and this worker of one there."""
        return _SEEN * spread(self._node.config.gossip, len(self._node.registry) + 1)

    def _undone(self, target: LiveMode | Literal[""], *, sure: bool = False) -> str:
        """As `undone_without`."""
        models = {card.name for card in self._service.cards().values()}
        members, mode = self._node.registry, self._service.mode
        return undone_without(self._node.id, mode, target, models, members, sure=sure)

    def _begin(self, order: SetMode, by: str) -> None:
        self._target = cast("LiveMode", order.mode)
        self._began = self._node.now()
        self._until = self._began + order.timeout
        self._failed, self._cancelled = "", None
        self._wanted_share, self._last = _share_of(order), order.last
        self._keeps = "requests" in jobs_of(self._service.mode) & jobs_of(self._target)
        _log.info("changes from %s to %s, says %s", self._service.mode, order.mode, by)
        self._trace = self._new_trace(order, by)
        self._feed(ModeEvent.ORDERED)
        self._task = self._node.tasks.spawn(self._change(), f"change to {order.mode}")

    def _new_trace(self, order: SetMode, by: str) -> StepTrace:
        cards = self._service.cards().values()
        trace = StepTrace(
            "pdserve.mode_switch",
            f"mode-{self._node.id}-{self.generation}",
            self._began,
            model=next((card.name for card in cards), ""),
            worker=self._node.id,
            by=by,
            term=order.term,
            plan=order.number,
        )
        trace.event("ordered", self._began, mode=order.mode, was=self._service.mode)
        return trace

    # ------------------------------------------------------------------ the change

    def _feed(self, event: ModeEvent) -> None:
        """Takes the step that the table names, and tells the cluster."""
        self._state = next_state(self._state, event)
        if self._trace is not None and self._state is not ModeState.SERVING:
            self._trace.enter(self._state.value, self._node.now())
        self._tell()

    def _tell(self) -> None:
        serves, service = self._state is ModeState.SERVING, self._service
        service.changing = "" if serves else f"{self._state.value}, to be {self._target}"
        service.leaving = not (serves or self._keeps)
        self._parts.pause_queues(paused=not serves)
        self._parts.tell()

    async def _change(self) -> None:
        """Leads one change to its end. The worker serves afterwards, whatever happens."""
        try:
            left = await self._leave()
            failed = "" if left in _NO_FAILURE else self._why(left)
            self._feed(left)
            if left is ModeEvent.EMPTY:
                await self._become()
            else:
                self._ended(left.value, failed)
        except Exception as error:
            _log.exception("the change to %s", self._target)
            self._serve()
            self._ended("failed", f"{type(error).__name__}, see its log")

    async def _become(self) -> None:
        """Takes the new mode and proves it, or returns to the former one."""
        former, former_share = self._service.mode, self.share
        self._feed(self._flip(self._target, self._wanted_share))
        why = "the queue clients cannot be replaced"
        if self._state is ModeState.PROVING:
            why = await self._prove()
            if self._service.draining:
                self._feed(ModeEvent.DRAINING)
                self._ended("draining", "")
                return
        if why:
            self._return(former, former_share, why)
            return
        self._feed(ModeEvent.PROVED)
        self._ended("done", "")

    def _serve(self) -> None:
        """Serves again in whatever mode it has."""
        self._state = ModeState.SERVING
        self._tell()

    def _why(self, event: ModeEvent) -> str:
        if event is ModeEvent.LAST:
            return self._undone(self._target) or "it became the last one of its mode"
        left = self._parts.left_for(self._target)
        if not left:
            return "another worker was leaving its mode too when the time had passed"
        return f"{left} requests or prompts were left when the time had passed"

    async def _leave(self) -> ModeEvent:
        """Waits until nothing is left that could not stay; returns what ended the wait."""
        if "requests" not in jobs_of(self._target):
            self._parts.ask_to_leave()
        while True:
            if self._cancelled is not None:
                return self._cancelled
            if not self._last and self._undone(self._target):
                return ModeEvent.LAST
            if self._may_go() and not self._parts.left_for(self._target):
                return ModeEvent.EMPTY
            if self._node.now() >= self._until:
                return ModeEvent.TIMED_OUT
            await asyncio.sleep(_LOOK)

    def _may_go(self) -> bool:
        """True if the change gives up no job, or others are sure to do what it gives up."""
        if self._last or not jobs_of(self._service.mode) - jobs_of(self._target):
            return True
        seen = self._node.now() >= self._began + self._news
        return seen and not self._undone(self._target, sure=True)

    def _flip(self, mode: LiveMode, share: float) -> ModeEvent:
        """Puts the clients of the mode in the place of the former ones."""
        self.generation += 1
        try:
            self._parts.use_queues(mode, self.generation, share or 1.0)
        except Exception:
            _log.exception("the clients for mode %s", mode)
            return ModeEvent.FAILED
        self._service.mode, self.share = mode, share
        return ModeEvent.FLIPPED

    def _return(self, former: LiveMode, share: float, why: str) -> None:
        """Goes back to the former mode, because the new one does not work."""
        if self._state is not ModeState.RETURNING:
            self._feed(ModeEvent.FAILED)
        self._feed(self._flip(former, share))
        self._ended("failed", why)

    def _ended(self, outcome: str, failed: str) -> None:
        """Counts and logs how the change ended."""
        self._count(outcome.replace(" ", "_"))
        seconds = self._node.now() - self._began
        self._failed = f"{self._target}: {failed}" if failed else ""
        if self._degradations is not None:
            self._degradations.clear(self._degraded)
            if failed:
                detail = f"{self._node.id} is {self._service.mode} still, not {self._target}"
                self._degradations.add(self._degraded, f"{detail}: {failed}; order it again")
        if outcome == "done":
            self._service.metrics.mode_switch_seconds.labels().observe(seconds)
        _log.info(
            "mode %s, generation %d: the change to %s ended after %.2f s: %s",
            *(self._service.mode, self.generation, self._target, seconds, failed or outcome),
        )

        trace, self._trace = self._trace, None
        if trace is not None:
            self.on_traced(trace, outcome.replace(" ", "_"), failed)

    def _count(self, outcome: str) -> None:
        self._service.metrics.mode_switches.labels(outcome).inc()

    # ------------------------------------------------------------------ the proof

    async def _prove(self) -> str:
        """Tests the new mode; returns what does not work, empty: it works."""
        try:
            async with asyncio.timeout(_PROOF):
                await self._compute_one_token()
        except TimeoutError:
            return f"no token was computed within {_PROOF:g} s"
        except PdserveError as error:
            return f"no token was computed: {error.message}"
        return self._cut_off()

    async def _compute_one_token(self) -> None:
        """Has the engine compute a token, once it is ready. A token of a stream that stayed proves
        as much: an engine with all the sequences that it runs has no room for one more. Errors: as
        `Engine.submit`."""
        engine = self._service.engine
        before = engine.stats().output_tokens
        while not self._service.draining:
            proof = _Proof()
            try:
                handle = engine.submit(self._canary(), proof)
                try:
                    while not await proof.wait():
                        if self._keeps and engine.stats().output_tokens > before:
                            return
                finally:
                    engine.abort(handle)
            except (NotReady, EngineDied, Overloaded) as error:
                _log.info("the self-test waits for the engine: %s", error.message)
                await asyncio.sleep(_LOOK)
            else:
                return
        raise Draining("the process drains")

    def _canary(self) -> GenerateRequest:
        """A request of one token, with a salt of its own."""
        card = self._card()
        return GenerateRequest(
            request_id=f"mode-{self.generation}",
            model=card.name,
            prompt=token_ids([0]),
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            pooling=card.pooling,
            cache_salt=f"mode-{self._node.id}-{self.generation}",
        )

    def _cut_off(self) -> str:
        """Why KV reaches no decode worker, for a worker that computes prompts; empty: it does."""
        capabilities = self._service.engine.capabilities
        if "prompts" not in jobs_of(self._target) or capabilities is None:
            return ""
        name, engine = self._card().name, self._service.engine
        return unreachable_decode(name, capabilities.transfers, engine.paths(), self._node.registry)

    def _card(self) -> ModelCard:
        return next(iter(self._service.cards().values()))


def _share_of(order: SetMode) -> float:
    return order.share if order.mode == "both" else 0.0


_NO_FAILURE: Final = (ModeEvent.EMPTY, ModeEvent.CANCELLED, ModeEvent.DRAINING)
"""Ends of leaving that are as they should be."""


class _Proof:
    """The sink of the self-test."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self) -> bool:
        """Waits a moment; True if the test has been passed. Errors: why it was not."""
        done, _ = await asyncio.wait((self.done,), timeout=_LOOK)
        for one in done:
            one.result()
        return bool(done)

    def on_delta(self, delta: TokenDelta) -> None:
        """Ends the test once a token has come."""
        if delta.finish is not None and not self.done.done():
            if delta.finish.reason == "error":
                self.done.set_exception(EngineDied(delta.finish.message))
            else:
                self.done.set_result(None)

    def on_error(self, error: PdserveError) -> None:
        """Fails the test."""
        if not self.done.done():
            self.done.set_exception(error)
