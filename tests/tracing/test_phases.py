"""The record of a request: bounded, closed at the end, and deaf afterwards."""

from __future__ import annotations

from pdserve.clock import ManualClock
from pdserve.errors import NoWorker
from pdserve.messages.request import Finish, FirstTokenStats
from pdserve.tracing.phases import (
    MOST,
    MOST_PROMPTS,
    AttemptPhase,
    MovePhase,
    PromptPhases,
    RequestPhases,
    RoutePhase,
    in_words,
)


def attempt(number: int = 1) -> AttemptPhase:
    return AttemptPhase(number, "w", 1, "first", 1.0)


def prompt() -> tuple[PromptPhases, ManualClock]:
    clock = ManualClock()
    clock.advance(5.0)
    return PromptPhases(clock.now), clock


def test_the_first_of_each_kind_stay_and_the_others_are_counted() -> None:
    phases, _ = prompt()
    for number in range(MOST + 3):
        phases.add_route(RoutePhase(1.0, 2.0, "first"))
        phases.add_attempt(attempt(number + 1))
        phases.add_move(MovePhase(1.0, 2.0, "kv", "a", "b", "completed"))
    assert len(phases.routes) == len(phases.attempts) == len(phases.moves) == MOST
    assert (phases.routes_left_out, phases.attempts_left_out, phases.moves_left_out) == (3, 3, 3)
    assert [a.number for a in phases.attempts] == list(range(1, MOST + 1))


def test_the_end_closes_what_is_open_and_nothing_follows_it() -> None:
    phases, clock = prompt()
    first, second = phases.add_attempt(attempt(1)), phases.add_attempt(attempt(2))
    first.close(2.0, "moved")
    third = phases.add_attempt(attempt(3))
    phases.close(second, "failed", "gone")
    clock.advance(1.0)
    phases.close(third, "finished")
    assert (first.how, first.end, first.error) == ("moved", 2.0, "")
    assert (second.how, second.end, second.error) == ("failed", 5.0, "gone")
    assert (third.how, third.end, third.error) == ("cancelled", 5.0, "")
    phases.add_attempt(attempt(4))
    phases.add_route(RoutePhase(1.0, 2.0, "kv"))
    phases.add_move(MovePhase(1.0, 2.0, "kv", "a", "b", "completed"))
    assert (len(phases.attempts), phases.routes, phases.moves) == (3, [], [])


def test_the_longest_choice_speaks_for_an_attempt() -> None:
    phases, _ = prompt()
    phases.add_attempt(attempt()).first = 2.0
    phases.add_attempt(attempt(2))
    for tokens, preemptions in ((3, 0), (9, 1), (5, 2)):
        finish = Finish(reason="stop", completion_tokens=tokens, preemptions=preemptions)
        phases.finished(finish)
    only, searching = phases.attempts
    assert searching.finish is None
    assert only.finish is not None
    assert (only.finish.completion_tokens, only.preemptions, phases.preemptions) == (9, 2, 2)


def test_a_prompt_that_fell_back_to_its_decode_worker_is_noticed() -> None:
    for line, failed in (
        ("", False),
        ("remote; node=p; reason=always", False),
        ("local; node=d; reason=short_prompt", False),
        ("local; node=d; reason=attempts_failed", True),
        ("local; node=d; reason=unclaimed", True),
    ):
        phases, _ = prompt()
        made = phases.add_attempt(attempt())
        made.started = FirstTokenStats(0, 0.0, 0.0, 0.0, prefill=line)
        assert phases.prefill_failed is failed, line


def test_a_request_records_so_many_prompts() -> None:
    phases = RequestPhases(1.0, ManualClock().now)
    made = [phases.add_prompt() for _ in range(MOST_PROMPTS + 2)]
    assert made[-2:] == [None, None]
    assert (len(phases.prompts), phases.prompts_left_out) == (MOST_PROMPTS, 2)


def test_the_first_error_counts() -> None:
    phases = RequestPhases(1.0, ManualClock().now)
    phases.fail(NoWorker("nobody"))
    phases.fail(ValueError("later"))
    assert (phases.error_type, phases.error) == ("NoWorker", "nobody")


def test_errors_in_words() -> None:
    assert in_words(NoWorker("nobody")) == "NoWorker: nobody"
    assert in_words(TimeoutError()) == "TimeoutError"
