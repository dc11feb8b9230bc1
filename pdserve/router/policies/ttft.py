"""The default policy: the soonest first token, at the least harm to other requests.

    cost = wait + prefill + transfer                 the request's own time to first token
         + gamma * n * prefill                       externality: its work delays who waits there
         + (kappa0 + kappa1 * n) * (prefill - warm)  opportunity: work a cached prefix would save
         + lambda_decode * decode                    harm to streams that run there

in seconds, the least wins. Of worker i, with its learnt `speed` and the learnt model of time:

    prefill  speed * model.prefill(L, cached there)
    warm     the same, were the longest prefix of any worker cached there
    n        unfinished prompts there, and its share of those that are held in the router; not the
             mean of all workers: an idle one delays no request, however long queues are elsewhere,
             and a prefix that all want must spread
    wait     the greatest of: predicted work before it, less what has passed (`WorkerView.wait`);
             half a decode step, because a step that runs is not interrupted; and, where sequences
             or blocks run out, the time until enough of them are free again: with the mean request
             giving out `output_tokens`, one of d sequences ends every  output_tokens * step / d
    transfer to the worker that decodes; 0 where the same one computes the prompt
    decode   every stream waits while the prompt is computed, and each of its own tokens and theirs
             takes longer afterwards:  d * prefill
             + output_tokens * speed * (d * (q + r * L) + q * d + r * kv),  q and r the step's
             prices of a sequence and a token (`step_sequence`, `step_token`). By what its steps
             then exceed `most_itl`, all streams are late: that counts in full

A decode worker's prompt may be computed by a prefill worker instead
(`pdserve.perf_model.remote_prefill.RemotePrefillEstimate`): if its first token is predicted sooner
so, then wait and prefill are the queue's and the prefill worker's, transfer is that of the tokens
which are not cached here, and the computation delays no request here: no externality, no
opportunity, no d * prefill. A prefix cached here then saves its transfer alone. The queue takes
care of the prefixes that prefill workers have cached.

A worker with tiers may be expected to bring up a longer prefix than its device has, or to fetch it
from another worker (`pdserve.router.onboarding.Onboarding`). Its prefill is then that of the rest,
warm is the least that any worker would compute, and there are two more terms:

    onboard  how much later than wait + prefill the first token comes, because the KV comes later
    lanes    gamma * sum over lanes of  bytes / bandwidth * backlog / (backlog + bytes): the bytes
             delay those which others wait for

What would be fetched counts in the opportunity term as if it were computed, times `fetched`: the
copy takes the room of another prefix, and where the prefix is, it stays. A copy that will not be
kept counts in full: no later request finds it.

    fetch    what a fetch has to gain: `fetch_gain`, and the harm that its owner's load report
             overstates. Of d streams in a report, one may be this conversation's last turn, which
             has ended; and of the others one ends every  output_tokens * step / d

While some worker is open (`RoutingState.open_work`) and has blocks for the prompt, a closed one is
chosen only if the first token comes sooner there than at every open one, because it has more of the
prompt. A request that waits in an engine cannot move, and shorter ones that come later wait behind
it; held in the router it could still go anywhere. And what the terms say against the open worker is
not saved by going elsewhere: the next held request goes there.

All within `tolerance` of the best count as equal and one is drawn, so that routers which know the
same do not all choose the same; once in a while (`explore`) one within `explore_within` of the best
is drawn, so that every worker's speed stays known.

Where the ideas are from. Least predicted time to first token: Mooncake (FAST'25), here with
gamma = kappa = 0. Prefill times (1 + those before): LMetric (OSDI'26). Prefix first until
saturated: Preble (ICLR'25) and llm-d, reached as kappa grows. The sum in one physical unit
degenerates to each of these; its terms grow with load, so there is no threshold at which behaviour
jumps. Near saturation the cache hit rate is capacity, and minimising only one's own time wastes it.

If the model of time is not fitted (nothing learnt yet, or it predicts badly), the same sum counts
uncached tokens at a fixed price; if even those say nothing (`LatencyModel.blind`), requests:
sequences there + the uncached part of the prompt, from 0 to 1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import compress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.perf_model.latency_model import LatencyModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random

    from pdserve.ids import NodeId, Seconds
    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, Terms, WorkerView

__all__ = ["Ttft"]


@dataclass(frozen=True, slots=True)
class Ttft:
    """Numbers without a unit are weights. The defaults lie in the middle of wide valleys: near
    saturation, halving or doubling one moves the mean TTFT by less than noise does. Leaving one
    term out costs 1 to 4 % of mean TTFT there, and nothing measurable beyond saturation
    (bench/results/policies.md)."""

    gamma: float = 0.5
    kappa0: float = 1.0
    """Opportunity weight. Up to 4 the hit rate rises, and so does, at low load, the wait at workers
    with the prefix.
    """
    kappa1: float = 0.5
    lambda_decode: float = 0.05
    """Decode harm weight. 0.1 and more: smoother streams; long prompts wait for workers without
    streams.
    """
    fetched: float = 0.5
    """Share of the opportunity cost that a prefix keeps which would be fetched: its copy takes the
    room of another prefix. Near saturation of a conversation trace, 0 loses a tenth of the hits and
    1 some of the balance.
    """
    fetch_gain: Seconds = 0.01
    """What a fetch from another worker has to gain: it costs time at both, and predictions of short
    times are off by this much.
    """
    elsewhere: bool = True
    """Take remote prefill into account."""
    most_itl: Seconds = 0.0
    """Inter-token latency that streams should keep; 0: no limit."""
    output_tokens: int = 256
    """Expected output tokens of a request that may generate that many."""
    tolerance: float = 0.02
    """Costs within this share of the best count as equal."""
    explore: float = 0.01
    """Share of decisions that explore; 0: none."""
    explore_within: float = 0.2
    """An exploring decision draws among workers within this share of the best cost."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) < float("inf"):
                raise ValueError(f"option {field.name} must be 0 or more")

    def __call__(self, request: RouteRequest, state: RoutingState, random: Random) -> WorkerView:
        state = _may_take(request, state)
        workers = state.workers
        if len(workers) == 1:
            return workers[0]
        costs = self.costs(request, state)
        best = min(costs)
        explores = random.random() < self.explore
        margin = self.explore_within if explores else self.tolerance
        limit = best + margin * best
        near = [index for index, cost in enumerate(costs) if cost <= limit]
        return workers[near[0] if len(near) == 1 else random.choice(near)]

    def costs(self, request: RouteRequest, state: RoutingState) -> list[Seconds]:
        """The cost of each of the state's workers, in their order."""
        if state.model.fitted or state.elsewhere is not None:
            return self._timed(request, state)
        waits, prices = self._counted(request, state)
        warm, held = min(prices), state.held / len(state.workers)
        return [
            wait + price + self._harm(worker.prefills + held, price, warm)
            for worker, wait, price in zip(state.workers, waits, prices, strict=True)
        ]

    def _timed(self, request: RouteRequest, state: RoutingState) -> list[Seconds]:
        """The costs with a latency model: one pass, without calls for most workers, because it runs
        for each request over hundreds of them. `terms` computes the same readably.
        """
        model, now, overlaps = state.model, state.now, state.overlaps
        step, q, r = model.step_base, model.step_sequence, model.step_token
        length, size = request.prompt_tokens, request.block_size
        cold, each, pair = model.prefill(length), model.per_token, model.per_pair
        most_cached = max(0, length - 1)
        warm = _warmest(request, state)
        gamma, kappa0, kappa1, harm = self.gamma, self.kappa0, self.kappa1, self.lambda_decode
        fetched = self.fetched
        held = state.held / len(state.workers)
        output = self._output(request)
        stream = output * (q + r * request.prompt_tokens)
        n, block = request.n, size or _BLOCK
        need = block * _blocks(request)
        away = state.elsewhere if self.elsewhere else None
        far = 0.0 if away is None else away.ttft(length, length)
        late = self.most_itl
        costs: list[Seconds] = []
        add = costs.append
        plans = state.onboarding
        doubts = self._doubts(request, state) if plans else {}
        for worker in state.workers:
            speed = worker.speed
            price = cold
            cached = overlaps.get(worker.node, 0) * size
            if cached:
                if cached > most_cached:
                    cached = most_cached
                price -= cached * (each + pair * cached)
            price *= speed
            plan = plans.get(worker.node) if plans else None
            lacks = price
            if plan is not None:
                price = plan.compute
                lacks = price + (fetched if plan.kept else 1.0) * (plan.alone - price)
            wait = worker.work
            if wait:
                passed, most = now - worker.as_of, 0.9 * worker.head
                if passed > 0.0:
                    wait -= most if passed > most else passed
                    if wait < 0.0:
                        wait = 0.0
            decodes = worker.decodes
            if away is not None and worker.decode:
                there = far + away.token * (length - cached)
                if there < (wait + price if plan is None else plan.ttft(wait)):
                    room = self._room(request, state, worker)
                    add(max(there, room) + self._streams(request, state, worker, 0.0))
                    continue
            waiting = worker.prefills + held
            cost = price + gamma * waiting * price
            cost += (kappa0 + kappa1 * waiting) * (lacks - speed * warm)
            if decodes:
                read = q * decodes + r * worker.kv_tokens
                cost += harm * (decodes * price + speed * (decodes * stream + output * read))
                half = 0.5 * speed * (step + read)
                if wait < half:
                    wait = half
            if worker.sequences + n > worker.max_sequences or (
                (total := worker.blocks_total)
                and block * (total - worker.blocks_used) < need + worker.prefill_tokens
            ):
                room = self._room(request, state, worker)
                if wait < room:
                    wait = room
            if late:
                cost += self._late(request, state, worker)
            if plan is not None:
                wait = plan.ttft(wait) - price + gamma * plan.delay
                if plan.peer is not None:
                    wait += doubts[plan.peer]
            add(wait + cost)
        return costs

    def terms(self, request: RouteRequest, state: RoutingState) -> Mapping[NodeId, Terms]:
        """The terms of the cost in seconds, or their substitutes if the latency model is not
        fitted.
        """
        if state.model.fitted or state.elsewhere is not None:
            warm, doubts = _warmest(request, state), self._doubts(request, state)
            found = {w.node: self._terms_of(request, state, w, warm, doubts) for w in state.workers}
        else:
            found = self._counted_terms(request, state)
        return {node: {**terms, "cost": sum(terms.values())} for node, terms in found.items()}

    def _counted_terms(
        self, request: RouteRequest, state: RoutingState
    ) -> dict[NodeId, dict[str, float]]:
        waits, prices = self._counted(request, state)
        warm, held = min(prices), state.held / len(state.workers)
        return {
            worker.node: {
                "wait": wait,
                **self._prefill_terms(worker.prefills + held, price, price - warm),
                "decode": 0.0,
            }
            for worker, wait, price in zip(state.workers, waits, prices, strict=True)
        }

    def _prefill_terms(self, waiting: float, price: Seconds, lacking: Seconds) -> dict[str, float]:
        """`lacking`: prefill time beyond that of the worker which has most of the prompt."""
        return {
            "prefill": price,
            "transfer": 0.0,
            "externality": self.gamma * waiting * price,
            "opportunity": (self.kappa0 + self.kappa1 * waiting) * lacking,
        }

    def _terms_of(
        self,
        request: RouteRequest,
        state: RoutingState,
        worker: WorkerView,
        warm: Seconds,
        doubts: Mapping[NodeId, Seconds],
    ) -> dict[str, float]:
        """The terms of one worker; `warm`: at speed 1; `doubts`: those of fetches, by owner."""
        moved = self._moved(request, state, worker)
        if moved is not None:
            return moved
        plan, wait = state.onboarding.get(worker.node), self._wait(request, state, worker)
        if plan is None:
            cached = state.cached_tokens(request, worker)
            price = worker.speed * state.model.prefill(request.prompt_tokens, cached)
            lacking, brought = price - worker.speed * warm, {}
        else:
            price = plan.compute
            share = self.fetched if plan.kept else 1.0
            lacking = price + share * (plan.alone - price) - worker.speed * warm
            brought = {
                "onboard": max(0.0, plan.ttft(wait) - wait - price),
                "lanes": self.gamma * plan.delay,
                "fetch": 0.0 if plan.peer is None else doubts[plan.peer],
            }
        waiting = worker.prefills + state.held / len(state.workers)
        return {
            "wait": wait,
            **brought,
            **self._prefill_terms(waiting, price, lacking),
            "decode": self._streams(request, state, worker, price),
        }

    def _doubts(self, request: RouteRequest, state: RoutingState) -> dict[NodeId, Seconds]:
        """What fetches have to gain, by the worker that owns the prefix."""
        owners = {plan.peer for plan in state.onboarding.values() if plan.peer is not None}
        if not owners:
            return {}
        doubts = dict.fromkeys(owners, self.fetch_gain)
        for worker in state.workers:
            if worker.node in owners and worker.decodes:
                doubts[worker.node] += self._overstated(request, state, worker)
        return doubts

    def _overstated(
        self, request: RouteRequest, state: RoutingState, worker: WorkerView
    ) -> Seconds:
        """Harm at a worker of the streams in its report that may have ended since."""
        model, streams = state.model, worker.decodes
        step = worker.speed * model.step(streams, worker.kv_tokens)
        age = max(0.0, state.now - worker.reported_at)
        ended = min(streams, 1.0 + streams * age / max(step * self.output_tokens, _TINY))
        price = worker.speed * model.prefill(
            request.prompt_tokens, state.reused_tokens(request, worker)
        )
        harm = self.lambda_decode * self._decode(request, state, worker, price) + 0.5 * step
        return harm * ended / streams

    def _moved(
        self, request: RouteRequest, state: RoutingState, worker: WorkerView
    ) -> dict[str, float] | None:
        """The terms with remote prefill; None: it is impossible or not sooner than local
        prefill.
        """
        away = state.elsewhere
        if not self.elsewhere or away is None or not worker.decode:
            return None
        length, cached = request.prompt_tokens, state.cached_tokens(request, worker)
        there, plan = away.ttft(length, cached), state.onboarding.get(worker.node)
        wait = worker.wait(state.now)
        here = (
            wait + worker.speed * state.model.prefill(length, cached)
            if plan is None
            else plan.ttft(wait)
        )
        if there >= here:
            return None
        room = self._room(request, state, worker)
        return {
            "wait": away.wait + max(0.0, room - there),
            "prefill": away.model.prefill(length),
            "transfer": away.moving(length - cached),
            "externality": 0.0,
            "opportunity": 0.0,
            "decode": self._streams(request, state, worker, 0.0),
        }

    def _streams(
        self, request: RouteRequest, state: RoutingState, worker: WorkerView, price: Seconds
    ) -> Seconds:
        """The decode harm: cost to running streams and to the request's own."""
        harm = self.lambda_decode * self._decode(request, state, worker, price)
        return harm + (self._late(request, state, worker) if self.most_itl else 0.0)

    def _late(self, request: RouteRequest, state: RoutingState, worker: WorkerView) -> Seconds:
        """Total excess over `most_itl` of all streams at the worker, the request's own included."""
        streams = worker.decodes + request.n
        tokens = worker.kv_tokens + request.prompt_tokens
        step = worker.speed * state.model.step(streams, tokens)
        return self._output(request) * streams * max(0.0, step - self.most_itl)

    def _wait(self, request: RouteRequest, state: RoutingState, worker: WorkerView) -> Seconds:
        step = 0.0
        if worker.decodes:
            step = worker.speed * state.model.step(worker.decodes, worker.kv_tokens)
        return max(worker.wait(state.now), 0.5 * step, self._room(request, state, worker))

    def _decode(
        self, request: RouteRequest, state: RoutingState, worker: WorkerView, price: Seconds
    ) -> Seconds:
        if not worker.decodes:
            return 0.0
        model, output = state.model, self._output(request)
        q, r = model.step_sequence, model.step_token
        longer = q + r * request.prompt_tokens
        own = q * worker.decodes + r * worker.kv_tokens
        return worker.decodes * price + output * worker.speed * (worker.decodes * longer + own)

    def _room(self, request: RouteRequest, state: RoutingState, worker: WorkerView) -> Seconds:
        """Time until enough sequences and blocks are free there; 0: there is room now."""
        life = worker.speed * state.model.step(max(1, worker.decodes), worker.kv_tokens)
        life *= self._output(request)
        crowd = (worker.sequences + request.n - worker.max_sequences) / worker.max_sequences
        return life * max(0.0, crowd, _lacking(request, state, worker))

    def _harm(self, waiting: float, price: Seconds, warm: Seconds) -> Seconds:
        """The externality and opportunity terms."""
        return self.gamma * waiting * price + (self.kappa0 + self.kappa1 * waiting) * (price - warm)

    def _counted(
        self, request: RouteRequest, state: RoutingState
    ) -> tuple[list[float], list[float]]:
        """Waits and prices without a latency model: tokens at a fixed price, or requests. Then a
        fetch is not known to be any sooner than to compute: only what the worker has counts."""
        length = max(1, request.prompt_tokens)
        uncached = [length - _own_tokens(request, state, worker) for worker in state.workers]
        if state.model.blind:
            return [float(w.sequences) for w in state.workers], [u / length for u in uncached]
        base, each = _FIXED.base, _FIXED.per_token
        return (
            [base * w.prefills + each * w.prefill_tokens for w in state.workers],
            [base + each * u for u in uncached],
        )

    def _output(self, request: RouteRequest) -> int:
        return min(self.output_tokens, request.max_tokens)


def _may_take(request: RouteRequest, state: RoutingState) -> RoutingState:
    """The state with only those workers that are open and have blocks for the prompt, and those
    that are sooner than each of these."""
    workers, now, work = state.workers, state.now, state.open_work
    if not work:
        return state
    waits = [worker.wait(now) for worker in workers]
    is_open = [
        wait < work
        and worker.sequences < worker.max_sequences
        and not _lacking(request, state, worker)
        for worker, wait in zip(workers, waits, strict=True)
    ]
    if all(is_open) or not any(is_open):
        return state
    soonest = min(state.ttft(request, worker) for worker in compress(workers, is_open))
    kept = tuple(
        worker
        for worker, wait, now_open in zip(workers, waits, is_open, strict=True)
        if now_open or (wait < soonest and state.ttft(request, worker) < soonest)
    )
    return replace(state, workers=kept)


_TINY = 1e-9

_BLOCK = 32
"""Tokens per block if the request does not say."""


def _own_tokens(request: RouteRequest, state: RoutingState, worker: WorkerView) -> int:
    """Prompt tokens that the worker would reuse without another worker."""
    plan = state.onboarding.get(worker.node)
    if plan is None or plan.peer is None:
        return state.reused_tokens(request, worker)
    return min(plan.blocks.own * request.block_size, max(0, request.prompt_tokens - 1))


def _blocks(request: RouteRequest) -> int:
    return -(-request.prompt_tokens // (request.block_size or _BLOCK))


def _lacking(request: RouteRequest, state: RoutingState, worker: WorkerView) -> float:
    """Blocks that would be missing, as a share of all. The cached prefix occupies free blocks in
    the same proportion as the worker's valid blocks are unused.
    """
    total, used = worker.blocks_total, worker.blocks_used
    if not total:
        return 0.0
    size = request.block_size or _BLOCK
    need = used + worker.prefill_tokens / size - (-request.prompt_tokens // size)
    if need <= total:
        return 0.0
    valid = used + worker.blocks_cached
    if valid:
        need -= state.overlaps.get(worker.node, 0) * used / valid
    return max(0.0, need / total - 1.0)


def _warmest(request: RouteRequest, state: RoutingState) -> Seconds:
    """The least prefill time at speed 1 that any worker needs: with the longest prefix that one has
    or would bring up."""
    length, overlaps, deepest = request.prompt_tokens, state.overlaps, 0
    if overlaps:
        deepest = max([overlaps.get(worker.node, 0) for worker in state.workers])
    cached = min(deepest * request.block_size, max(0, length - 1))
    warm = state.model.prefill(length, cached)
    if not state.onboarding:
        return warm
    plans = state.onboarding
    speeds = {worker.node: worker.speed for worker in state.workers if worker.node in plans}
    return min([warm, *(plans[node].compute / speed for node, speed in speeds.items())])


_FIXED = LatencyModel()
