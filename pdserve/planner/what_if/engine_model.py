"""Models one worker's engine: prompts in chunks, streams as a fluid between two events.

As in `engine_core.scheduler`, a step gives each stream a token and spends the rest of its budget on
prompts, in their order. Steps that only decode are not looked at one by one: until the next stream
ends or the next prompt comes, the number of tokens per stream follows from the time. Likewise a
prompt that fills several steps alone takes one event.

Time of a step with `tokens` of prompts, n streams and kv tokens, as in `LatencyModel`:

    max(step_base, base + per_token * (tokens + n) + per_pair * pairs)
        + step_sequence * (n + prompts) + step_token * kv

The prefix cache is not modelled: a request brings its number of cached tokens. Blocks are not
either: KV counts in tokens. Owned by `pool_replay`, which calls `wake` at the time `due`.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from math import ceil, inf, sqrt
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.perf_model.latency_model import LatencyModel
    from pdserve.planner.what_if.records import CandidateWorker

__all__ = ["EngineModel", "ModelledRequest"]

_MARGIN: Final = 16
"""Tokens of KV that an admission leaves free for each stream: about half a block."""
_TINY: Final = 1e-12


class ModelledRequest:
    """One request on its way through the model. Times are seconds; -1: not yet."""

    __slots__ = (
        "arrived",
        "asked",
        "at",
        "begun",
        "blocked",
        "cached",
        "claimed",
        "computed",
        "counts",
        "end",
        "first",
        "home",
        "left",
        "output",
        "owed",
        "patience",
        "placed",
        "price",
        "promised",
        "prompt",
        "reserved",
    )

    def __init__(
        self, arrived: Seconds, prompt: int, cached: int, output: int, *, counts: bool = True
    ) -> None:
        self.arrived = arrived
        self.prompt = prompt
        self.cached = cached
        self.output = output
        self.counts = counts
        """False: it stands for what is there already, and nobody asks how it fares."""
        self.placed: Seconds = -1.0
        """When a router chose its worker."""
        self.asked: Seconds = -1.0
        """When KV was kept for it where it decodes: from then on it waits for a worker only."""
        self.blocked: Seconds = -1.0
        """Since when it lacks nothing but KV, or a place, where its prompt is computed."""
        self.begun: Seconds = -1.0
        self.computed: Seconds = -1.0
        self.first: Seconds = -1.0
        self.end: Seconds = -1.0
        self.at = cached
        """The first token that is not computed."""
        self.left = max(1, prompt - cached)
        """Tokens to compute."""
        self.price: Seconds = 0.0
        """Predicted seconds of its prefill where it is."""
        self.patience: Seconds = 0.0
        """For how long it waits for KV to be reserved, and then for a prefill worker."""
        self.owed = output
        """Tokens that its stream has to bring after the present ones."""
        self.home: EngineModel | None = None
        """The worker that decodes it, while another one computes its prompt."""
        self.claimed = False
        """True once a prefill worker has taken its prompt."""
        self.reserved = 0
        """Tokens of KV that it holds where it is computed, until then."""
        self.promised = 0
        """Tokens of KV that its home keeps for it, until its own have come."""

    def __lt__(self, other: ModelledRequest) -> bool:
        return self.arrived < other.arrived


class EngineModel:
    """The engine of one candidate worker."""

    def __init__(self, worker: CandidateWorker, model: LatencyModel) -> None:
        speed = worker.speed
        self.worker = worker
        self.base = model.base * speed
        self.per_token = model.per_token * speed
        self.per_pair = model.per_pair * speed
        self.step_base = model.step_base * speed
        self.step_sequence = model.step_sequence * speed
        self.step_token = model.step_token * speed
        self.capacity: float = worker.kv_tokens or inf
        self.due: Seconds = inf
        """When `wake` must be called next."""
        self.version = 0
        """Changes with `due`, so that the owner can tell stale wake-ups."""
        self.prompts: deque[ModelledRequest] = deque()
        """Prompts to compute; those that have begun come first."""
        self.ready: deque[ModelledRequest] = deque()
        """Requests whose KV has come: they join the streams with the next step."""
        self.streams = 0
        self.kv = 0.0
        """Tokens of the streams."""
        self.held = 0.0
        """Tokens of prompts that have begun, and of reservations."""
        self.work: Seconds = 0.0
        """Predicted seconds of the prompts here."""
        self.computing: Seconds = 0.0
        """Seconds of the steps with prompts in them."""
        self.filled: Seconds = 0.0
        """Seconds of all steps, each times the part of the sequences or of the KV that was in use:
        a worker with one stream is at work all the time, and has room for many."""
        self.peak = 0.0
        self.computed: list[ModelledRequest] = []
        """Prompts whose computation has ended since the owner emptied it."""
        self.stuck = False
        """True while the first prompt waits for KV."""
        self.pending = 0
        """Prompts here that are not computed, also those in the step under way."""
        self.uncomputed = 0
        """Their tokens, without what steps before have computed."""
        self.head: ModelledRequest | None = None
        """The first prompt of the step under way."""
        self._tokens = 0.0
        """Tokens that each stream has brought since the beginning."""
        self._ends: list[tuple[float, ModelledRequest]] = []
        """Streams by the value of `_tokens` at which they end."""
        self._begin: Seconds = 0.0
        self._steps = 0.0
        """Steps under way: tokens that each stream brings until `due`."""
        self._chunks: list[ModelledRequest] | None = None
        """Prompts that are complete when the step under way ends; None: no prompt is in it."""

    # ------------------------------------------------------------------ what routers see

    def wait(self, now: Seconds) -> Seconds:
        """Predicted seconds of the prompts here, less what has passed of the first one."""
        head = self.head
        if head is None:
            return self.work
        passed, most = now - head.begun, 0.9 * head.price
        wait = self.work - (passed if passed < most else most)
        return wait if wait > 0.0 else 0.0

    def waits_until(self, now: Seconds, least: Seconds) -> Seconds:
        """When `wait` will be at most `least` because time passes; infinite: not before a prompt
        is done."""
        wait = self.wait(now) - least
        if wait <= 0.0:
            return now
        head = self.head
        passes = 0.0 if head is None else 0.9 * head.price - (now - head.begun)
        return now + wait if wait <= passes else inf

    def fits(self, tokens: float) -> bool:
        """True if so many more tokens of KV fit."""
        used = self.kv + self.held + _MARGIN * self.streams
        return used + tokens <= self.capacity or used == 0

    @property
    def sequences(self) -> int:
        """Requests here, as routers count them."""
        return self.streams + self.pending + len(self.ready)

    # ------------------------------------------------------------------ what comes

    def offer(self, request: ModelledRequest, now: Seconds) -> None:
        """Queue a prompt."""
        pairs = request.prompt * request.prompt - request.at * request.at
        request.price = self.base + self.per_token * request.left + self.per_pair * pairs
        self.work += request.price
        self.pending += 1
        self.uncomputed += request.left
        self.prompts.append(request)
        self._nudge(now)

    def join(self, request: ModelledRequest, now: Seconds) -> None:
        """Take a request whose KV has come; its tokens are reserved here."""
        self.ready.append(request)
        self._nudge(now)

    def give_back(self, tokens: float, now: Seconds) -> None:
        """A reservation has ended without its KV."""
        self.held -= tokens
        self.stuck = False
        self._nudge(now)

    def resume(self, streams: int, tokens: float, outputs: list[int]) -> None:
        """Begin with so many streams. The last one of `outputs` is what the first one still
        owes."""
        for number in range(streams):
            owed = max(1, outputs[number])
            rest = ModelledRequest(0.0, int(tokens / streams), 0, owed, counts=False)
            rest.first = 0.0
            heappush(self._ends, (float(owed), rest))
        self.streams, self.kv = streams, float(tokens)
        if streams:
            self._plan(0.0)

    def _nudge(self, now: Seconds) -> None:
        """Something can join: end the steps under way early, with a whole step."""
        if self.due == inf:
            self._plan(now)
        elif self._chunks is None and self._may_change():
            steps = self._steps_until(now)
            if steps < self._steps:
                self._steps = steps
                self._set_due(self._begin + self._decode_time(steps))

    def _may_change(self) -> bool:
        return bool(self.ready) or not self.stuck

    # ------------------------------------------------------------------ time

    def _decode_time(self, steps: float) -> Seconds:
        """Seconds of so many steps that only decode, from the present state."""
        n, r = self.streams, self.step_token
        first = self.step_base + self.step_sequence * n + r * self.kv
        return steps * first + r * n * steps * (steps - 1) / 2

    def _steps_until(self, now: Seconds) -> int:
        """Steps until the first one that ends at `now` or later."""
        n, r = self.streams, self.step_token
        first = self.step_base + self.step_sequence * n + r * self.kv
        passed, grows = now - self._begin, r * n
        if grows * passed < 1e-6 * first * first:
            steps = passed / max(first, _TINY)
        else:
            half = first - grows / 2
            steps = (sqrt(half * half + 2 * grows * passed) - half) / grows
        return max(1, ceil(steps - 1e-9))

    def _set_due(self, due: Seconds) -> None:
        self.due = due
        self.version += 1

    # ------------------------------------------------------------------ steps

    def wake(self, now: Seconds) -> bool:
        """The steps under way have ended: take their results in and plan the next. True if a
        stream has ended or a prompt is computed: the owner may have something for the room."""
        freed = self._land(now)
        self._plan(now)
        return freed

    def _land(self, now: Seconds) -> bool:
        begin, steps, took = self._begin, self._steps, now - self._begin
        if self._chunks is not None:
            self.computing += took
        used, limit = (self.kv + self.held) / self.capacity, self.worker.max_sequences
        self.filled += took * max(used, self.streams / limit)
        before = self._tokens
        self._tokens = after = before + steps
        self.kv += self.streams * steps
        ended = False
        ends = self._ends
        while ends and ends[0][0] <= after:
            at, request = heappop(ends)
            request.end = begin + took * (at - before) / steps
            self.streams -= 1
            self.kv -= request.prompt + request.output + (after - at)
            ended = True
        if self._chunks is not None:
            for request in self._chunks:
                self._complete(request, now)
            ended = ended or bool(self._chunks)
            self._chunks = self.head = None
        if not self.streams:
            self.kv = 0.0
        return ended

    def _complete(self, request: ModelledRequest, now: Seconds) -> None:
        self.pending -= 1
        self.uncomputed -= request.left
        self.work = self.work - request.price if self.pending else 0.0
        self.held -= request.reserved
        request.reserved = 0
        if request.computed < 0:
            request.computed = now
        if request.promised:
            self.computed.append(request)
            return
        self._stream(request, now)
        self.computed.append(request)

    def _stream(self, request: ModelledRequest, now: Seconds) -> None:
        """The request has its token: the others follow."""
        if request.first < 0:
            request.first = now
        owed = request.owed - 1
        if owed <= 0:
            request.end = now
            return
        self.streams += 1
        self.kv += request.prompt + request.output - owed
        heappush(self._ends, (self._tokens + owed, request))

    def _plan(self, now: Seconds) -> None:
        self._begin = now
        ready = self.ready
        while ready and self.streams < self.worker.max_sequences:
            request = ready.popleft()
            self.held -= request.promised
            request.promised = 0
            self._stream(request, now)
        used = self.kv + self.held
        if used > self.peak:
            self.peak = used
        if self.prompts and self._plan_prompts(now):
            return
        if not self.streams:
            self._set_due(inf)
            return
        self._plan_decodes()

    def _plan_decodes(self) -> None:
        steps = self._ends[0][0] - self._tokens
        room = self.capacity - self.kv - self.held
        if self.streams * steps > room:
            steps = max(1.0, room // self.streams)
            if room < self.streams:
                self._preempt()
        self._steps = steps
        self._set_due(self._begin + self._decode_time(steps))

    def _preempt(self) -> None:
        """The stream with the most to come gives up its KV, and is computed again later."""
        if self.streams < 2:
            return
        last = max(range(len(self._ends)), key=lambda index: self._ends[index][0])
        at, request = self._ends[last]
        self._ends[last] = self._ends[-1]
        self._ends.pop()
        heapify(self._ends)
        owed = int(at - self._tokens)
        self.streams -= 1
        tokens = request.prompt + request.output - owed
        self.kv -= tokens
        request.owed, request.at, request.left = owed, 0, tokens
        request.price = self.base + self.per_token * tokens + self.per_pair * tokens * tokens
        self.work += request.price
        self.pending += 1
        self.uncomputed += tokens
        self.prompts.appendleft(request)
        self.stuck = True

    def _plan_prompts(self, now: Seconds) -> bool:
        """Plan a step with prompts; False if none can be computed now."""
        budget = self.worker.max_batch_tokens - self.streams
        prompts, done = self.prompts, []
        tokens = 0
        pairs = count = 0.0
        begins = False
        steps = 1
        full = budget
        while prompts and budget > 0:
            request = prompts[0]
            if not request.reserved:
                if not self._admit(request, count):
                    break
                if request.begun < 0:
                    request.begun = now
                begins = True
            count += 1
            left, at = request.left, request.at
            if left > budget and budget == full:
                # It fills whole steps alone.
                steps = left // full
                chunk = steps * full
            else:
                chunk = min(left, budget)
            tokens += chunk
            pairs += (2 * at + chunk) * chunk
            if chunk == left:
                done.append(prompts.popleft())
                budget -= chunk
                continue
            request.left -= chunk
            request.at += chunk
            self.uncomputed -= chunk
            break
        if not count:
            return False
        self.head = done[0] if done else prompts[0]
        self._chunks = done
        self._steps = steps
        tokens += steps * self.streams
        compute = self.per_token * tokens + self.per_pair * pairs + (self.base if begins else 0.0)
        rest = self.step_sequence * (self.streams + count) + self.step_token * self.kv
        self._set_due(now + max(steps * self.step_base, compute) + steps * rest)
        return True

    def _admit(self, request: ModelledRequest, begun: float) -> bool:
        """Reserve the KV of a prompt; False if it has to wait."""
        need = request.at + request.left
        # Where nothing runs, only reservations can be in the way, and those may wait for this one.
        self.stuck = (self.streams > 0 or begun > 0) and not self.fits(need)
        if self.stuck or self.streams + begun >= self.worker.max_sequences:
            if request.blocked < 0:
                request.blocked = self._begin
            return False
        if request.blocked >= 0 and request.begun < 0:
            request.asked += self._begin - request.blocked
        request.reserved = need
        self.held += need
        return True
