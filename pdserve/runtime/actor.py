"""An actor: state that one task changes, one message at a time.

    Actor   what a user writes
    Cell    one life of an actor: its mailbox, its task, who watches it

A message that fails is not repeated. An ask may be *refused*: a `PdserveError` that `receive`
raises is the answer, and the actor lives on. Any other exception, and any at all from a tell, ends
the actor; its `supervisor` decides what then. However a life ends, each envelope that still waits
is failed, each stream ended, each timer and task of the actor cancelled, each watcher told once.

It knows nothing of names and nodes: those are `actors`'. Owned by one `Actors`.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from pdserve.errors import ActorFailed, NoActor, Overloaded, PdserveError
from pdserve.runtime.context import Context
from pdserve.runtime.mailbox import Mailbox, Policy
from pdserve.runtime.ref import Terminated, Watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.ids import Seconds
    from pdserve.runtime.envelope import Envelope
    from pdserve.runtime.ref import ActorRef, Contract
    from pdserve.runtime.streams import Outlet
    from pdserve.runtime.tasks import Tasks

__all__ = ["Actor", "Cell"]

_log = logging.getLogger(__name__)

M = TypeVar("M")
R = TypeVar("R")

_BURST: Final = 32
"""Messages handled in a row before others on the loop get a turn."""
_LONGEST: Final = 500
"""Characters of a reason that watchers get: it travels."""


class Actor(Generic[M, R]):
    """Subclass it. All methods run in the actor's own task, one at a time."""

    contract: ClassVar[Contract[Any, Any]]
    policy: ClassVar[Policy] = Policy()
    stop_timeout: ClassVar[Seconds] = 5.0
    """For `stopped` and the end of the actor's own tasks; then they are cut short."""
    context: Context[M]
    """Set before `started`: the ref to itself, timers, watches, tasks."""

    async def started(self) -> None:
        """Before the first message. A failure here is a failure to start."""

    async def receive(self, message: M) -> R:
        """Handle one message; what it returns answers an ask."""
        raise NotImplementedError

    async def opened(self, message: M, outlet: Outlet[R]) -> None:
        """Handle one message that wants a stream; `outlet` may be kept for later."""
        raise PdserveError(f"{type(self).__name__} has no streams")

    async def stopped(self, error: BaseException | None) -> None:
        """After the last message; `error` is why, None if it was stopped. Not called if the task
        ended before `started`."""


class Cell(Generic[M, R]):
    """One life of an actor."""

    def __init__(
        self,
        actor: Actor[M, R],
        ref: ActorRef[M, R],
        tasks: Tasks,
        on_end: Callable[[], None],
    ) -> None:
        """Begins at once; raises `Draining` if `tasks` are closed. `on_end`: the name is free."""
        self.ref = ref
        self.uid = ref.address.uid
        self.name = str(ref.address)
        self.mailbox: Mailbox[Envelope[M]] = Mailbox(actor.policy)
        self.failure: BaseException | None = None
        self.ended: Terminated | None = None
        self._actor = actor
        self._on_end = on_end
        self._closing = False
        self._burst = 0
        self._current: Envelope[M] | None = None
        self._outlets: dict[Outlet[Any], None] = {}
        self._watches: dict[Watch, None] = {}
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._wake: asyncio.Future[None] | None = None
        self._started: asyncio.Future[None] = loop.create_future()
        self._context = actor.context = Context(self)
        self.task = tasks.spawn(self._run(), f"actor {self.name}")
        self.task.add_done_callback(self._end)

    # ------------------------------------------------------------------ from outside

    @property
    def watchers(self) -> int:
        """How many wait for its end."""
        return len(self._watches)

    def post(self, envelope: Envelope[M]) -> None:
        """Queue a message. Raises `NoActor`, `Overloaded`."""
        if self._closing:
            raise NoActor(f"{self.name} has ended")
        gone = self.mailbox.put(envelope)
        if gone is not None:
            gone.fail(Overloaded(f"a newer message to {self.name} took its place"))
        if envelope.outlet is not None:
            self._keep(envelope, envelope.outlet)
        self._wake_up()

    def post_system(self, envelope: Envelope[M]) -> None:
        """Queue one that must not be dropped: if that is impossible, the actor ends."""
        if self._closing:
            return
        if self.mailbox.put_system(envelope):
            self._wake_up()
        else:
            self.fail(Overloaded(f"{self.name} does not keep up with its timers and watches"))

    def withdraw(self, envelope: Envelope[M]) -> None:
        """Nobody waits for it any more. Nothing happens if the actor has it, or has had it."""
        self.mailbox.withdraw(envelope)

    def watch(self, watch: Watch) -> None:
        """Fire it when this life has ended: later than now, once."""
        if self.ended is not None:
            self._loop.call_soon(watch.fire, self.ended)
        else:
            self._watches[watch] = None
            watch.on_cancel = lambda: self._watches.pop(watch, None)

    def when_ended(self, callback: Callable[[BaseException | None], None]) -> None:
        """For supervisors: call back once with why it failed; None: it was stopped."""
        self.watch(Watch(lambda _: callback(self.failure)))

    async def wait_started(self, *, timeout: Seconds) -> bool:
        """Wait for the actor's `started`; False: it is not done yet. Raises `ActorFailed` if the
        actor has ended instead."""
        either: set[asyncio.Future[None]] = {self._started, self.task}
        await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._closing and not self._started.done():
            raise ActorFailed(f"{self.name} did not start: {self.failure!r}") from self.failure
        return self._started.done()

    def close(self, *, drain: bool = False) -> None:
        """Take nothing more, and end after the present message; with `drain` after all that
        wait."""
        self._closing = True
        if not drain:
            self._fail_waiting()
        self._wake_up()

    async def stop(self, *, timeout: Seconds, drain: bool = False) -> None:
        """`close` and wait; after `timeout` the actor is cancelled, whatever it does. Cancellation:
        it ends anyway. Called by the actor itself: only closes."""
        self.close(drain=drain)
        if asyncio.current_task() is self.task:
            return
        _, late = await asyncio.wait({self.task}, timeout=timeout)
        if late:
            self.task.cancel(f"{self.name} did not stop in time")
            _, late = await asyncio.wait({self.task}, timeout=2 * self._actor.stop_timeout)
        if late:
            _log.error("%s does not end when cancelled", self.name)

    def fail(self, error: BaseException) -> None:
        """End now, because of `error`."""
        if self.failure is None and self.ended is None:
            self.failure = error
            self.task.cancel(str(error))

    # ------------------------------------------------------------------ the task

    async def _run(self) -> None:
        try:
            await self._actor.started()
            self._started.set_result(None)
            while (envelope := await self._next()) is not None:
                await self._handle(envelope)
        except Exception as error:
            self.failure = self.failure or error
        finally:
            self._shut()
            await self._tidy()

    async def _next(self) -> Envelope[M] | None:
        """The next message; None: there will be none."""
        self._burst += 1
        if self._burst >= _BURST:
            self._burst = 0
            await asyncio.sleep(0)
        while (envelope := self.mailbox.take()) is None and not self._closing:
            self._wake = self._loop.create_future()
            await self._wake
        return envelope

    async def _handle(self, envelope: Envelope[M]) -> None:
        self._current = envelope
        try:
            if envelope.outlet is not None:
                await self._actor.opened(envelope.message, envelope.outlet)
            else:
                result = await self._actor.receive(envelope.message)
                if envelope.answer is not None:
                    envelope.answer.reply(result)
        except PdserveError as error:
            if not envelope.fail(error):
                raise
        self._current = None

    async def _tidy(self) -> None:
        """The actor's own end, cut short after `stop_timeout`."""
        try:
            async with asyncio.timeout(self._actor.stop_timeout):
                await self._context.tasks.close()
                await self._actor.stopped(self.failure)
        except Exception as error:
            _log.error("%s did not end cleanly", self.name, exc_info=error)
            self.failure = self.failure or error

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _keep(self, envelope: Envelope[M], outlet: Outlet[Any]) -> None:
        """Streams end with the actor, and a reader that leaves takes its message back."""
        self._outlets[outlet] = None

        def forget() -> None:
            self._outlets.pop(outlet, None)
            self.withdraw(envelope)

        outlet.on_forget = forget

    # ------------------------------------------------------------------ the end

    def _fail_waiting(self) -> None:
        for envelope in self.mailbox.drain():
            envelope.fail(NoActor(f"{self.name} ended before it came to the message"))

    def _shut(self) -> None:
        """Whatever waits for the actor stops waiting. Idempotent."""
        self._closing = True
        self._context.close()
        self._fail_waiting()
        why = "it was stopped" if self.failure is None else repr(self.failure)
        error = ActorFailed(f"{self.name} ended while it had the message: {why}")
        if self._current is not None:
            self._current.fail(error)
        for outlet in tuple(self._outlets):
            outlet.fail(error)

    def _end(self, task: asyncio.Task[None]) -> None:
        """The task is over, even if it was cancelled before its first step."""
        if not task.cancelled() and self.failure is None:
            self.failure = task.exception()
        self._shut()
        if self.failure is not None:
            _log.error("%s failed", self.name, exc_info=self.failure)
        reason = "stopped" if self.failure is None else repr(self.failure)[:_LONGEST]
        self.ended = Terminated(self.ref.address, self.failure is not None, reason)
        self._on_end()
        for watch in tuple(self._watches):
            watch.fire(self.ended)
