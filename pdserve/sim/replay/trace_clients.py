"""Sends each request of a trace at its time through a frontend's dispatch.

A trace client stands in for HTTP and never disconnects. A request that follows another has a prompt
that begins with the other's prompt and answer. Requests carry their own block hashes, since a real
frontend hashes off its loop.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Final

from pdserve.blocks.hashing import HASH_SECRET_TEST, block_hashes, hash_secret_id, root_hash
from pdserve.errors import PdserveError
from pdserve.frontend.routing_hints import NO_HINTS, RoutingHints
from pdserve.messages.demand import EndedRequest
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.sim.replay.cluster import MODEL
from pdserve.sim.replay.record import ReplayRecord, outcome_of
from pdserve.sim.workloads.trace_request import tokens_of
from pdserve.token_ids import token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.frontend.dispatch.cluster_client import ClusterClient
    from pdserve.frontend.placement import Placement
    from pdserve.ids import Seconds
    from pdserve.messages.request import TokenDelta
    from pdserve.sim.verdicts import Verdicts
    from pdserve.sim.workloads.trace_request import TraceRequest

__all__ = ["TraceClients"]

_MOST_TOKENS: Final = 4096
"""What clients ask for, who do not know what they will get."""
_NAMES_ID: Final = hash_secret_id(HASH_SECRET_TEST)


class TraceClients:
    """The clients of one replay."""

    def __init__(
        self,
        backends: Sequence[ClusterClient],
        trace: Iterator[TraceRequest],
        *,
        on_end: Callable[[ReplayRecord], None] = lambda record: None,
        on_asked: Callable[[int, int, bytes], None] = lambda number, tokens, names: None,
        patience: Seconds = 0.0,
        judge: Callable[[ReplayRecord], Verdicts] = lambda record: (),
        most_idle: Seconds = inf,
    ) -> None:
        """`judge` gives the verdicts on a request that has ended, which its router is told. Of a
        time without any request the cluster lives through the last `most_idle` seconds; the rest is
        skipped."""
        self.judge = judge
        self.records: list[ReplayRecord] = []
        """The records in the order of the trace."""
        self._backends = backends
        self._trace = trace
        self._on_end = on_end
        self._on_asked = on_asked
        self._deadline = patience or None
        self._most_idle = most_idle
        self._loop = asyncio.get_running_loop()
        self._begin = self._loop.time()
        self._read: TraceRequest | None = None
        """The next request, if it is known already."""
        self._timer: asyncio.TimerHandle | None = None
        """Comes back for it."""
        self._finished_reading = False
        self._open = 0
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._talks: dict[int, _Talk] = {}
        """Conversations by their last open request; only for traces with conversations."""

    def now(self) -> Seconds:
        """Seconds since the trace's beginning."""
        return self._loop.time() - self._begin

    async def run(self) -> None:
        """Send all requests; returns when the last one has ended."""
        self._next()
        await self._over

    def stop(self, reason: Exception) -> None:
        """End `run` with `reason`, whatever is still open."""
        if not self._over.done():
            self._over.set_exception(reason)

    # ------------------------------------------------------------------ request times

    def _next(self) -> None:
        """Ask all that is due, and come back for the next."""
        now = self.now()
        while True:
            request = self._read or next(self._trace, None)
            self._read = None
            if request is None:
                self._finished_reading = True
                self._end_if_over()
                return
            if request.at > now:
                self._read = request
                self._timer = self._loop.call_at(self._begin + request.at, self._next)
                self._skip_idle()
                return
            self._take(request)

    def _skip_idle(self) -> None:
        """While no request is open, puts the trace's clock forward to the last part of a long idle
        time."""
        if self._open or self._read is None or self._timer is None:
            return
        idle = self._read.at - self.now() - self._most_idle
        if idle > 0:
            self._begin -= idle
            self._timer.cancel()
            self._timer = self._loop.call_at(self._begin + self._read.at, self._next)

    def _take(self, request: TraceRequest) -> None:
        record = ReplayRecord(
            number=request.number,
            arrival=request.at,
            prompt_tokens=0,
            wanted_tokens=request.output_tokens,
            session=request.session,
            tenant=request.tenant,
        )
        self.records.append(record)
        self._open += 1
        if request.session:
            self._talks[request.number] = _Talk()
        if request.after is None:
            self._ask(request, record, [])
        elif (talk := self._talks.get(request.after)) is not None:
            talk.follow(lambda said: self._follow(request, record, said))
        else:
            self._follow(request, record, None)

    def _follow(self, request: TraceRequest, record: ReplayRecord, said: list[int] | None) -> None:
        """What it follows has ended; None: not well."""
        if said is None:
            record.arrival = self.now()
            self._end(request, record, "not asked", None)
            return
        self._loop.call_later(request.pause, self._ask, request, record, said)

    # ------------------------------------------------------------------ requests

    def _ask(self, request: TraceRequest, record: ReplayRecord, said: list[int]) -> None:
        record.arrival = self.now()
        prompt = said + tokens_of(request.pieces)
        record.prompt_tokens = len(prompt)
        caller = _Caller(self, request, record, prompt)
        task = self._loop.create_task(self._open_stream(caller), name=f"request {request.number}")
        self._tasks[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]

    async def _open_stream(self, caller: _Caller) -> None:
        request = caller.request
        turn = request.number if request.frontend is None else request.frontend
        backend = self._backends[turn % len(self._backends)]
        asked = self._request(caller, backend)
        try:
            await backend.open(asked, caller, _hints(request), caller.on_placed, ended=caller.told)
        except PdserveError as error:
            caller.on_error(error)
            if (ended := caller.told()) is not None and ended.verdicts:
                backend.note_ended(ended)

    def _request(self, caller: _Caller, backend: ClusterClient) -> GenerateRequest:
        wanted = caller.record.wanted_tokens
        names = self._names(caller.prompt, backend)
        self._on_asked(caller.record.number, len(caller.prompt), names)
        return GenerateRequest(
            request_id=f"r{caller.record.number}",
            model=MODEL,
            prompt=token_ids(caller.prompt),
            sampling=SamplingParams(
                max_tokens=max(wanted, _MOST_TOKENS),
                temperature=0.0,
                ignore_eos=True,
                # The simulated engine reads the true length from the seed; see
                # `pdserve.sim.replay.engine`.
                seed=wanted,
            ),
            priority=caller.request.priority,
            deadline=self._deadline,
            block_names=names,
            names_id=_NAMES_ID,
        )

    def _names(self, prompt: list[int], backend: ClusterClient) -> bytes:
        card = backend.cards().get(MODEL)
        if card is None:
            return b""
        root = root_hash(HASH_SECRET_TEST, card.compat_hash, None, None)
        size = card.block_size
        return b"".join(block_hashes(prompt, size, parent=root, secret=HASH_SECRET_TEST))

    # ------------------------------------------------------------------ the end

    def ended(self, caller: _Caller, outcome: str) -> None:
        """A client's request has ended."""
        said = None
        if outcome == "completed" and caller.answer is not None:
            said = caller.prompt + caller.answer
        self._end(caller.request, caller.record, outcome, said)

    def _end(
        self, request: TraceRequest, record: ReplayRecord, outcome: str, said: list[int] | None
    ) -> None:
        if self._over.done():
            # The cluster is stopped below requests that nobody wants to see the end of.
            return
        record.outcome = outcome
        record.end = self.now()
        self._open -= 1
        talk = self._talks.pop(request.number, None)
        if talk is not None:
            talk.end(said)
        self._on_end(record)
        self._skip_idle()
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._finished_reading and self._open == 0 and not self._over.done():
            self._over.set_result(None)


class _Caller:
    """One request; see `engine.port.TokenSink`."""

    __slots__ = ("_owner", "_told", "answer", "prompt", "record", "request")

    def __init__(
        self, owner: TraceClients, request: TraceRequest, record: ReplayRecord, prompt: list[int]
    ) -> None:
        self.request = request
        self.record = record
        self.prompt = prompt
        self.answer: list[int] | None = [] if request.session else None
        """Kept where another may follow."""
        self._owner = owner
        self._told = False

    def told(self) -> EndedRequest | None:
        """How the request ended, for its router, once; None: it goes on, or it was said."""
        record = self.record
        if self._told or not record.outcome:
            return None
        self._told = True
        return EndedRequest(
            MODEL,
            record.prompt_tokens,
            min(record.cached_tokens, record.prompt_tokens),
            record.output_tokens,
            max(0.0, record.last - record.first),
            complete=record.completed,
            verdicts=self._owner.judge(record),
        )

    def on_placed(self, placement: Placement) -> None:
        """A worker is asked to take it: the last one that was, has."""
        record = self.record
        record.routed = self._owner.now()
        record.worker = placement.worker
        record.router = placement.router
        record.held = placement.held
        predicted = placement.predicted_ttft
        record.predicted = -1.0 if predicted is None else predicted

    def on_delta(self, delta: TokenDelta) -> None:
        record = self.record
        if self.answer is not None:
            self.answer += delta.tokens
        record.take(delta, self._owner.now())
        finish = delta.finish
        if finish is None:
            return
        if finish.reason == "length" and record.output_tokens == record.wanted_tokens:
            self._owner.ended(self, "completed")
        else:
            record.reason = f"{finish.reason} after {record.output_tokens} tokens {finish.message}"
            self._owner.ended(self, "failed")

    def on_error(self, error: PdserveError) -> None:
        self.record.reason = f"{type(error).__name__}: {error.message}"
        self._owner.ended(self, outcome_of(error))


class _Talk:
    """The followers of one request, which wait for its end. They are added at its start, because a
    conversation is read as a whole."""

    __slots__ = ("_followers",)

    def __init__(self) -> None:
        self._followers: list[Callable[[list[int] | None], None]] = []

    def follow(self, then: Callable[[list[int] | None], None]) -> None:
        self._followers.append(then)

    def end(self, said: list[int] | None) -> None:
        """`said`: prompt and answer; None: it did not end well."""
        for then in self._followers:
            then(said)


def _hints(request: TraceRequest) -> RoutingHints:
    if not request.session and not request.tenant and request.slo_ttft is None:
        return NO_HINTS
    return RoutingHints(
        session_id=request.session,
        tenant=request.tenant,
        weight=request.weight,
        slo_ttft=request.slo_ttft,
    )
