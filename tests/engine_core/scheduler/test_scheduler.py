"""The scheduler's rules, one by one: plans are looked at directly, tokens are given by the test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pdserve.blocks.hashing import HASH_SECRET_TEST
from pdserve.engine_core.executor import StepPlan, StepResult
from pdserve.engine_core.scheduler.block_hasher import BlockHasher
from pdserve.engine_core.scheduler.scheduler import Scheduler
from pdserve.engine_core.scheduler.scheduler_state import SchedulerLimits
from pdserve.errors import ConfigError, ContextLengthExceeded, InvalidRequest, Overloaded
from pdserve.kv.block_pool import BlockPool
from pdserve.messages.request import (
    MAX_WORKER_PHASES,
    Finish,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
)
from pdserve.token_ids import token_ids
from pdserve.wire.codec import encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.engine_core.scheduler.sequence import Sequence

SIZE = 4


def request(prompt: int | list[int] = 6, **changes: Any) -> GenerateRequest:
    """`prompt` as a number: that many tokens, the same ones in every prompt."""
    sampling = {
        key: changes.pop(key) for key in list(changes) if key in SamplingParams.__struct_fields__
    }
    tokens = list(range(10, 10 + prompt)) if isinstance(prompt, int) else prompt
    return GenerateRequest(
        request_id="r",
        model="m",
        prompt=token_ids(tokens),
        sampling=SamplingParams(**({"max_tokens": 8} | sampling)),
        **changes,
    )


class Bench:
    """A scheduler with a pool and a clock that counts steps."""

    def __init__(self, blocks: int = 64, *, cache: bool = True, **limits: Any) -> None:
        self.pool = BlockPool(blocks, SIZE)
        names = BlockHasher(HASH_SECRET_TEST, SIZE, "test") if cache else None
        defaults: dict[str, Any] = {
            "max_model_len": min(128, blocks * SIZE),
            "vocab_size": 1000,
            "max_batch_tokens": 32,
            "max_sequences": 8,
        }
        self.scheduler = Scheduler(self.pool, SchedulerLimits(**(defaults | limits)), names)
        self.now = 0.0
        self.next_handle = 0
        self.ends: dict[tuple[int, int], Finish] = {}
        self.deltas: list[TokenDelta] = []
        self.token: Callable[[Sequence], int] = lambda sequence: 900

    def submit(self, given: GenerateRequest) -> int:
        self.next_handle += 1
        self._take(self.scheduler.submit(self.next_handle, given, self.now))
        return self.next_handle

    def _take(self, deltas: list[TokenDelta]) -> None:
        self.deltas += deltas
        for delta in deltas:
            if delta.finish is not None:
                self.ends[delta.handle, delta.choice] = delta.finish

    def plan(self) -> StepPlan:
        self.now += 1.0
        return self.scheduler.schedule(self.now)

    def finish(self, plan: StepPlan) -> None:
        tokens = [self.token(chunk.sequence) for chunk in plan.chunks if chunk.samples]
        result = StepResult(tokens, [None] * len(tokens))
        self._take(self.scheduler.complete(plan, result, self.now))
        self.pool.check()

    def step(self) -> list[tuple[int, int, int]]:
        """(handle, start, count) of each chunk."""
        plan = self.plan()
        self.finish(plan)
        return [(c.sequence.handle, c.start, c.count) for c in plan.chunks]

    def run(self) -> None:
        for _ in range(1000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("no progress")


# ------------------------------------------------------------------ what a step computes


def test_decodes_come_first_then_begun_prompts_then_new_ones():
    bench = Bench(max_batch_tokens=10)
    first = bench.submit(request(6))
    assert bench.step() == [(first, 0, 6)]
    second = bench.submit(request([1] * 20))
    assert bench.step() == [(first, 6, 1), (second, 0, 9)]
    third = bench.submit(request([2] * 3))
    assert bench.step() == [(first, 7, 1), (second, 9, 9)]
    assert bench.step() == [(first, 8, 1), (second, 18, 2), (third, 0, 3)]


def test_a_step_never_exceeds_its_budget():
    bench = Bench(max_batch_tokens=8)
    for n in range(5):
        bench.submit(request([n] * 30))
    for _ in range(20):
        assert sum(count for _, _, count in bench.step()) <= 8


def test_only_the_chunk_that_reaches_the_end_samples():
    bench = Bench(max_batch_tokens=8)
    bench.submit(request(12))
    assert [c.samples for c in bench.plan().chunks] == [False]
    bench = Bench(max_batch_tokens=8)
    bench.submit(request(12))
    bench.step()
    assert [c.samples for c in bench.plan().chunks] == [True]


def test_the_number_of_running_sequences_is_bounded():
    bench = Bench(max_sequences=3)
    handles = [bench.submit(request([n] * 2)) for n in range(5)]
    assert [handle for handle, _, _ in bench.step()] == handles[:3]
    assert [handle for handle, _, _ in bench.step()] == handles[:3]
    bench.scheduler.abort(handles[1])
    assert [handle for handle, _, _ in bench.step()] == [handles[0], handles[2], handles[3]]


def test_higher_priority_is_admitted_first_and_ties_go_by_arrival():
    bench = Bench(max_sequences=1)
    low, first, second = (bench.submit(request([n], priority=p)) for n, p in enumerate([0, 5, 5]))
    order = []
    while bench.scheduler.has_work:
        order += [handle for handle, start, _ in bench.step() if start == 0]
    assert order == [first, second, low]


def test_nobody_overtakes_a_sequence_that_does_not_fit_yet():
    bench = Bench(blocks=8, cache=False)
    running = bench.submit(request([1] * 20, max_tokens=2))
    large = bench.submit(request([2] * 24, max_tokens=2))
    small = bench.submit(request([3], max_tokens=2))
    assert [h for h, _, _ in bench.step()] == [running]
    assert [h for h, _, _ in bench.step()] == [running]
    assert [h for h, _, _ in bench.step()] == [large, small]


def test_admission_leaves_a_block_for_each_running_sequence():
    bench = Bench(blocks=4, cache=False)
    bench.submit(request([1] * 4, max_tokens=3))
    bench.submit(request([2] * 12, max_tokens=2))
    assert len(bench.step()) == 1  # three blocks are free, but one is for the first to grow
    bench.run()
    assert bench.scheduler.counters.preemptions == 0


# ------------------------------------------------------------------ prefix cache


def test_a_hit_leaves_at_least_one_token_to_compute():
    bench = Bench()
    bench.submit(request(8, max_tokens=1))
    bench.run()
    bench.submit(request(8, max_tokens=1))
    assert bench.step() == [(2, 4, 4)]
    assert bench.ends[2, 0].cached_tokens == 4
    bench.submit(request(9, max_tokens=1))
    assert bench.step() == [(3, 8, 1)]
    assert bench.ends[3, 0].cached_tokens == 8


def test_generated_blocks_are_reused_too():
    bench = Bench()
    bench.submit(request(6, max_tokens=7))
    bench.run()
    follow_up = list(range(10, 16)) + [900] * 7 + [5]
    bench.submit(request(follow_up, max_tokens=1))
    assert bench.step() == [(2, 12, 2)]


def test_salts_share_nothing_and_no_cache_means_none():
    bench = Bench()
    for salt in ("", "a", "b", "a"):
        bench.submit(request(9, max_tokens=1, cache_salt=salt))
        bench.run()
    assert [bench.ends[h, 0].cached_tokens for h in (1, 2, 3, 4)] == [0, 0, 0, 8]
    bench = Bench(cache=False)
    for _ in range(2):
        bench.submit(request(9, max_tokens=1))
        bench.run()
    assert bench.ends[2, 0].cached_tokens == 0
    assert bench.pool.drain_events() == []


def test_a_request_for_prompt_logprobs_reads_no_cache_but_fills_it():
    bench = Bench()
    for logprobs in (1, 1, None):
        bench.submit(request(9, max_tokens=1, prompt_logprobs=logprobs))
        bench.run()
    assert [bench.ends[h, 0].cached_tokens for h in (1, 2, 3)] == [0, 0, 8]


def test_two_that_compute_the_same_block_end_up_with_one():
    bench = Bench()
    bench.submit(request(8))
    bench.submit(request(8))
    plan = bench.plan()
    one, two = (chunk.sequence for chunk in plan.chunks)
    assert not set(one.blocks) & set(two.blocks)
    bench.finish(plan)
    assert one.blocks[:2] == two.blocks[:2]
    assert bench.pool.references(one.blocks[0]) == 2


# ------------------------------------------------------------------ preemption


def test_the_latest_of_the_lowest_priority_is_preempted():
    bench = Bench(blocks=6, cache=False)
    low = bench.submit(request([1] * 3, max_tokens=16, priority=-1))
    high = bench.submit(request([2] * 3, max_tokens=16, priority=1))
    middle = bench.submit(request([3] * 3, max_tokens=16))
    bench.run()
    preempted = {handle: end.preemptions for (handle, _), end in bench.ends.items()}
    assert preempted[high] == 0
    assert preempted[low] > 0
    assert preempted[middle] <= preempted[low]
    assert all(end.completion_tokens == 16 for end in bench.ends.values())


def test_a_preempted_sequence_resumes_with_its_output():
    bench = Bench(blocks=4, cache=False)
    bench.submit(request([1] * 3, max_tokens=12))
    victim = bench.submit(request([2] * 3, max_tokens=9))
    while not bench.scheduler.counters.preemptions:
        bench.step()
    (sequence,) = bench.scheduler.take_released()
    assert sequence.handle == victim
    assert sequence.blocks == []
    assert sequence.num_output > 0
    bench.run()
    assert bench.ends[victim, 0].completion_tokens == 9
    assert bench.ends[victim, 0].preemptions == 1


def test_a_request_that_asks_is_told_what_took_its_time():
    bench = Bench(max_batch_tokens=4, max_sequences=2)
    bench.now = 10.0
    bench.submit(request(6, max_tokens=2, trace=True))
    bench.submit(request([1] * 6, max_tokens=2))
    bench.run()
    asked, silent = (
        next(delta.started for delta in bench.deltas if delta.handle == handle and delta.started)
        for handle in (1, 2)
    )
    assert [(p.name, p.start, p.end, p.tokens) for p in asked.phases] == [
        ("chunk", 1.0, 1.0, 4),
        ("chunk", 2.0, 2.0, 2),
    ]
    assert silent.phases == ()
    assert [end.phases for end in bench.ends.values()] == [(), ()]


def test_a_request_that_asks_is_told_when_it_was_without_blocks():
    bench = Bench(blocks=4, cache=False)
    bench.submit(request([1] * 3, max_tokens=12, trace=True))
    victim = bench.submit(request([2] * 3, max_tokens=9, trace=True))
    bench.run()
    assert [p.name for p in bench.ends[victim, 0].phases] == ["preempted"]
    (without,) = bench.ends[victim, 0].phases
    assert 0 < without.start < without.end
    assert bench.ends[1, 0].phases == ()


def test_no_more_phases_are_told_than_a_report_may_have():
    bench = Bench(max_batch_tokens=2, max_sequences=2)
    bench.submit(request([1] * 60, max_tokens=1, trace=True))
    bench.run()
    (started,) = (delta.started for delta in bench.deltas if delta.started)
    assert len(started.phases) == MAX_WORKER_PHASES


def test_nothing_is_admitted_in_the_step_of_a_preemption():
    """What was preempted is released at the executor after planning: it must not be in the plan."""
    bench = Bench(blocks=4, cache=False, max_sequences=2)
    bench.submit(request([1] * 4, max_tokens=12, priority=1))
    bench.submit(request([2] * 7, max_tokens=9))
    bench.step()
    waiting = bench.submit(request([3], max_tokens=2, priority=1))
    while not bench.scheduler.counters.preemptions:
        chunks = bench.step()
    assert waiting not in [handle for handle, _, _ in chunks]
    assert waiting in [handle for handle, _, _ in bench.step()]


def test_a_smaller_one_of_higher_priority_passes_one_that_does_not_fit():
    bench = Bench(blocks=8, cache=False)
    bench.submit(request([1] * 20, max_tokens=10))
    bench.submit(request([2] * 24, max_tokens=2))
    bench.step()
    urgent = bench.submit(request([3], max_tokens=2, priority=1))
    assert urgent in [handle for handle, _, _ in bench.step()]


def test_what_can_never_fit_is_refused_at_submission():
    bench = Bench(blocks=4, max_model_len=128)
    with pytest.raises(ContextLengthExceeded, match="need 5 KV blocks"):
        bench.submit(request(10, max_tokens=8))
    bench.submit(request(10, max_tokens=7))  # the last token needs no room
    bench.run()
    assert bench.ends[2, 0].completion_tokens == 7


# ------------------------------------------------------------------ endings


@pytest.mark.parametrize(
    ("sampling", "outputs", "expected"),
    [
        ({"max_tokens": 3}, [7, 7, 7], ("length", None, 3)),
        ({"eos_token_ids": (2,)}, [7, 2], ("stop", None, 2)),
        (
            {"eos_token_ids": (2,), "ignore_eos": True, "max_tokens": 3},
            [2, 2, 2],
            ("length", None, 3),
        ),
        ({"stop_token_ids": (5, 6)}, [7, 6], ("stop", 6, 2)),
        ({"stop_token_ids": (2,), "eos_token_ids": (2,)}, [2], ("stop", None, 1)),
        (
            {"stop_token_ids": (2,), "eos_token_ids": (2,), "ignore_eos": True},
            [2],
            ("stop", 2, 1),
        ),
        ({"stop_token_ids": (5,), "min_tokens": 2}, [5, 5, 5], ("stop", 5, 3)),
        ({"stop_token_ids": (5,), "max_tokens": 2}, [7, 5], ("stop", 5, 2)),
        ({"max_tokens": 500}, [7] * 122, ("length", None, 122)),
    ],
)
def test_a_choice_ends_for_the_right_reason(
    sampling: dict[str, Any], outputs: list[int], expected: tuple[str, int | None, int]
):
    bench = Bench()
    bench.token = lambda sequence: outputs[sequence.num_output]
    bench.submit(request(6, **sampling))
    bench.run()
    end = bench.ends[1, 0]
    assert (end.reason, end.stop_reason, end.completion_tokens) == expected


def test_the_token_that_ends_a_choice_is_delivered():
    bench = Bench()
    bench.token = lambda sequence: 5
    bench.submit(request(6, stop_token_ids=(5,)))
    bench.run()
    assert [delta.tokens for delta in bench.deltas] == [[5]]


def test_timings_tell_waiting_from_computing():
    bench = Bench(max_sequences=1, max_batch_tokens=4)
    bench.submit(request(4, max_tokens=3))
    bench.submit(request([1] * 8, max_tokens=1))
    bench.run()
    assert (bench.ends[1, 0].queue_seconds, bench.ends[1, 0].prefill_seconds) == (1.0, 0.0)
    assert (bench.ends[2, 0].queue_seconds, bench.ends[2, 0].prefill_seconds) == (4.0, 1.0)


def test_a_step_that_began_before_a_request_came_does_not_make_it_wait_less_than_nothing():
    """A simulated step is planned at the end of the one before, which is past by then."""
    bench = Bench()
    bench.now = 5.0
    bench.submit(request(4, max_tokens=1))
    bench.now = 3.9
    bench.run()
    assert bench.ends[1, 0].queue_seconds == 0.0


# ------------------------------------------------------------------ output of an earlier attempt


def test_given_output_counts_towards_limits_but_is_no_prompt():
    bench = Bench()
    bench.submit(request(6, output=[[900, 900, 900]], max_tokens=5))
    assert bench.step() == [(1, 0, 9)]
    bench.run()
    end = bench.ends[1, 0]
    assert (end.prompt_tokens, end.completion_tokens) == (6, 5)
    assert sum(len(delta.tokens) for delta in bench.deltas) == 2


@pytest.mark.parametrize(
    ("given", "reason"), [([900] * 5, "length"), ([900, 7], "stop"), ([900] * 9, "length")]
)
def test_output_that_was_complete_already_ends_at_once(given: list[int], reason: str):
    bench = Bench()
    bench.submit(request(6, output=[given], max_tokens=5, stop_token_ids=(7,)))
    assert bench.ends[1, 0].reason == reason
    assert bench.ends[1, 0].completion_tokens == len(given)
    assert not bench.scheduler.has_work


def test_of_several_choices_only_the_unfinished_go_on():
    bench = Bench()
    bench.submit(request(6, n=3, output=[[7], [900], []], max_tokens=4, stop_token_ids=(7,)))
    assert list(bench.ends) == [(1, 0)]
    bench.run()
    assert [bench.ends[1, c].completion_tokens for c in range(3)] == [1, 4, 4]


def test_choices_fork_although_the_whole_prompt_was_in_the_cache():
    bench = Bench()
    bench.submit(request(8, max_tokens=6))
    bench.run()
    bench.submit(request(8, n=2, output=[[900] * 4, []], max_tokens=6))
    bench.run()
    assert [bench.ends[2, c].completion_tokens for c in range(2)] == [6, 6]


# ------------------------------------------------------------------ several choices


def test_choices_that_have_ended_are_neither_computed_nor_spoken_of():
    bench = Bench()
    bench.submit(request(6, n=3, ended=(0, 2), output=[[900] * 8, [900], []], max_tokens=3))
    plan = bench.plan()
    assert [(c.sequence.key, c.count) for c in plan.chunks] == [((1, 1), 7)]
    bench.finish(plan)
    bench.run()
    assert list(bench.ends) == [(1, 1)]
    assert {delta.choice for delta in bench.deltas} == {1}


def test_a_choice_reads_its_given_output_from_the_cache():
    bench = Bench()
    given = [[900] * 9, [901] * 9]
    for output in given:
        bench.submit(request(6, output=[output], max_tokens=10))
        bench.run()
    bench.submit(request(6, n=2, output=given, max_tokens=11))
    assert bench.step() == [(3, 12, 3)]
    assert bench.step() == [(3, 15, 1), (3, 12, 3)]
    bench.run()
    assert [bench.ends[3, c].completion_tokens for c in range(2)] == [11, 11]


def test_choices_share_full_blocks_and_copy_the_last_one():
    bench = Bench()
    bench.submit(request(6, n=3))
    bench.step()
    stem, one, two = bench.scheduler.running
    assert stem.blocks[0] == one.blocks[0] == two.blocks[0]
    assert bench.pool.references(stem.blocks[0]) == 3
    plan = bench.plan()
    assert plan.copies == [(stem.blocks[1], one.blocks[1]), (stem.blocks[1], two.blocks[1])]
    assert [(c.sequence.choice, c.start, c.count) for c in plan.chunks] == [
        (0, 6, 1),
        (1, 5, 1),
        (2, 5, 1),
    ]
    bench.finish(plan)
    assert bench.plan().copies == []


def test_every_choice_reports_what_the_stem_found_in_the_cache():
    bench = Bench()
    bench.submit(request(9, max_tokens=1))
    bench.run()
    bench.submit(request(9, n=2, max_tokens=1))
    bench.run()
    assert [bench.ends[2, c].cached_tokens for c in range(2)] == [8, 8]


def test_no_copy_is_needed_when_the_last_prompt_token_opens_a_block():
    bench = Bench()
    bench.submit(request(5, n=2))
    bench.step()
    assert bench.plan().copies == []


def test_the_stem_may_end_before_its_copies_are_made():
    bench = Bench(blocks=4)
    bench.submit(request(7, n=2, max_tokens=1))
    bench.step()
    assert (1, 0) in bench.ends
    (child,) = bench.scheduler.running
    plan = bench.plan()
    ((source, destination),) = plan.copies
    assert destination == child.blocks[1]
    assert bench.pool.references(source) == 1  # kept for the copy, though its owner is gone
    bench.finish(plan)
    assert bench.ends[1, 1].completion_tokens == 1
    assert bench.pool.counts().used == 0


@pytest.mark.parametrize("limits", [{"blocks": 3}, {"max_sequences": 2}])
def test_choices_without_room_wait_like_any_sequence(limits: dict[str, Any]):
    bench = Bench(**limits)
    bench.submit(request(6, n=3, max_tokens=4))
    bench.run()
    assert [bench.ends[1, c].completion_tokens for c in range(3)] == [4, 4, 4]
    assert bench.ends[1, 2].cached_tokens == 4


def test_aborting_between_fork_and_copy_gives_everything_back():
    bench = Bench()
    bench.submit(request(6, n=3))
    bench.step()
    assert bench.scheduler.abort(1)
    assert bench.pool.counts().used == 0
    assert bench.plan().copies == []
    bench.pool.check()


# ------------------------------------------------------------------ bounds, aborts, deadlines


def test_the_queue_is_bounded_by_what_has_not_started():
    bench = Bench(max_sequences=1, max_waiting=2)
    bench.submit(request([1]))
    bench.submit(request([2]))
    with pytest.raises(Overloaded, match="2 requests are waiting") as caught:
        bench.submit(request([3]))
    assert caught.value.retry_after
    bench.step()  # the first one starts
    waiting = bench.submit(request([3]))
    with pytest.raises(Overloaded):
        bench.submit(request([4]))
    bench.scheduler.abort(waiting)
    bench.submit(request([4]))


def test_an_abort_in_any_state_frees_blocks_at_once():
    bench = Bench(max_sequences=1, max_batch_tokens=4)
    prefilling = bench.submit(request([1] * 12))
    waiting = bench.submit(request([2] * 12))
    bench.step()
    assert bench.scheduler.abort(waiting)
    assert bench.scheduler.abort(prefilling)
    assert bench.pool.counts().used == 0
    assert not bench.scheduler.has_work
    assert not bench.scheduler.abort(prefilling)
    assert [s.handle for s in bench.scheduler.take_released()] == [prefilling]
    assert bench.scheduler.counters.aborted == 2


def test_a_deadline_names_the_stage_it_struck_in():
    bench = Bench(max_sequences=2, max_batch_tokens=4)
    bench.submit(request([1] * 4, deadline=5.5, max_tokens=50))
    bench.submit(request([2] * 40, deadline=5.5))
    bench.submit(request([3] * 4, deadline=5.5))
    bench.submit(request([4] * 4, deadline=50.0))
    assert bench.scheduler.next_deadline() == 5.5
    for _ in range(5):
        bench.step()
        assert bench.scheduler.expire(bench.now) == []
    stages = {late.handle: late.stage for late in bench.scheduler.expire(6.0)}
    assert "decoding, 5 tokens done" in stages[1]
    assert "computing the prompt" in stages[2]
    assert "waiting in the engine's queue" in stages[3]
    assert bench.scheduler.next_deadline() == 50.0
    assert bench.pool.counts().used == 0
    bench.run()
    assert bench.scheduler.next_deadline() is None


def test_waiting_for_quarantined_blocks_is_not_work():
    bench = Bench(blocks=4, max_model_len=16)
    held = bench.pool.reserve(2)
    assert held
    bench.pool.quarantine(held)
    bench.submit(request(12, max_tokens=2))
    assert bench.scheduler.has_work
    assert bench.step() == []
    assert not bench.scheduler.has_work
    bench.pool.unquarantine(held)
    assert bench.scheduler.has_work
    assert bench.step() == [(1, 0, 12)]


def test_a_failed_step_drops_its_submissions_and_no_other():
    bench = Bench(max_sequences=2)
    bench.submit(request([1] * 3, n=2))
    bench.step()
    bench.submit(request([2] * 3))
    plan = bench.plan()
    assert bench.scheduler.fail(plan) == [1]
    bench.pool.check()
    assert bench.pool.counts().used == 0
    assert [h for h, _, _ in bench.step()] == [2]


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (request([]), InvalidRequest),
        (request(128), ContextLengthExceeded),
        (request([5, 1000]), InvalidRequest),
        (request(4, n=2, output=[[1]]), InvalidRequest),
        (request(4, n=0), InvalidRequest),
        (request(4, output=[[1000]]), InvalidRequest),
    ],
)
def test_what_cannot_be_served_is_refused_and_leaves_no_trace(
    bad: GenerateRequest, error: type[Exception]
):
    bench = Bench()
    with pytest.raises(error):
        bench.submit(bad)
    assert bench.scheduler.handles() == []
    assert not bench.scheduler.has_work


def test_limits_that_would_starve_a_sequence_are_refused():
    limits: dict[str, Any] = {"max_model_len": 128, "vocab_size": 10}
    with pytest.raises(ConfigError, match="max_batch_tokens"):
        SchedulerLimits(**limits, max_batch_tokens=7, max_sequences=8)
    with pytest.raises(ConfigError, match="positive"):
        SchedulerLimits(**limits, max_waiting=0)


def test_records_that_were_submitted_are_not_changed():
    bench = Bench()
    given = request(6, n=2, output=[[900], []])
    before = encode(given)
    bench.submit(given)
    bench.run()
    assert encode(given) == before


# ------------------------------------------------------------------ what cannot be trusted


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("under_way", [False, True])
def test_what_held_no_numbers_is_reused_by_nobody(n: int, under_way: bool):
    bench = Bench()
    handle = bench.submit(request(17, n=n))
    bench.step()
    bench.step()
    (stem, *_) = bench.scheduler.running
    part = stem.blocks[:4] if under_way else []
    bench.pool.acquire(part)  # as a part does that goes to a decode worker
    bench.scheduler.drop(handle, trusted=False)
    assert bench.pool.names() == {}
    bench.submit(request(17))
    assert bench.plan().chunks[0].start == 0
    bench.pool.release(part)
    bench.pool.check()


def test_those_who_share_what_held_no_numbers_keep_it_without_its_names():
    bench = Bench()
    first = bench.submit(request(17, max_tokens=40))
    bench.step()
    second = bench.submit(request(17, max_tokens=40))
    bench.step()
    bench.scheduler.drop(first, trusted=False)
    for _ in range(12):  # it names further blocks meanwhile
        bench.step()
    assert bench.scheduler.abort(second)
    bench.pool.check()
    bench.submit(request(17))
    assert bench.plan().chunks[0].start == 0


def test_a_fault_of_a_grammar_leaves_the_cache_as_it_is():
    bench = Bench()
    handle = bench.submit(request(17))
    bench.step()
    bench.scheduler.drop(handle, trusted=True)
    assert len(bench.pool.names()) == 17 // SIZE
    bench.submit(request(17))
    assert bench.plan().chunks[0].start == 17 // SIZE * SIZE


def test_who_gives_nothing_back_is_not_preempted_for_room(monkeypatch: pytest.MonkeyPatch):
    bench = Bench(blocks=6, max_sequences=4)
    first = bench.submit(request(4, max_tokens=20))
    bench.step()
    second = bench.submit(request([5] * 4, max_tokens=20))
    bench.step()
    third = bench.submit(request([7] * 4, max_tokens=20))
    bench.step()
    bench.scheduler.sends = lambda sequence: sequence.handle == third
    preempt, gone = bench.scheduler._preempt, []

    def noted(sequence: Sequence) -> None:
        gone.append(sequence.handle)
        preempt(sequence)

    monkeypatch.setattr(bench.scheduler, "_preempt", noted)
    while not gone:
        bench.step()
    assert gone[0] == second
    assert first not in gone
