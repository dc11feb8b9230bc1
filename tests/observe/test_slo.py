import pytest

from pdserve import errors
from pdserve.observe.slo import (
    CAUSES,
    NO_OBJECTIVES,
    Objectives,
    Observed,
    SloTable,
    SloVerdict,
    fault_of,
    judge,
    mean_itl,
)

BOTH = Objectives(ttft=1.0, itl=0.05)


def results(limits: Objectives, **seen: object) -> dict[str, tuple[str, str]]:
    return {one.objective: one[1:] for one in judge(limits, Observed(**seen))}  # type: ignore[arg-type]


def test_without_objectives_nothing_is_judged():
    assert judge(NO_OBJECTIVES, Observed(ttft=9.0)) == []


def test_a_request_within_its_limits_is_good_and_the_limit_counts_as_within():
    assert results(BOTH, ttft=1.0, itl=0.05) == {
        "ttft": ("good", ""),
        "itl": ("good", ""),
        "both": ("good", ""),
    }


def test_only_what_is_limited_is_judged():
    assert judge(Objectives(itl=0.05), Observed(ttft=9.0, itl=0.01)) == [
        SloVerdict("itl", "good"),
        SloVerdict("both", "good"),
    ]


def test_a_late_one_names_what_took_longest():
    seen = Observed(
        ttft=1.5, itl=0.01, before={"queue": 0.9, "prefill": 0.4, "frontend": 0.2}, after={}
    )
    assert judge(BOTH, seen) == [
        SloVerdict("ttft", "bad", "queue"),
        SloVerdict("itl", "good"),
        SloVerdict("both", "bad", "queue"),
    ]
    slow = Observed(ttft=0.5, itl=0.1, before={"queue": 0.4}, after={"decode": 2.0, "moved": 3.0})
    assert judge(BOTH, slow)[-1] == SloVerdict("both", "bad", "moved")


def test_of_two_that_are_missed_the_first_token_gives_the_cause():
    seen = {"ttft": 2.0, "itl": 0.1, "before": {"held": 2.0}, "after": {"decode": 9.0}}
    assert results(BOTH, **seen)["both"] == ("bad", "held")


def test_one_token_has_no_latency_between_tokens():
    assert mean_itl([(1.0, 1.0, 1)]) is None
    assert results(BOTH, ttft=0.5, itl=None) == {
        "ttft": ("good", ""),
        "itl": ("none", ""),
        "both": ("good", ""),
    }


def test_what_the_server_fails_is_bad_and_what_the_client_ends_is_neither():
    late = {"ttft": 9.0, "before": {"queue": 9.0}}
    bad, none = ("bad", "error"), ("none", "")
    assert results(BOTH, fault="server", **late) == dict.fromkeys(("ttft", "itl", "both"), bad)
    assert results(BOTH, fault="client", **late) == dict.fromkeys(("ttft", "itl", "both"), none)


def test_the_slowest_choice_counts():
    assert mean_itl([(0.0, 1.0, 11), (0.5, 2.5, 11), (0.0, 9.0, 1)]) == pytest.approx(0.2)


def test_a_model_without_its_own_objective_has_the_general_one():
    table = SloTable(ttft={"": 2.0, "m": 0.5}, itl={"m": 0.05})
    assert table.of("m") == Objectives(0.5, 0.05)
    assert table.of("other") == table.of("") == Objectives(2.0, None)
    assert SloTable().of("m") == NO_OBJECTIVES


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (None, ""),
        (errors.Cancelled("gone"), "client"),
        (errors.ContextLengthExceeded("long"), "client"),
        (errors.ModelNotFound("what"), "client"),
        (errors.RateLimited("the key's own limit"), "client"),
        (errors.Overloaded("full"), "server"),
        (errors.Draining("going"), "server"),
        (errors.NoWorker("none"), "server"),
        (errors.DeadlineExceeded("late"), "server"),
        (errors.EngineDied("dead"), "server"),
    ],
)
def test_every_early_end_has_somebody_whose_fault_it_is(error, fault):
    assert fault_of(error) == fault


def test_causes_are_few_and_distinct():
    assert len(set(CAUSES)) == len(CAUSES) == 9
