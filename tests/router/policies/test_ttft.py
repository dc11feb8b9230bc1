"""The default policy: its sum term by term, and what it must never do."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import pairwise, product
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.ids import NodeId
from pdserve.kv.tiers.lanes import LaneEstimate
from pdserve.perf_model.latency_model import LatencyModel
from pdserve.perf_model.remote_prefill import RemotePrefillEstimate
from pdserve.router.kv_sources import KvHolder
from pdserve.router.onboarding import onboarding_plans
from pdserve.router.policies.base import WorkerKv
from pdserve.router.policies.loader import load_policy
from pdserve.router.policies.ttft import Ttft
from tests.router.policies.support import ask, snapshot, weighed, worker
from tests.router.support import life
from tests.support.records import replace

if TYPE_CHECKING:
    from pdserve.messages.routing import RouteRequest
    from pdserve.router.policies.base import RoutingState, Terms, WorkerView

MODEL = LatencyModel(0.01, 6e-5, 6e-10, 0.008, 1e-4, 1e-8, fitted=True)
PLAIN = Ttft(gamma=0, kappa0=0, kappa1=0, lambda_decode=0)
KINDS = [MODEL, LatencyModel(), LatencyModel(blind=True)]


def state(*workers: WorkerView, **fields: Any) -> RoutingState:
    return snapshot(workers, **{"model": MODEL, "now": 100.0, **fields})


def some_cluster(seed: int, model: LatencyModel = MODEL) -> RoutingState:
    """Workers of all kinds, with and without room."""
    random = Random(seed)
    workers = []
    for index in range(random.randint(2, 12)):
        prefills, decodes = random.randrange(4), random.randrange(8)
        workers.append(
            worker(
                f"w{index}",
                prefills + decodes,
                max_sequences=random.choice((4, 8, 64)),
                prefills=prefills,
                prefill_tokens=prefills * random.randrange(5000),
                decodes=decodes,
                kv_tokens=random.randrange(100_000),
                work=prefills * random.random(),
                head=0.2 * bool(prefills),
                as_of=100.0 - random.random(),
                speed=random.choice((0.5, 1.0, 2.0)),
                blocks_total=random.choice((0, 1000, 10_000)),
                blocks_used=random.randrange(1000),
                blocks_cached=random.randrange(1000),
            )
        )
    overlaps = {w.node: random.choice((0, 0, 5, 200)) for w in workers}
    return state(*workers, overlaps=overlaps, model=model, held=random.choice((0, 9)))


# ---------------------------------------------------------------------- the sum


def term(name: str, policy: Ttft, request: Any = None, **fields: Any) -> float:
    """Of a worker with these numbers, beside an idle one."""
    given = state(worker("a", **fields), worker("b"), overlaps={NodeId("b"): 100})
    return weighed(policy, request or ask(200), given)["a"][name]


def test_an_idle_worker_costs_the_prefill():
    given = state(worker("a"), worker("b", speed=2.0), overlaps={NodeId("b"): 100})
    found = weighed(PLAIN, ask(200), given)
    assert found["a"]["cost"] == found["a"]["prefill"] == pytest.approx(MODEL.prefill(6400))
    assert found["b"]["cost"] == pytest.approx(2 * MODEL.prefill(6400, 3200))


def test_work_passes_but_not_all_of_who_is_late():
    for as_of, wait in ((100.0, 1.0), (99.8, 0.8), (90.0, 0.55), (101.0, 1.0)):
        assert term("wait", PLAIN, work=1.0, head=0.5, as_of=as_of) == pytest.approx(wait)


def test_a_running_step_is_waited_for_but_only_once():
    step = MODEL.step(10, 50_000)
    running = {"decodes": 10, "kv_tokens": 50_000, "speed": 3.0}
    assert term("wait", PLAIN, **running) == pytest.approx(1.5 * step)
    assert term("wait", PLAIN, **running, work=1.0) == 1.0


def test_a_full_worker_is_waited_for():
    full = {"sequences": 8, "max_sequences": 8, "decodes": 8, "kv_tokens": 8000}
    policy = replace(PLAIN, output_tokens=100)
    request = ask(200, max_tokens=1000)
    life = 100 * MODEL.step(8, 8000)
    assert term("wait", policy, request, **full) == pytest.approx(life / 8)
    full["sequences"] = 11
    assert term("wait", policy, request, **full) == pytest.approx(life * 4 / 8)
    short = ask(200, max_tokens=10)
    assert term("wait", policy, short, **full) == pytest.approx(life / 10 * 4 / 8)


def test_blocks_that_are_lacking_are_waited_for():
    short = {"blocks_total": 1000, "blocks_used": 900, "decodes": 4, "kv_tokens": 28_800}
    policy, request = replace(PLAIN, output_tokens=100), ask(200, max_tokens=1000)
    life = 100 * MODEL.step(4, 28_800)
    assert term("wait", policy, request, **short) == pytest.approx(life * 100 / 1000)
    coming = {**short, "prefill_tokens": 6400, "prefills": 1}
    assert term("wait", policy, request, **coming) == pytest.approx(life * 300 / 1000)
    assert term("wait", policy, request, **{**short, "blocks_used": 500}) < life / 50


def test_externality_and_opportunity_grow_with_load():
    price, warm = MODEL.prefill(6400), MODEL.prefill(6400, 3200)
    policy = Ttft(gamma=0.5, kappa0=0.25, kappa1=1.0, lambda_decode=0)
    assert term("externality", policy, prefills=3) == pytest.approx(1.5 * price)
    assert term("opportunity", policy, prefills=3) == pytest.approx(3.25 * (price - warm))
    given = state(worker("a"), worker("b"), overlaps={NodeId("b"): 100}, held=4)
    assert weighed(policy, ask(200), given)["a"]["opportunity"] == pytest.approx(
        2.25 * (price - warm)
    )


def test_running_streams_are_harmed_now_and_later():
    policy = replace(PLAIN, lambda_decode=0.5, output_tokens=100)
    now = 10 * MODEL.prefill(6400)
    later = 100 * (10 * (1e-4 + 1e-8 * 6400) + 1e-4 * 10 + 1e-8 * 50_000)
    found = term("decode", policy, ask(200, max_tokens=500), decodes=10, kv_tokens=50_000)
    assert found == pytest.approx(0.5 * (now + later))


@pytest.mark.parametrize("model", KINDS)
def test_what_is_compared_is_the_sum_of_the_terms(model: LatencyModel):
    for seed in range(200):
        given, policy = some_cluster(seed, model), Ttft(lambda_decode=0.1)
        request = ask(Random(seed).choice((1, 50, 400)), max_tokens=100)
        terms = policy.terms(request, given)
        for view, cost in zip(given.workers, policy.costs(request, given), strict=True):
            parts = terms[view.node]
            assert cost == pytest.approx(parts["cost"])
            assert sum(parts.values()) - parts["cost"] == pytest.approx(cost)


# ---------------------------------------------------------------------- open and closed workers

CROWDED = worker("a", 7, decodes=7, kv_tokens=400_000)
"""Open, with streams that a long prompt would delay."""
QUIET = worker("b", 1, prefills=1, prefill_tokens=6000, work=0.4, as_of=100.0)
"""Closed: it computes a prompt for another 0.4 s, and has no streams."""


def taken(*workers: WorkerView, open_work: float = 0.1, **fields: Any) -> str:
    """The worker that takes a prompt of 12,800 tokens. It delays streams more than 0.4 s."""
    policy, given = Ttft(lambda_decode=0.5, explore=0), state(*workers, open_work=open_work)
    return policy(ask(400), replace(given, **fields), Random(1)).node


def test_who_could_begin_now_does_not_wait_in_an_engine_to_spare_streams():
    assert weighed(Ttft(lambda_decode=0.5), ask(400), state(CROWDED, QUIET))["b"]["wait"] == 0.4
    assert taken(CROWDED, QUIET) == "a"
    assert taken(CROWDED, QUIET, open_work=0.0) == "b"  # nobody waits in the router


def test_who_has_more_of_the_prompt_at_a_closed_worker_waits_there_if_that_is_sooner():
    assert taken(CROWDED, QUIET, overlaps={NodeId("b"): 399}) == "b"
    late = replace(QUIET, work=2.0)
    assert taken(CROWDED, late, overlaps={NodeId("b"): 399}) == "a"


def test_among_open_workers_and_where_none_is_open_the_cost_decides():
    also_open = replace(QUIET, work=0.05)
    assert taken(CROWDED, also_open) == "b"
    closed = replace(CROWDED, prefills=1, work=0.2, as_of=100.0)
    assert taken(closed, QUIET) == "b"
    full = replace(CROWDED, sequences=8)
    assert taken(full, QUIET) == "b"


def test_a_worker_whose_blocks_do_not_suffice_is_not_open():
    assert taken(replace(CROWDED, blocks_total=1000, blocks_used=500), QUIET) == "a"
    assert taken(replace(CROWDED, blocks_total=1000, blocks_used=900), QUIET) == "b"


# ---------------------------------------------------------------------- prompts computed elsewhere

AWAY = RemotePrefillEstimate(0.2, LatencyModel(0.005, 3e-5, 3e-10), latency=0.01, token=1e-5)


def split(seed: int) -> RoutingState:
    """Some of the workers are decode workers."""
    given = some_cluster(seed)
    workers = tuple(replace(w, decode=i % 3 > 0) for i, w in enumerate(given.workers))
    return replace(given, workers=workers, elsewhere=AWAY)


def test_what_is_compared_is_the_sum_of_the_terms_there_too():
    moved = 0
    for seed in range(200):
        given, policy = split(seed), Ttft(lambda_decode=0.1, most_itl=0.01)
        request = ask(Random(seed).choice((1, 50, 400)), max_tokens=100)
        terms = policy.terms(request, given)
        for view, cost in zip(given.workers, policy.costs(request, given), strict=True):
            assert cost == pytest.approx(terms[view.node]["cost"])
            moved += terms[view.node]["transfer"] > 0
    assert moved > 100


def test_a_decode_worker_counts_the_sooner_of_both():
    busy: dict[str, Any] = {"work": 5.0, "as_of": 100.0}
    request = ask(200)
    given = state(worker("a", decode=True, **busy), worker("b", **busy), elsewhere=AWAY)
    found = weighed(PLAIN, request, given)
    assert found["a"]["cost"] == pytest.approx(AWAY.ttft(6400, 0))
    assert found["a"]["wait"] == AWAY.wait
    assert found["a"]["transfer"] == pytest.approx(0.01 + 6400e-5)
    assert found["b"]["cost"] == pytest.approx(5.0 + MODEL.prefill(6400))
    # An idle one computes it itself if that is sooner.
    short = ask(10)
    idle = state(worker("a", decode=True), worker("b"), elsewhere=AWAY)
    assert weighed(PLAIN, short, idle)["a"]["cost"] == pytest.approx(MODEL.prefill(320))
    assert given.ttft(request, given.workers[0]) == pytest.approx(AWAY.ttft(6400, 0))
    assert given.goes_elsewhere(request, given.workers[0])
    assert not given.goes_elsewhere(request, given.workers[1])
    assert not idle.goes_elsewhere(short, idle.workers[0])


def test_a_prefix_counts_for_less_where_prompts_are_computed_elsewhere():
    busy: dict[str, Any] = {"work": 5.0, "as_of": 100.0, "decode": True}
    given = state(
        worker("a", **busy), worker("b", **busy), overlaps={NodeId("b"): 100}, elsewhere=AWAY
    )
    found = weighed(Ttft(), ask(200), given)
    saved = found["a"]["cost"] - found["b"]["cost"]
    assert saved == pytest.approx(3200 * AWAY.token)
    assert saved < MODEL.prefill(6400) - MODEL.prefill(6400, 3200)


def test_prefill_workers_can_be_left_out_of_account():
    busy: dict[str, Any] = {"work": 5.0, "as_of": 100.0, "decode": True}
    given = state(worker("a", **busy), worker("b", **busy), elsewhere=AWAY)
    policy = replace(PLAIN, elsewhere=False)
    assert policy.costs(ask(200), given) == pytest.approx([5.0 + MODEL.prefill(6400)] * 2)


def test_streams_that_would_be_late_count_in_full():
    crowd: dict[str, Any] = {
        "decodes": 40,
        "kv_tokens": 100_000,
        "decode": True,
        "work": 5.0,
        "as_of": 100.0,
    }
    few: dict[str, Any] = {**crowd, "decodes": 4, "kv_tokens": 10_000}
    given = state(worker("a", **crowd), worker("b", **few), elsewhere=AWAY)
    free = weighed(PLAIN, ask(200), given)
    assert free["a"]["cost"] == free["b"]["cost"]
    strict = replace(PLAIN, most_itl=0.01, output_tokens=100)
    bound = weighed(strict, ask(200, max_tokens=1000), given)
    step = MODEL.step(41, 106_400)
    assert bound["a"]["decode"] == pytest.approx(100 * 41 * (step - 0.01))
    assert bound["b"]["decode"] == 0.0
    assert MODEL.step(5, 16_400) < 0.01 < step


def test_all_is_learnt_of_prefill_workers_and_nothing_of_the_rest():
    """Times are used although no prompt was computed where it was decoded."""
    busy: dict[str, Any] = {"sequences": 6, "decodes": 6, "kv_tokens": 30_000, "decode": True}
    idle: dict[str, Any] = {"sequences": 1, "decodes": 1, "kv_tokens": 1000, "decode": True}
    given = state(
        worker("a", **busy), worker("b", **idle), elsewhere=AWAY, model=LatencyModel(0.02, 1e-2)
    )
    costs = Ttft().costs(ask(200), given)
    assert costs[1] < costs[0]


# ---------------------------------------------------------------------- tiers

LANES: dict[Any, LaneEstimate] = {
    "h2d": LaneEstimate(20e9, 0.0001),
    "disk_read": LaneEstimate(2e9, 0.001),
    "fetch": LaneEstimate(5e9, 0.002),
}
MOVES = WorkerKv("h", "k", frozenset({"tcp"}), 4_000_000, LANES)
BEFORE = "146acef8f2a4fa0658b479fa584fc433"
"""What the costs added up to before there were tiers."""


def test_without_lanes_costs_are_the_same_to_the_last_bit():
    """Neither a worker's machine and transfers, nor what others hold, changes a decision."""
    for kv in (WorkerKv(), replace(MOVES, lanes={})):
        found = hashlib.sha256()
        for model, seed in product(KINDS, range(100)):
            request = ask(Random(seed).choice((1, 50, 400)), max_tokens=100)
            for given in (some_cluster(seed, model), replace(split(seed), model=model)):
                workers = tuple(replace(w, kv=kv) for w in given.workers)
                known = replace(given, workers=workers, holders=(HOLDER,))
                costs = Ttft(lambda_decode=0.1, most_itl=0.01).costs(request, known)
                found.update(repr(costs).encode())
                found.update(repr([known.ttft(request, w) for w in known.workers]).encode())
        assert found.hexdigest()[:32] == BEFORE


HOLDER = KvHolder(life("x"), 300, 300, replace(MOVES, lanes={}))


def tiered(seed: int, given: RoutingState, request: RouteRequest) -> RoutingState:
    """Some of the workers have tiers, and know of a worker that has more."""
    random = Random(seed)
    workers = tuple(replace(w, kv=MOVES) if random.random() < 0.7 else w for w in given.workers)
    lower = {}
    for view in workers:
        device = given.overlaps.get(view.node, 0)
        host = device + random.choice((0, 0, 20, 200))
        lower[view.node] = (host, host + random.choice((0, 30)))
    holders = (HOLDER,) if random.random() < 0.5 else ()
    plans = onboarding_plans(
        request, workers, given.overlaps, lower, holders, given.model, given.now
    )
    return replace(given, workers=workers, lower=lower, holders=holders, onboarding=plans)


@pytest.mark.parametrize("model", KINDS)
def test_what_is_compared_is_the_sum_of_the_terms_with_tiers_too(model: LatencyModel):
    planned = 0
    for seed in range(200):
        request = ask(Random(seed).choice((1, 50, 400)), max_tokens=100)
        given = some_cluster(seed, model) if seed % 2 else replace(split(seed), model=model)
        given, policy = tiered(seed, given, request), Ttft(lambda_decode=0.1)
        planned += len(given.onboarding)
        terms = policy.terms(request, given)
        for view, cost in zip(given.workers, policy.costs(request, given), strict=True):
            assert cost == pytest.approx(terms[view.node]["cost"])
    assert planned > 300


def brought(host: int, view: WorkerView, **fields: Any) -> Terms:
    """The terms of a worker whose host has blocks, beside an idle one without any."""
    request = ask(200)
    given = state(view, worker("z"), **fields)
    plans = onboarding_plans(
        request, given.workers, {}, {view.node: (host, host)}, (), MODEL, given.now
    )
    return weighed(Ttft(), request, replace(given, onboarding=plans))[str(view.node)]


def test_a_prefix_on_the_host_costs_its_way_up_and_what_is_left_to_compute():
    found = brought(100, worker("a", kv=MOVES))
    compute, onboard = MODEL.prefill(6400, 3200), 0.0001 + 400e6 / 20e9
    assert found["prefill"] == pytest.approx(compute)
    assert found["wait"] + found["onboard"] + found["prefill"] == pytest.approx(onboard + compute)
    assert found["opportunity"] == 0.0, "no worker would compute less"
    assert found["lanes"] == 0.0, "no one waits in its lanes"
    assert brought(100, worker("a", kv=MOVES, work=9.0, as_of=100.0))["onboard"] < 1e-9


def test_what_would_be_fetched_stays_an_opportunity_where_it_is():
    """Or copies of a prefix would take the room of others."""
    request, found = ask(200), []
    for fetched in (0.0, 0.5, 1.0):
        given = state(worker("a", kv=MOVES), worker("x", kv=MOVES), overlaps={NodeId("x"): 180})
        holders = (KvHolder(life("x"), 180, 180, replace(MOVES, lanes={})),)
        plans = onboarding_plans(
            request, given.workers, given.overlaps, {}, holders, MODEL, given.now
        )
        known = replace(given, onboarding=plans)
        policy = Ttft(kappa0=1.0, fetched=fetched)
        found.append(weighed(policy, request, known)["a"]["opportunity"])
        assert policy.costs(request, known)[0] == pytest.approx(
            weighed(policy, request, known)["a"]["cost"]
        )
    lacking = MODEL.prefill(6400) - MODEL.prefill(6400, 180 * 32)
    assert found == pytest.approx([0.0, 0.5 * lacking, lacking])


def test_who_fills_a_busy_lane_delays_others():
    lanes = {**LANES, "h2d": LaneEstimate(20e9, 0.0001, backlog=400_000_000)}
    found = brought(100, worker("a", kv=replace(MOVES, lanes=lanes)))
    assert found["lanes"] == pytest.approx(0.5 * 400e6 / 20e9 / 2)
    assert found["onboard"] > brought(100, worker("a", kv=MOVES))["onboard"]


def test_the_less_a_tier_has_the_more_it_costs():
    costs = [brought(host, worker("a", kv=MOVES))["cost"] for host in (0, 20, 60, 120, 199)]
    assert costs == sorted(costs, reverse=True)


# ---------------------------------------------------------------------- without a model


def test_without_a_model_tokens_are_counted():
    given = state(
        worker("a", prefills=1, prefill_tokens=3000), worker("b", speed=9.0), model=LatencyModel()
    )
    found = weighed(PLAIN, ask(100), given)
    prior = LatencyModel()
    assert found["b"]["cost"] == pytest.approx(prior.base + 3200 * prior.per_token)
    assert found["a"]["wait"] == pytest.approx(prior.base + 3000 * prior.per_token)


def test_blind_it_counts_requests_and_the_uncached_share():
    given = state(
        worker("a", 2), worker("b", 1), overlaps={NodeId("a"): 75}, model=LatencyModel(blind=True)
    )
    found = weighed(PLAIN, ask(100), given)
    assert found["a"]["cost"] == pytest.approx(2.25)
    assert found["b"]["cost"] == pytest.approx(2.0)


# ---------------------------------------------------------------------- what it must never do


@pytest.mark.parametrize("model", KINDS)
def test_permuting_the_workers_changes_nothing(model: LatencyModel):
    for seed in range(100):
        given, request = some_cluster(seed, model), ask(100)
        random = Random(seed)
        shuffled = list(given.workers)
        random.shuffle(shuffled)
        renamed = {old.node: new.node for old, new in zip(given.workers, shuffled, strict=True)}
        moved = replace(
            given,
            workers=tuple(
                sorted(
                    (replace(w, node=renamed[w.node]) for w in given.workers),
                    key=lambda w: w.node,
                )
            ),
            overlaps={renamed[node]: blocks for node, blocks in given.overlaps.items()},
        )
        before, after = weighed(Ttft(), request, given), weighed(Ttft(), request, moved)
        assert all(
            before[old]["cost"] == pytest.approx(after[new]["cost"]) for old, new in renamed.items()
        )


@pytest.mark.parametrize("model", KINDS)
def test_an_idle_identical_worker_never_raises_the_best_cost(model: LatencyModel):
    for seed in range(100):
        given, request = some_cluster(seed, model), ask(100)
        best = min(Ttft().costs(request, given))
        more = replace(given, workers=(*given.workers, worker("z")))
        assert min(Ttft().costs(request, more)) <= best * (1 + 1e-9)


def test_speeds_scale_all_times():
    for seed in range(100):
        given, request = some_cluster(seed), ask(100)
        slower = replace(
            given,
            workers=tuple(
                replace(w, speed=3 * w.speed, work=3 * w.work, head=3 * w.head, as_of=100.0)
                for w in given.workers
            ),
        )
        still = replace(given, workers=tuple(replace(w, as_of=100.0) for w in given.workers))
        for one, three in zip(
            Ttft().costs(request, still), Ttft().costs(request, slower), strict=True
        ):
            assert three == pytest.approx(3 * one)


class Cluster:
    """Workers that take prompts one after the other, and remember all they saw."""

    def __init__(self, policy: Ttft, speeds: list[float], seed: int = 1) -> None:
        self.policy, self.random = policy, Random(seed)
        self.speeds = {f"w{i}": speed for i, speed in enumerate(speeds)}
        self.queues: dict[str, list[tuple[float, float, int]]] = {n: [] for n in self.speeds}
        self.cached: dict[str, Counter[int]] = {n: Counter() for n in self.speeds}
        self.now = 0.0

    def view(self, node: str) -> WorkerView:
        self.queues[node] = [item for item in self.queues[node] if item[0] > self.now]
        queue = self.queues[node]
        left = sum(min(work, end - self.now) for end, work, _ in queue)
        return worker(
            node,
            len(queue),
            max_sequences=64,
            prefills=len(queue),
            prefill_tokens=sum(tokens for _, _, tokens in queue),
            work=left,
            as_of=self.now,
            speed=self.speeds[node],
        )

    def place(self, group: int, blocks: int, common: int) -> str:
        """A prompt whose first `common` blocks are its group's."""
        request = ask(blocks, first=group)
        overlaps = {NodeId(n): self.cached[n][group] for n in self.speeds if self.cached[n][group]}
        given = state(*map(self.view, self.speeds), overlaps=overlaps, now=self.now)
        chosen = str(self.policy(request, given, self.random).node)
        work = self.speeds[chosen] * MODEL.prefill(
            blocks * 32, min(self.cached[chosen][group] * 32, blocks * 32 - 1)
        )
        queue = self.queues[chosen]
        begin = max([self.now, *(end for end, _, _ in queue)])
        queue.append((begin + work, work, blocks * 32))
        self.cached[chosen][group] = common
        return chosen


@pytest.mark.parametrize("gap", [0.0, 0.005, 0.02])
def test_a_common_system_prompt_does_not_send_all_to_one(gap: float):
    """8,000 tokens of every prompt are the same."""
    cluster, placed = Cluster(Ttft(), [1.0] * 8), Counter[str]()
    for _ in range(400):
        placed[cluster.place(group=1, blocks=270, common=250)] += 1
        cluster.now += gap
    assert len(placed) == 8 or gap == 0.02
    assert max(placed.values()) < (200 if gap == 0.02 else 80), placed


def test_a_slow_worker_never_gains_share():
    shares = []
    for speed in (1.0, 2.0, 4.0, 8.0):
        cluster, placed = Cluster(Ttft(), [speed, 1.0, 1.0, 1.0]), Counter[str]()
        for number in range(1000):
            placed[cluster.place(group=number % 50, blocks=100, common=90)] += 1
            cluster.now += 0.03
        shares.append(placed["w0"])
    assert shares[0] > 100
    assert all(less <= more + 15 for more, less in pairwise(shares)), shares
    assert shares[-1] < shares[0] / 2


# ---------------------------------------------------------------------- ties and exploration


def test_near_equals_share_and_the_rest_get_nothing():
    views = [worker("a"), worker("b", work=0.0005), worker("c", work=5.0)]
    policy, random = Ttft(explore=0), Random(1)
    drawn = Counter(policy(ask(100), state(*views), random).node for _ in range(400))
    assert set(drawn) == {"a", "b"}
    assert min(drawn.values()) > 120


def test_exploration_looks_a_little_further():
    views = [worker("a"), worker("b", work=0.02), worker("c", work=5.0)]
    policy, random = Ttft(explore=0.5, gamma=0), Random(1)
    drawn = Counter(policy(ask(100), state(*views), random).node for _ in range(400))
    assert set(drawn) == {"a", "b"}
    assert 50 < drawn[NodeId("b")] < 150


# ---------------------------------------------------------------------- options


def test_options_are_given_by_name():
    assert load_policy("pdserve.router.policies.ttft:Ttft", {"kappa0": "0"}) == Ttft(kappa0=0.0)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_options_are_never_negative(value: float):
    with pytest.raises(ValueError, match="option gamma must be 0 or more"):
        Ttft(gamma=value)
