"""Tenants take turns; the longest queue pays at the bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.fair_queue import FairQueue

if TYPE_CHECKING:
    from collections.abc import Callable


def anything(job: str, running: int) -> bool:
    return True


def begin(queue: FairQueue[str], may: Callable[[str, int], bool] = anything) -> str | None:
    """Begin the next job, named `tenant number`; its name."""
    job = queue.next(may)
    if job is not None:
        queue.begin(job.split()[0], job)
    return job


def order(queue: FairQueue[str], took: dict[str, float]) -> list[str]:
    """One job at a time; each takes what its tenant's do."""
    done = []
    while (job := begin(queue)) is not None:
        queue.end(job.split()[0], took[job.split()[0]])
        done.append(job)
    return done


def filled(**counts: int) -> FairQueue[str]:
    queue: FairQueue[str] = FairQueue()
    for tenant, count in counts.items():
        for number in range(count):
            queue.push(tenant, f"{tenant} {number}")
    return queue


def test_a_long_queue_delays_another_tenant_by_one_job():
    queue = filled(flood=50, other=2)
    assert order(queue, {"flood": 3.0, "other": 0.1})[:4] == [
        "flood 0",
        "other 0",
        "other 1",
        "flood 1",
    ]
    assert len(queue) == 0


def test_time_is_shared_not_the_number_of_jobs():
    done = order(filled(slow=10, quick=10), {"slow": 1.0, "quick": 0.25})
    assert [job.split()[0] for job in done[:10]].count("slow") == 2


def test_who_has_fewest_jobs_under_way_is_next():
    queue = filled(a=3, b=3)
    assert [begin(queue) for _ in range(4)] == ["a 0", "b 0", "a 1", "b 1"]


def test_a_tenant_that_was_away_gets_no_credit():
    queue = filled(busy=20)
    for _ in range(10):
        begin(queue)
        queue.end("busy", 1.0)
    for number in range(20):
        queue.push("late", f"late {number}")
    done = order(queue, {"busy": 1.0, "late": 1.0})
    assert abs(done[:10].count("busy") - 5) <= 5
    assert {job.split()[0] for job in done[:3]} == {"busy", "late"}


def test_a_tenant_does_not_shed_its_time_by_leaving():
    queue = filled(a=1, b=5)
    assert begin(queue) == "a 0"
    queue.end("a", 100.0)
    queue.push("a", "a 1")
    assert order(queue, {"a": 1.0, "b": 1.0})[-1] == "a 1"


def test_what_may_not_begin_is_passed_over():
    queue = filled(a=1, b=1)
    assert begin(queue, lambda job, running: job != "a 0") == "b 0"
    assert begin(queue, lambda job, running: False) is None
    assert len(queue) == 1


def test_first_jobs_go_before_their_own_tenants_others():
    queue = filled(a=3)
    queue.push("a", "a first", first=True)
    assert order(queue, {"a": 1.0}) == ["a first", "a 0", "a 1", "a 2"]


def test_the_newest_job_of_the_longest_queue_makes_room():
    queue = filled(flood=5, other=1)
    assert queue.make_room("other") == "flood 4"
    assert queue.make_room("flood") is None
    assert queue.make_room("newcomer") == "flood 3"
    assert len(queue) == 4


def test_nobody_makes_room_for_one_that_would_have_as_many():
    queue = filled(a=2, b=1)
    assert queue.make_room("b") is None


def begin_in(queue: FairQueue[str], places: int) -> list[str]:
    """Begin all jobs that may begin, named `tenant number`; their names."""
    begun = []
    while (job := queue.next_in(places)) is not None:
        queue.begin(job.split()[0], job)
        begun.append(job)
    return begun


def test_a_tenant_alone_gets_half_of_the_places():
    queue = filled(flood=50)
    assert len(begin_in(queue, 32)) == queue.running == queue.running_of("flood") == 16


def test_further_tenants_get_half_of_the_rest():
    queue: FairQueue[str] = FairQueue()
    begun = []
    for tenant in "abcdefg":
        for number in range(50):
            queue.push(tenant, f"{tenant} {number}")
        begun.append(len(begin_in(queue, 32)))
    assert begun == [16, 8, 4, 2, 1, 1, 0]


def test_a_freed_place_is_of_a_tenant_that_has_none():
    queue = filled(a=50)
    begin_in(queue, 4)
    for tenant in "bcd":
        queue.push(tenant, f"{tenant} 0")
        begin_in(queue, 4)
    assert [queue.running_of(tenant) for tenant in "abcd"] == [2, 1, 1, 0]
    queue.end("a", 1.0)
    assert begin_in(queue, 4) == ["d 0"]


def test_tenants_that_come_together_get_as_many_places():
    queue = filled(a=50, b=50, c=50)
    begin_in(queue, 32)
    assert [queue.running_of(tenant) for tenant in "abc"] == [8, 8, 8]


@given(
    st.integers(1, 9),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["push", "end"]))),
)
def test_whatever_runs_a_waiting_job_begins_in_the_end(places, steps):
    queue: FairQueue[str] = FairQueue()
    running: list[str] = []
    for number, (tenant, step) in enumerate(steps):
        if step == "push":
            queue.push(tenant, f"{tenant} {number}")
        elif running:
            queue.end(running.pop(0), 1.0)
        running += [job.split()[0] for job in begin_in(queue, places)]
        assert queue.running == len(running) <= places
        assert max(map(running.count, running), default=0) <= (places + 1) // 2
    while running:
        queue.end(running.pop(0), 1.0)
        running += [job.split()[0] for job in begin_in(queue, places)]
    assert len(queue) == queue.running == 0


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["push", "begin", "end", "room"])))
)
def test_every_job_comes_out_once(steps):
    queue: FairQueue[str] = FairQueue()
    pushed, out, running = 0, [], []
    for number, (tenant, step) in enumerate(steps):
        if step == "push":
            queue.push(tenant, f"{tenant} {number}")
            pushed += 1
        elif step == "begin" and (job := begin(queue)) is not None:
            running.append(job.split()[0])
            out.append(job)
        elif step == "end" and running:
            queue.end(running.pop(), 1.0)
        elif step == "room" and (job := queue.make_room(tenant)) is not None:
            out.append(job)
    while (job := begin(queue)) is not None:
        running.append(job.split()[0])
        out.append(job)
    for tenant in running:
        queue.end(tenant, 1.0)
    assert len(out) == len(set(out)) == pushed
    assert not queue._tenants
