"""One request on its way: from router to worker, and to the next worker if that one does not keep
it.

It knows what the request has been through: who refused it, how long it was held, when it began. A
worker that has accepted a request and then finds no room for it is like one that did not accept it,
as long as no token came. How routers and workers are reached is `cluster`'s business. Owned by
whoever opened it; ends by `cancel`, an error, or its last token.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Protocol

from msgspec.structs import replace

from pdserve.blocks.hashing import short_names
from pdserve.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineError,
    LinkError,
    NoWorker,
    Overloaded,
    PdserveError,
    Unavailable,
)
from pdserve.frontend.placement import Placement
from pdserve.messages.routing import Route

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Coroutine

    from pdserve.engine.api import TokenSink
    from pdserve.frontend.channel import RemoteSequence
    from pdserve.frontend.hints import Hints
    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.request import GenerateRequest, TokenDelta
    from pdserve.messages.routing import Routed

__all__ = ["Errand", "Ways", "refused"]

_log = logging.getLogger(__name__)

_ATTEMPTS: Final = 4
"""Workers that one request may fail to reach before its client hears of it."""
_PAUSE: Final[Seconds] = 0.05
"""Before a router that is behind is asked again."""
_NOTICED: Final[Seconds] = 0.1
"""Waiting for a router or a worker that shortens a request's deadline."""
_ELSEWHERE: Final = (LinkError, Unavailable, Overloaded, EngineDied)
"""What one worker may answer that another need not."""


class Ways(Protocol):
    """What an errand needs of the cluster."""

    rerouted: int

    def now(self) -> Seconds: ...

    def block_size(self, model: str) -> int:
        """Tokens of the model's blocks; 0 if it is not served."""
        ...

    async def route(self, errand: Errand) -> tuple[NodeId, Routed]:
        """A router and its answer."""
        ...

    async def place(
        self, request: GenerateRequest, sink: TokenSink, router: NodeId, routed: Routed
    ) -> RemoteSequence | None:
        """Hand the request to the worker that was named; None: in a life that is over."""
        ...

    async def wait_news(self, *, timeout: Seconds = 1.0) -> None: ...

    def run(self, errand: Errand, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """In the background; `Errand.fail` if it is cut short."""
        ...


class Errand:
    """See `backend.OpenStream`. It is the worker's sink until the first token."""

    __slots__ = (
        "_again",
        "_begun",
        "_held",
        "_last",
        "_names",
        "_on_placed",
        "_over",
        "_sequence",
        "_sink",
        "_start",
        "_ways",
        "_worker",
        "attempts",
        "excluded",
        "hints",
        "request",
    )

    def __init__(
        self,
        ways: Ways,
        request: GenerateRequest,
        sink: TokenSink,
        hints: Hints,
        on_placed: Callable[[Placement], None],
    ) -> None:
        self.request = request
        self.hints = hints
        self.attempts = 0
        """Answers of routers so far."""
        self.excluded: list[NodeId] = []
        """Workers that did not take it."""
        self._ways = ways
        self._sink = sink
        self._on_placed = on_placed
        self._start = ways.now()
        self._names = short_names(request.block_names)
        self._held: Seconds = 0.0
        self._last: PdserveError | None = None
        self._worker: NodeId | None = None
        self._sequence: RemoteSequence | None = None
        self._begun = False
        """A token has come."""
        self._over = False
        self._again: asyncio.Task[None] | None = None

    def question(self) -> Route:
        """What a router is asked, now.

        Errors: `DeadlineExceeded`.
        """
        request, hints = self.request, self.hints
        remaining = self.remaining
        if remaining is not None and remaining <= 0:
            raise DeadlineExceeded("the request's time ran out while it waited for a worker")
        return Route(
            request_id=request.request_id,
            attempt=self.attempts,
            model=request.model,
            prompt_tokens=len(request.prompt) + max(map(len, request.output), default=0),
            max_tokens=request.sampling.max_tokens,
            n=request.n,
            priority=request.priority,
            excluded=(*hints.denied, *self.excluded),
            allowed=hints.allowed,
            names=self._names,
            names_id=request.names_id if self._names else b"",
            block_size=self._ways.block_size(request.model) if self._names else 0,
            session_id=hints.session_id,
            tenant=hints.tenant,
            weight=hints.weight,
            waited=hints.waited + self._spent,
            deadline=remaining,
            slo_ttft=hints.slo_ttft,
        )

    @property
    def remaining(self) -> Seconds | None:
        """Of the request's deadline; None: it has none."""
        deadline = self.request.deadline
        return None if deadline is None else deadline - self._spent

    @property
    def _spent(self) -> Seconds:
        return max(0.0, self._ways.now() - self._start)

    # ------------------------------------------------------------------ the way there

    async def dispatch(self) -> None:
        """Until a worker has taken it. Raises what `backend.Backend.open` raises."""
        ways, model = self._ways, self.request.model
        while self.attempts < _ATTEMPTS:
            try:
                router, routed = await ways.route(self)
            except NoWorker as error:
                raise (error if self._last is None else refused(model, self._last)) from None
            self._note(router, routed)
            try:
                sequence = await ways.place(self._request_now(), self, router, routed)
            except _ELSEWHERE as error:
                self._count_out(routed.worker, error)
                continue
            if sequence is not None:
                self._keep(sequence)
                return
            await ways.wait_news(timeout=_PAUSE)  # of the life that the worker has begun
        raise refused(model, self._last)

    def _note(self, router: NodeId, routed: Routed) -> None:
        """Before the worker is asked: its tokens may come at once."""
        self.attempts += 1
        self._held += routed.held
        self._worker = routed.worker
        predicted = routed.predicted_ttft
        overlap = routed.overlap_blocks
        self._on_placed(
            Placement(
                worker=routed.worker,
                router=router,
                policy=routed.policy,
                attempts=self.attempts,
                overlap_tokens=overlap * self._ways.block_size(self.request.model),
                predicted_ttft=(
                    None if predicted is None else self.hints.waited + self._spent + predicted
                ),
                held=self._held,
            )
        )

    def _request_now(self) -> GenerateRequest:
        """With the time that is left of its deadline; what is too short to matter is not worth a
        copy."""
        remaining = self.remaining
        if remaining is None or self._spent < _NOTICED:
            return self.request
        return replace(self.request, deadline=max(0.001, remaining))

    def _count_out(self, worker: NodeId, error: PdserveError) -> None:
        _log.info("worker %s did not take a request: %s", worker, error)
        self._ways.rerouted += 1
        self._last = error
        self.excluded.append(worker)

    def _keep(self, sequence: RemoteSequence) -> None:
        self._sequence = sequence
        if self._begun:
            sequence.sink = self._sink

    # ------------------------------------------------------------------ until the first token

    def on_delta(self, delta: TokenDelta) -> None:
        """The first tokens: from now on they take the straight way."""
        if self._over:
            return
        self._begun = True
        if self._sequence is not None:
            self._sequence.sink = self._sink
        self._sink.on_delta(delta)

    def on_error(self, error: PdserveError) -> None:
        """A worker whose queue was full when the request reached it: another may have room."""
        if self._over:
            return
        worker = self._worker
        full = isinstance(error, Overloaded) and not self._begun
        if worker is None or not full or self.attempts >= _ATTEMPTS:
            self._sink.on_error(error)
            return
        self._count_out(worker, error)
        try:
            self._again = self._ways.run(self, self._dispatch_again())
        except PdserveError as closed:  # this process is going away
            self.fail(closed)

    async def _dispatch_again(self) -> None:
        try:
            await self.dispatch()
        except PdserveError as error:
            self.fail(error)
        except Exception as error:
            _log.exception("a request could not be sent on")
            self.fail(EngineError(f"{type(error).__name__} in the frontend"))

    # ------------------------------------------------------------------ the end

    def fail(self, error: PdserveError) -> None:
        """It ends so, unless it is over."""
        if not self._over:
            self._over = True
            self._sink.on_error(error)

    def cancel(self) -> None:
        """See `backend.OpenStream`."""
        self._over = True
        if self._again is not None:
            self._again.cancel()
        if self._sequence is not None:
            self._sequence.cancel()


def refused(model: str, last: PdserveError | None) -> PdserveError:
    """What a client hears when no worker is left to ask: what the last one said, if one spoke;
    addresses that did not answer are the operator's concern."""
    if last is None:
        return NoWorker(f"no worker takes requests for {model!r} at the moment", retry_after=1.0)
    if isinstance(last, LinkError):
        return NoWorker(f"no worker of {model!r} could be reached", retry_after=1.0)
    return last
