"""Replays requests through the model of a whole pool: router, prefill queue, engines, links.

It follows the cluster where that decides who is late:

    router         holds requests while no worker is open, the shortest first; places each at the
                   worker with the least cost (`router.policies.ttft`, without cache terms)
    decode worker  reserves KV, then lets a prefill worker compute the prompt, or computes it
                   itself, by the rule of `worker.disagg.policy`
    prefill queue  gives prompts to prefill workers with credits, the shortest first
    links          carry one prompt's KV after the other, while later parts are still computed

Everything is deterministic. Times are those of `engine_model`; the owner draws the requests.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Final

from pdserve.planner.what_if.engine_model import EngineModel, ModelledRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.ids import Seconds
    from pdserve.perf_model.latency_model import LatencyModel
    from pdserve.planner.what_if.records import CandidatePool, Handoffs

__all__ = ["PoolReplay"]

_OPEN: Final[Seconds] = 0.1
"""`RouterConfig.hold_work`: a worker with less predicted work takes held requests."""
_AGEING: Final = 0.1
"""`admission_queue.AGEING`, in seconds of work per second."""
_QUEUE_AGEING: Final = 4000.0
"""`PrefillQueueConfig.ageing`, in tokens per second."""
_GAMMA, _HARM, _OUTPUT = 0.5, 0.05, 256
"""`Ttft.gamma`, `Ttft.lambda_decode`, `Ttft.output_tokens`."""
_STREAM_HARM: Final = 0.6
"""`worker.disagg.policy`: what a delay of a running stream costs, in seconds of first token."""
_AHEAD, _AT_LEAST = 2, 2
"""`worker.disagg.credits`: steps of prompts that a prefill worker claims, and fewest prompts."""
_PATIENCE: Final[Seconds] = 1.0
_ALWAYS_PATIENCE: Final[Seconds] = 30.0
"""`worker.disagg.policy`: how long a prompt waits for a prefill worker at least."""
_LEAST_GAIN: Final[Seconds] = 1e-9
"""What a remote prefill gains where a rule asks for it, whatever is predicted."""
_UNFILLED: Final = 0.3
"""`TransferSpec.unfilled`: the part of a pool that may be reserved for prompts on their way."""
_ENDLESS: Final = 3600.0
"""Seconds after the last arrival at which a replay ends: what has not come by then is late."""
_LOOK: Final = 16
"""Workers among which a request is placed; of more, another window for each request."""


class _Link:
    """The network of one worker: when it is free again to send, or to receive."""

    __slots__ = ("free",)

    def __init__(self) -> None:
        self.free: Seconds = 0.0


class _Decoder:
    """What a decode worker adds to its engine: reservations, and its link."""

    __slots__ = ("coming", "engine", "link", "unfilled", "waiting")

    def __init__(self, engine: EngineModel) -> None:
        self.engine = engine
        self.link = _Link()
        self.unfilled = 0.0
        """Tokens reserved for prompts that are computed elsewhere."""
        self.coming = 0.0
        """Tokens that are to come over the link, of those without a reservation too."""
        self.waiting: deque[ModelledRequest] = deque()
        """Prompts without a reservation."""


class PoolReplay:
    """One replay of one pool."""

    def __init__(
        self,
        pool: CandidatePool,
        model: LatencyModel,
        handoffs: Handoffs,
        requests: Sequence[ModelledRequest],
        outputs: Callable[[int], list[int]],
    ) -> None:
        """`requests` in order of arrival. `outputs` draws what so many present streams still
        owe."""
        self._model = model
        self._handoffs = handoffs
        self._requests = requests
        self.engines = [EngineModel(worker, model) for worker in pool.workers]
        self._events: list[tuple[Seconds, int, Callable[..., None], tuple[object, ...]]] = []
        self._ids = count()
        self._held: list[tuple[float, int, ModelledRequest]] = []
        """Heap of requests that wait in the router."""
        self._serving: list[EngineModel] = []
        self._takers: list[EngineModel] = []
        """Workers that compute prompts of others."""
        self._decoders: dict[EngineModel, _Decoder] = {}
        self._senders: dict[EngineModel, _Link] = {}
        self._queue: list[tuple[float, int, ModelledRequest]] = []
        """Heap of prompts that wait for a prefill worker. Those that gave up have no home."""
        self._queued = 0
        self._queued_work: Seconds = 0.0
        self._window = 0
        self._mean = 0.0
        """Mean length of claimed prompts."""
        self._next_look: Seconds = inf
        self.now: Seconds = 0.0
        for engine in self.engines:
            self._open(engine, outputs)

    def _open(self, engine: EngineModel, outputs: Callable[[int], list[int]]) -> None:
        worker = engine.worker
        if worker.mode in ("decode", "both"):
            self._decoders[engine] = _Decoder(engine)
        if worker.mode in ("prefill", "both"):
            self._senders[engine] = _Link()
        if worker.streams:
            engine.resume(worker.streams, worker.stream_tokens, outputs(worker.streams))
        if worker.backlog:
            rest = ModelledRequest(0.0, worker.backlog, 0, 1, counts=False)
            engine.offer(rest, 0.0)
        self._after(engine)
        if worker.ready > 0:
            self._at(worker.ready, self._begin, engine)
        else:
            self._begin(engine)
        if worker.leaves < inf:
            self._at(worker.leaves, self._leave, engine)

    def _begin(self, engine: EngineModel) -> None:
        if engine.worker.mode != "prefill":
            self._serving.append(engine)
        if engine in self._senders:
            self._takers.append(engine)
        self._look()
        self._match()

    def _leave(self, engine: EngineModel) -> None:
        if engine in self._serving:
            self._serving.remove(engine)
        if engine in self._takers:
            self._takers.remove(engine)

    # ------------------------------------------------------------------ time

    def _at(self, time: Seconds, call: Callable[..., None], *arguments: object) -> None:
        heappush(self._events, (time, next(self._ids), call, arguments))

    def run(self) -> None:
        """Replay until every request has ended, nothing more can happen, or it takes for ever."""
        events, requests = self._events, self._requests
        index, total = 0, len(requests)
        arrival = requests[0].arrived if requests else inf
        end = _ENDLESS + (requests[-1].arrived if requests else 0.0)
        while True:
            if events and events[0][0] > end and index == total:
                return
            if events and events[0][0] <= arrival:
                self.now, _, call, arguments = heappop(events)
                call(*arguments)
            elif index < total:
                self.now = arrival
                self._arrive(requests[index])
                index += 1
                arrival = requests[index].arrived if index < total else inf
            else:
                return

    def _after(self, engine: EngineModel) -> None:
        """Something was given to the engine: it may have another time to wake."""
        if engine.due < inf:
            heappush(
                self._events,
                (engine.due, next(self._ids), self._wake, (engine, engine.version)),
            )

    def _wake(self, engine: EngineModel, version: int) -> None:
        if engine.version != version:
            return
        freed = engine.wake(self.now)
        self._after(engine)
        if not freed:
            return
        if engine.computed:
            computed, engine.computed = engine.computed, []
            for request in computed:
                if request.promised:
                    self._send(request, engine)
            if engine in self._senders and self._queue:
                self._match()
        decoder = self._decoders.get(engine)
        if decoder is not None and decoder.waiting:
            self._reserve(decoder)
        if self._held and engine in self._serving:
            if self._is_open(engine):
                self._look()
            else:
                self._look_at(engine)

    # ------------------------------------------------------------------ router

    def _arrive(self, request: ModelledRequest) -> None:
        if not self._held and self._has_open():
            self._place(request)
            return
        first = not self._held
        cost = self._model.prefill(request.prompt, request.cached)
        heappush(self._held, (cost + _AGEING * request.arrived, next(self._ids), request))
        if first:  # else the next look is known, and until then no worker opens
            self._look_later()

    def _has_open(self) -> bool:
        return any(map(self._is_open, self._serving))

    def _is_open(self, engine: EngineModel) -> bool:
        work = engine.work
        if work:
            head = engine.head
            # The least that `engine.wait` can be: most of a replay's time goes into these calls.
            if work >= _OPEN and (head is None or work - 0.9 * head.price >= _OPEN):
                return False
            if engine.wait(self.now) >= _OPEN:
                return False
        return engine.sequences < engine.worker.max_sequences

    def _look(self) -> None:
        """Place held requests while a worker is open."""
        held = self._held
        while held and self._has_open():
            self._place(heappop(held)[2])
        if held:
            self._look_later()

    def _look_later(self) -> None:
        """A worker opens shortly before its prompts are done."""
        for engine in self._serving:
            self._look_at(engine)

    def _look_at(self, engine: EngineModel) -> None:
        """As `_look_later`, for one worker. One that has all its sequences opens when one ends."""
        if not engine.work or engine.sequences >= engine.worker.max_sequences:
            return
        time = engine.waits_until(self.now, _OPEN) + 0.001
        if time < self._next_look or (self._next_look <= self.now and time < inf):
            self._next_look = time
            self._at(time, self._look)

    def _place(self, request: ModelledRequest) -> None:
        engine = self._choose(request)
        request.placed = self.now
        if engine in self._decoders:
            self._dispose(request, self._decoders[engine])
        else:
            request.asked = self.now
            engine.offer(request, self.now)
            self._after(engine)

    def _choose(self, request: ModelledRequest) -> EngineModel:
        """The worker with the least cost: of the open ones, if there are any. That a closed one is
        sooner because of its prefix does not occur here."""
        serving = self._serving
        if len(serving) == 1:
            return serving[0]
        if len(serving) > _LOOK:
            self._window = start = (self._window + _LOOK) % len(serving)
            serving = (serving + serving)[start : start + _LOOK]
        now, model = self.now, self._model
        price = model.prefill(request.prompt, request.cached)
        serving = [engine for engine in serving if self._is_open(engine)] or serving
        away = self._away(request)
        held = len(self._held) / len(serving)
        need, output = request.prompt, _OUTPUT
        q, r = model.step_sequence, model.step_token
        longer = output * (q + r * need)
        best, least = serving[0], inf
        for engine in serving:
            n, speed = engine.streams, engine.worker.speed
            own = price * speed
            wait = engine.wait(now)
            cost = 0.0
            if n:
                read = q * n + r * engine.kv
                cost = _HARM * speed * (n * longer + output * read)
                half = 0.5 * speed * (model.step_base + read)
            if away < wait + own and engine in self._decoders:
                cost += away
            else:
                waiting = engine.pending + held
                cost += own * (1 + _GAMMA * waiting) + (_HARM * n * own if n else 0.0)
                cost += half if n and half > wait else wait
            if not engine.fits(need) or engine.sequences >= engine.worker.max_sequences:
                cost += self._room(engine, need)
            if cost < least:
                best, least = engine, cost
        return best

    def _room(self, engine: EngineModel, need: int) -> Seconds:
        """Seconds until there is room for so many tokens, as routers guess it."""
        model, worker = self._model, engine.worker
        life = worker.speed * model.step(max(1, engine.streams), int(engine.kv)) * _OUTPUT
        crowd = (engine.sequences + 1 - worker.max_sequences) / worker.max_sequences
        lacking = (engine.kv + engine.held + need) / engine.capacity - 1.0
        return life * max(0.0, crowd, lacking)

    def _away(self, request: ModelledRequest) -> Seconds:
        """Predicted seconds to the first token with a remote prefill; infinite without one."""
        if not self._takers or self._handoffs.disagg == "never":
            return inf
        handoffs = self._handoffs
        moved = handoffs.latency + handoffs.token * (request.prompt - request.cached)
        return self._queue_wait() + self._model.prefill(request.prompt, request.cached) + moved

    def _queue_wait(self) -> Seconds:
        """Seconds until a prefill worker takes a prompt: the work ahead over the workers; 0 while
        one is idle."""
        takers = self._takers
        if any(self._credits(engine) for engine in takers):
            return 0.0
        work = self._queued_work + sum(engine.work for engine in takers)
        return work / len(takers)

    # ------------------------------------------------------------------ where to prefill

    def _dispose(self, request: ModelledRequest, decoder: _Decoder) -> None:
        gain = self._gain(request, decoder)
        if gain <= 0:
            self._stay(request, decoder)
            return
        request.patience = _ALWAYS_PATIENCE if gain == inf else max(_PATIENCE, 2 * gain)
        decoder.waiting.append(request)
        decoder.coming += request.prompt - request.cached
        self._reserve(decoder)
        if request.home is None:
            self._at(self.now + request.patience, self._tire_of_waiting, request, decoder)

    def _stay(self, request: ModelledRequest, decoder: _Decoder) -> None:
        request.asked = self.now
        decoder.engine.offer(request, self.now)
        self._after(decoder.engine)

    def _gain(self, request: ModelledRequest, decoder: _Decoder) -> Seconds:
        """Seconds to the first token that a remote prefill saves; infinite where it is not asked
        for, 0 or less: the prompt is computed where it is decoded."""
        handoffs = self._handoffs
        if handoffs.disagg == "never" or not self._takers:
            return 0.0
        if handoffs.disagg == "always":
            return inf
        here, there = self._predicted(request, decoder)
        if handoffs.disagg == "rule":
            uncached = request.prompt - request.cached
            short = handoffs.min_tokens and uncached <= handoffs.min_tokens
            away = not short and self._queued <= handoffs.max_queue
            return max(_LEAST_GAIN, here - there) if away else 0.0
        return here - there

    def _predicted(self, request: ModelledRequest, decoder: _Decoder) -> tuple[Seconds, Seconds]:
        """Seconds to the first token here, with the harm to streams, and elsewhere."""
        engine, handoffs = decoder.engine, self._handoffs
        own = engine.worker.speed * self._model.prefill(request.prompt, request.cached)
        here = engine.work + own * (1 + _STREAM_HARM * engine.streams)
        moved = handoffs.latency + handoffs.token * (request.left + decoder.coming)
        price = self._model.prefill(request.prompt, request.cached)
        return here, self._queue_wait() + price + moved

    def _reserve(self, decoder: _Decoder) -> None:
        """Queue the prompts for which KV can be reserved."""
        engine, waiting = decoder.engine, decoder.waiting
        limit = _UNFILLED * engine.capacity
        while waiting:
            request = waiting[0]
            need = request.prompt + 1
            if decoder.unfilled and decoder.unfilled + need > limit:
                return
            if not engine.fits(need):
                return
            waiting.popleft()
            request.promised = need
            request.home = engine
            request.asked = self.now
            engine.held += need
            decoder.unfilled += need
            self._enqueue(request)

    # ------------------------------------------------------------------ prefill queue

    def _enqueue(self, request: ModelledRequest) -> None:
        key = request.left + _QUEUE_AGEING * self.now
        request.price = self._model.prefill(request.prompt, request.cached)
        self._queued += 1
        self._queued_work += request.price
        heappush(self._queue, (key, next(self._ids), request))
        self._match()
        if not request.claimed:
            self._at(self.now + request.patience, self._tire, request)

    def _credits(self, engine: EngineModel) -> int:
        """Prompts that a prefill worker would claim now."""
        worker, claimed = engine.worker, engine.pending
        whole = worker.mode == "prefill"
        room = (_AHEAD if whole else worker.share) * worker.max_batch_tokens - engine.uncomputed
        wanted = (_AT_LEAST if whole else 1) - claimed
        if room > 0:
            wanted = max(wanted, int(room / max(1.0, self._mean or worker.max_batch_tokens)))
        return min(wanted, worker.max_sequences - claimed)

    def _match(self) -> None:
        """Give waiting prompts to workers with credits: to the one that would be done first."""
        queue = self._queue
        while queue:
            request = queue[0][2]
            if request.home is None:
                heappop(queue)
                continue
            free = [engine for engine in self._takers if self._credits(engine) > 0]
            if not free:
                return
            heappop(queue)
            self._claim(request, min(free, key=_uncomputed))

    def _claim(self, request: ModelledRequest, engine: EngineModel) -> None:
        self._queued -= 1
        self._queued_work -= request.price
        self._mean += (0.1 if self._mean else 1.0) * (request.prompt - self._mean)
        request.claimed = True
        engine.offer(request, self.now)
        self._after(engine)

    def _tire_of_waiting(self, request: ModelledRequest, decoder: _Decoder) -> None:
        """A prompt for which no KV can be reserved is computed where it will be decoded."""
        if request.home is not None or request.asked >= 0:
            return
        decoder.waiting.remove(request)
        decoder.coming -= request.prompt - request.cached
        self._stay(request, decoder)
        self._reserve(decoder)

    def _tire(self, request: ModelledRequest) -> None:
        """A prompt that no prefill worker has taken is computed where it will be decoded."""
        home = request.home
        if home is None or request.claimed:
            return
        self._queued -= 1
        self._queued_work -= request.price
        decoder = self._decoders[home]
        self._release(request, decoder)
        self._stay(request, decoder)
        self._reserve(decoder)

    def _release(self, request: ModelledRequest, decoder: _Decoder) -> None:
        decoder.unfilled -= request.promised
        decoder.coming -= request.prompt - request.cached
        promised, request.promised = request.promised, 0
        request.home = None
        decoder.engine.give_back(promised, self.now)

    def _send(self, request: ModelledRequest, engine: EngineModel) -> None:
        """Move a computed prompt's KV to where it is decoded. Parts go while later ones are
        computed, so only the last step's are left if the links are fast enough."""
        assert request.home is not None
        handoffs, tokens = self._handoffs, request.prompt - request.cached
        sender, receiver = self._senders[engine], self._decoders[request.home].link
        begin = max(request.begun, sender.free, receiver.free)
        last = min(tokens, engine.worker.max_batch_tokens) * handoffs.token
        end = max(self.now + last, begin + tokens * handoffs.token)
        sender.free = receiver.free = end
        self._at(end + handoffs.latency, self._arrived, request)

    def _arrived(self, request: ModelledRequest) -> None:
        home = request.home
        assert home is not None
        decoder = self._decoders[home]
        decoder.unfilled -= request.promised
        decoder.coming -= request.prompt - request.cached
        home.join(request, self.now)
        self._after(home)
        if decoder.waiting:
            self._reserve(decoder)


def _uncomputed(engine: EngineModel) -> int:
    return engine.uncomputed
