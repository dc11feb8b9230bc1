"""The storm's parts by themselves, and one short storm over real processes.

What a checker lets pass it would let pass for an hour: most of these tests show that it does not.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from typing import Any

import pytest

from tests.chaos.storm import checker, nodes, report, schedule, storm_requests
from tests.chaos.storm.checker import Absence, Circumstances, judge
from tests.chaos.storm.client_request import ClientRequest
from tests.chaos.storm.faults import Done
from tests.chaos.storm.report import Storm
from tests.chaos.storm.schedule import KINDS, Standing
from tests.chaos.storm.storm import PATIENCE, Wishes, run
from tests.chaos.storm.storm_requests import Sizes, StormRequest, expected_of
from tests.chaos.storm.testbed import plan
from tests.support.seeds import run_seed

NODES = [
    schedule.Node(place.name, place.part, place.proxied)
    for place in plan("sim")
    if not place.hurried
]
ALL = {kind.needs for kind in KINDS}
SECONDS = 40.0
"""Of the short storm's faults; with start, answers and quiet it takes a minute and a half."""

# ---------------------------------------------------------------------- what nodes log


def test_tracebacks_are_found_and_name_files_from_the_checkout(tmp_path):
    log = tmp_path / "n.log"
    log.write_text(f'well\nTraceback (most recent call last): File "{nodes.ROOT}/pdserve/x.py"\n')
    node = nodes.Node("n", "worker", "127.0.0.1", 1, 2, (), log=log, home=tmp_path)
    (line,) = node.tracebacks()
    assert line == 'n: Traceback (most recent call last): File "pdserve/x.py"'


def test_a_problem_is_told_once():
    storm = Storm(seed="1", engine="sim", streams=1, seconds=1.0, zero=0.0)
    storm.left = ["n: an error", "n: an error", "m: an error"]
    assert storm.problems[-2:] == ["n: an error", "m: an error"]


# ---------------------------------------------------------------------- schedule


def draw(seed: int, seconds: float = 600.0, **wishes):
    known: dict[str, Any] = {"offers": ALL, "every": 2.5}
    return schedule.draw(seed, seconds, NODES, **(known | wishes))


def test_a_seed_fixes_the_schedule():
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


def test_a_short_storm_meets_every_kind_and_part(seed):
    faults = draw(seed % 1000, 90.0, every=2.0)
    assert {fault.kind for fault in faults} == {kind.name for kind in KINDS}
    # Ten minutes of one seed in a few hundred spare one of the parts.
    faults = [fault for more in range(3) for fault in draw(seed % 1000 + more)]
    parts = {node.name: node.part for node in NODES}
    killed = {parts[fault.target] for fault in faults if fault.kind == "kill node"}
    assert killed == {"worker", "prefill", "router", "frontend"}


def test_faults_come_in_order_and_at_the_asked_pace():
    faults = draw(3)
    assert [fault.number for fault in faults] == list(range(1, len(faults) + 1))
    assert all(a.at < b.at for a, b in itertools.pairwise(faults))
    assert 600 / 2.5 * 0.8 < len(faults) < 600 / 2.5 * 1.2


def test_what_a_site_does_not_offer_is_not_drawn():
    drawn = {fault.kind for fault in draw(4, offers={"proxy"})}
    assert drawn == {kind.name for kind in KINDS if kind.needs in ("", "proxy")}
    assert {fault.kind for fault in draw(4, kinds={"cut", "loss"})} == {"cut", "loss"}


def test_victims_fit_their_faults():
    parts = {node.name: node for node in NODES}
    for fault in draw(5):
        kind = schedule.BY_NAME[fault.kind]
        assert kind.lasting[0] <= fault.lasting <= kind.lasting[1]
        if kind.needs == "disk":
            assert fault.target == "disk"
            continue
        assert not kind.parts or parts[fault.target].part in kind.parts
        assert kind.needs != "proxy" or parts[fault.target].proxied
        assert bool(fault.peer) == (kind.name == "partition")
        assert fault.peer != fault.target


def standing(*down: str) -> Standing:
    nodes = {node.name: node for node in NODES}
    return Standing(nodes, set(nodes) - set(down))


def fault(kind: str, target: str, peer: str = "") -> schedule.Fault:
    return schedule.Fault(1, 0.0, kind, target, 1.0, 0.0, peer)


@pytest.mark.parametrize(
    ("one", "down", "word"),
    [
        (fault("kill node", "decode-1"), (), ""),
        (fault("kill node", "decode-1"), ("decode-1",), "not up"),
        (fault("kill node", "decode-1"), ("decode-2",), ""),
        (fault("kill node", "decode-1"), ("decode-2", "whole-1"), "last"),
        (fault("terminate", "router-1"), ("router-2",), "last"),
        (fault("stop node", "front-2"), ("front-1",), "last"),
        (fault("kill node", "prefill-1"), (), ""),
        (fault("partition", "decode-1", "decode-2"), (), ""),
        (fault("partition", "decode-1", "decode-2"), ("whole-1",), "third"),
        (fault("partition", "decode-1", "router-1"), ("router-1",), "not up"),
    ],
)
def test_somebody_of_each_part_is_left(one, down, word):
    said = schedule.refusal(one, standing(*down), 0.0)
    assert word in said
    assert bool(said) == bool(word)


def test_an_engine_ends_no_more_often_than_its_supervisor_bears():
    now = standing()
    for at in range(schedule.ENGINE_ENDS):
        assert not schedule.refusal(fault("kill engine", "decode-1"), now, at)
        now.note_engine_end("decode-1", at)
    assert "often" in schedule.refusal(fault("kill engine", "decode-1"), now, 10.0)
    assert not schedule.refusal(fault("kill engine", "decode-2"), now, 10.0)
    assert not schedule.refusal(fault("kill engine", "decode-1"), now, schedule.ENGINE_WINDOW + 5)


# ---------------------------------------------------------------------- questions and lives


def test_a_pool_is_mixed_and_fixed_by_its_seed():
    drawn = storm_requests.draw(7, Sizes())
    assert drawn == storm_requests.draw(7, Sizes())
    assert {question.choices for question in drawn} == {1, 2, 3}
    assert {question.chat for question in drawn} == {True, False}
    assert {question.fields["temperature"] for question in drawn} >= {0, 0.8}
    prompts = [question.fields["prompt"] for question in drawn if not question.chat]
    assert max(map(len, prompts)) > 128, "some are handed over"
    assert all(len(prompt) <= 2 * Sizes().longest_prompt for prompt in prompts)
    assert max(Counter(tuple(prompt[:64]) for prompt in prompts).values()) > 5, (
        "prefixes are shared"
    )


RIGHT = ([5, 6, 7, 8, 9, 10, 11, 12], "abcdefgh")


def question(n: int = 1, **fields) -> StormRequest:
    return StormRequest(1, "/v1/completions", {"max_tokens": 8} | fields, n)


def life(**fields) -> ClientRequest:
    defaults: dict[str, Any] = {"frontend": "front-1", "streamed": True, "asked": 100.0}
    return ClientRequest(1, fields.pop("question", question()), **(defaults | fields))


def event(tokens, text, at=100.5, index=0, finish=None, one=None) -> tuple[bytes, float]:
    choice = {"index": index, "text": text, "token_ids": tokens, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice | (one or {})]}).encode() + b"\n\n", at


def usage(prompt=3, completion=8) -> tuple[bytes, float]:
    told = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": told}).encode() + b"\n\n", 101.0


DONE = (b"data: [DONE]\n\n", 101.0)


def lived(*events: tuple[bytes, float], **fields) -> ClientRequest:
    one = life(**fields)
    one.answered(200, {"x-pdserve-worker": "decode-1"}, 100.4)
    for data, at in events:
        one.event_bytes(data, at)
    one.ended = 101.5
    return one


def told(tokens=RIGHT[0], text=RIGHT[1], **fields) -> list[tuple[bytes, float]]:
    half = len(tokens) // 2
    rest = event(tokens[half:], text[half:], 100.9, finish="length", **fields)
    return [event(tokens[:half], text[:half]), rest]


RIGHTS = expected_of(lived(*told(), usage(), DONE))
PEACE = Circumstances()


def outcome(one: ClientRequest, circumstances: Circumstances = PEACE) -> str:
    return judge(one, RIGHTS, circumstances).outcome


def test_the_right_answer_is_completed_however_it_comes_in_pieces():
    assert outcome(lived(*told(), usage(), DONE)) == checker.COMPLETED
    data = b"".join(piece for piece, _ in (*told(), usage(), DONE))
    pieces = [(data[i : i + 7], 100.5) for i in range(0, len(data), 7)]
    assert outcome(lived(*pieces)) == checker.COMPLETED


def test_a_whole_answer_is_the_same():
    one = life(streamed=False)
    choice = {"index": 0, "text": RIGHT[1], "token_ids": RIGHT[0], "finish_reason": "length"}
    numbers = {"prompt_tokens": 3, "completion_tokens": 8}
    one.answered(200, {}, 101.0)
    one.whole(json.dumps({"choices": [choice], "usage": numbers}).encode(), 101.0)
    one.ended = 101.0
    assert outcome(one) == checker.COMPLETED


@pytest.mark.parametrize(
    ("tokens", "text", "expected"),
    [
        ([5, 6, 9, 10, 11, 12], "abefgh", checker.LOST),
        ([5, 6, 7, 8, 9, 10, 11], "abcdefg", checker.LOST),
        ([6, 7, 8, 9, 10, 11, 12], "bcdefgh", checker.LOST),
        ([5, 6, 7, 6, 7, 8, 9, 10, 11, 12], "abcbcdefgh", checker.REPEATED),
        ([5, 5, 6, 7, 8, 9, 10, 11, 12], "aabcdefgh", checker.REPEATED),
        ([5, 6, 99, 98, 97, 96, 95, 94], "ab??????", checker.WRONG),
        ([5, 6, 7, 8, 9, 10, 11, 12], "abcdxfgh", checker.WRONG),
        ([5, 6, 7, 8, 9, 10, 11, 12], "abcdefg", checker.LOST),
        ([5, 6, 7, 8, 9, 10, 11, 12, 13], "abcdefghi", checker.WRONG),
    ],
)
def test_other_tokens_or_text_are_seen(tokens, text, expected):
    assert outcome(lived(*told(tokens, text), usage(), DONE)) == expected


def test_numbers_of_lost_and_repeated_tokens_are_told():
    assert checker.differs([1, 2, 5, 6], [1, 2, 3, 4, 5, 6], "").tokens_lost == 2
    assert checker.differs([1, 2, 3, 2, 3, 4], [1, 2, 3, 4, 5, 6], "").tokens_repeated == 2


@pytest.mark.parametrize(
    "events",
    [
        [*told(), usage(completion=9), DONE],
        [*told(), usage(prompt=4), DONE],
        [event(*RIGHT, finish="stop"), usage(), DONE],
        [event(*RIGHT, finish="length", one={"stop_reason": "x"}), usage(), DONE],
        [event(*RIGHT, finish="length", one={"logprobs": {"tokens": ["a"]}}), usage(), DONE],
    ],
)
def test_other_usage_ends_and_logprobs_are_seen(events):
    assert outcome(lived(*events)) == checker.WRONG


def test_a_choice_that_ends_twice_is_seen():
    again = event([], "", 100.95, finish="length")
    assert outcome(lived(*told(), again, usage(), DONE)) == checker.REPEATED


def failed(
    code: str, status: int = 503, *, begun: bool = False, after: float = 0.5, **fields: Any
) -> ClientRequest:
    """One that ended with this error, `after` seconds from asking; `headers` of a whole answer."""
    error = {"error": {"code": code, "message": "why"}}
    headers = {"retry-after": "1"} | fields.pop("headers", {})
    if begun:
        last = (b"data: " + json.dumps(error).encode() + b"\n\n", 100.0 + after)
        one = lived(event([5, 6], "ab"), last, **fields)
    else:
        one = life(**fields)
        one.answered(status, headers, 100.0 + after)
        one.whole(json.dumps(error).encode(), 100.0 + after)
    one.ended = 100.0 + after
    return one


PARTS = {"front-1": "frontend", "front-2": "frontend", "decode-1": "worker", "router-1": "router"}


def away(node: str = "front-1", since=99.0, until=102.0, *, leaving=False) -> Circumstances:
    return Circumstances(away={node: [Absence(since, until, leaving)]}, parts=PARTS)


HAD: dict[str, Any] = {"headers": {"x-pdserve-worker": "decode-1"}, "streamed": False}
"""Of a whole answer that was under way."""


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (failed("worker_lost"), checker.FAILED),
        (failed("worker_lost", begun=True), checker.FAILED),
        (failed("engine_died", begun=True), checker.FAILED),
        (failed("rate_limit_exceeded", 429), checker.FAILED),
        (failed("poisoned_request", 500), checker.POISONED),
        (failed("no_worker"), checker.NO_WORKER),
        (failed("no_worker", begun=True), checker.NO_WORKER),
        (failed("overloaded", 429), checker.UNCAUSED),
        (failed("draining"), checker.UNCAUSED),
        (failed("not_ready"), checker.UNCAUSED),
        (failed("no_router"), checker.UNCAUSED),
        (failed("draining", begun=True), checker.GIVEN_UP),
        (failed("overloaded", 429, **HAD), checker.GIVEN_UP),
        (failed("draining", **HAD), checker.GIVEN_UP),
        (failed("no_worker", **HAD), checker.NO_WORKER),
        (failed("deadline_exceeded", 504), checker.OUT_OF_TIME),
        (failed("deadline_exceeded", 504, after=60.0), checker.OUT_OF_TIME),
        (failed("deadline_exceeded", 504, after=60.0, **HAD), checker.OUT_OF_TIME),
        (failed("deadline_exceeded", begun=True, after=60.0), checker.OUT_OF_TIME),
    ],
)
def test_in_peace_no_patient_request_ends_by_an_error(one, expected):
    assert outcome(one) == expected


def test_a_refusal_says_when_to_come_again():
    one = failed("draining")
    assert outcome(one, away()) == checker.REJECTED
    del one.headers["retry-after"]
    assert outcome(one, away()) == checker.FAILED


@pytest.mark.parametrize(
    ("code", "node", "expected"),
    [
        ("draining", "front-1", checker.REJECTED),
        ("draining", "front-2", checker.UNCAUSED),
        ("draining", "decode-1", checker.UNCAUSED),
        ("not_ready", "front-1", checker.REJECTED),
        ("no_router", "router-1", checker.REJECTED),
        ("no_router", "decode-1", checker.UNCAUSED),
        ("overloaded", "decode-1", checker.REJECTED),
        ("overloaded", "router-1", checker.UNCAUSED),
        ("no_worker", "front-1", checker.REJECTED),
        ("no_worker", "decode-1", checker.NO_WORKER),
        ("model_not_found", "decode-1", checker.NO_WORKER),
    ],
)
def test_who_was_not_taken_is_refused_for_a_cause(code, node, expected):
    assert outcome(failed(code), away(node)) == expected
    past = outcome(failed(code), away(node, 90.0, 99.0))
    assert past == (checker.NO_WORKER if code in checker.NOBODY else checker.UNCAUSED)


def test_a_refusal_comes_early():
    late = failed("overloaded", 429, after=40.0)
    assert outcome(late, away("decode-1", until=150.0)) == checker.REFUSED_LATE
    assert outcome(late, away("front-1", until=150.0)) == checker.REJECTED


@pytest.mark.parametrize("one", [failed("draining", begun=True), failed("overloaded", 429, **HAD)])
def test_who_was_taken_is_given_up_only_by_a_frontend_that_was_away(one):
    assert outcome(one, away()) == checker.AWAY
    assert outcome(one, away(leaving=True)) == checker.GIVEN_UP, "it owes an answer"
    assert outcome(one, away("decode-1")) == checker.GIVEN_UP
    assert outcome(one, away(since=101.5)) == checker.GIVEN_UP


@pytest.mark.parametrize("begun", [False, True])
def test_a_hurried_request_has_its_own_deadline(begun):
    def hurried(after: float) -> str:
        return outcome(failed("deadline_exceeded", 504, begun=begun, after=after, hurried=True))

    assert hurried(0.6) == checker.OUT_OF_TIME
    assert hurried(3.1) == checker.DEADLINE
    assert hurried(40.0) == checker.OUT_OF_TIME


def test_a_request_that_is_lost_hangs_before_its_frontend_ends_it():
    flags = {place.name: place.flags for place in plan("sim") if place.part == "frontend"}
    limits = {name: float(flags[name][1].removesuffix("s")) for name in flags}
    assert limits == {"front-1": 120.0, "front-2": 120.0, "hurried": Circumstances().hurry}
    assert min(limits["front-1"], limits["front-2"]) > PATIENCE == Circumstances().patience
    assert outcome(failed("deadline_exceeded", 504, after=PATIENCE)) == checker.HUNG
    assert outcome(failed("overloaded", 429, after=PATIENCE), away("decode-1")) == checker.HUNG


def test_an_error_says_why():
    one = failed("draining")
    assert one.error is not None
    one.error["message"] = ""
    assert outcome(one, away()) == checker.FAILED


def test_a_connection_may_break_only_with_its_frontend():
    one = lived(event([5, 6], "ab"))
    one.broken = "reset"
    assert outcome(one) == checker.BROKEN
    assert outcome(one, Circumstances({"front-2": [101.0]})) == checker.BROKEN
    assert outcome(one, Circumstances({"front-1": [90.0]})) == checker.BROKEN
    assert outcome(one, Circumstances({"front-1": [101.0]})) == checker.CUT


def test_what_came_before_the_end_must_be_right_as_well():
    for one in (lived(event([5, 7], "ac")), lived(event([5, 7], "ac"), DONE)):
        one.hung_up = True
        assert outcome(one) == checker.LOST


def test_who_hangs_up_is_cancelled_and_who_waits_for_ever_is_hung():
    one = lived(event([5, 6], "ab"))
    one.hung_up = True
    assert outcome(one) == checker.CANCELLED
    one.hung_up, one.ended = False, 100.0 + PEACE.patience
    assert outcome(one) == checker.HUNG


def test_a_stream_without_its_end_is_no_completion():
    assert outcome(lived(*told(), usage())) == checker.BROKEN


# ---------------------------------------------------------------------- after quiet, and telling


def test_whatever_a_node_holds_is_seen():
    page = "# HELP x\npdserve_kv_blocks_used 0\npdserve_kv_blocks_used_at_most 3\n"
    assert not checker.held(page)
    page += 'pdserve_router_bookings{role="router"} 2\npdserve_kv_blocks_quarantined 1.0\n'
    assert checker.held(page) == {
        'pdserve_router_bookings{role="router"}': 2.0,
        "pdserve_kv_blocks_quarantined": 1.0,
    }
    assert not checker.grown({"a": 12, "b": 99}, {"a": 10}, 2, "tasks")
    assert checker.grown({"a": 13}, {"a": 10}, 2, "tasks")
    assert checker.most_grown({"a": 13, "b": 9, "new": 50}, {"a": 10, "b": 10}) == 3
    assert checker.most_grown({"b": 9}, {"b": 10}) == 0


def storm_of(*lives: ClientRequest) -> Storm:
    storm = Storm("s", "sim", 2, 10.0, 100.0)
    for one in lives:
        storm.take(one, judge(one, RIGHTS, PEACE))
    return storm


def test_gaps_belong_to_the_faults_within_them():
    slow = [event([5, 6], "ab", 100.5), event([7, 8], "cd", 103.0)]
    rest = event([9, 10, 11, 12], "efgh", 103.1, finish="length")
    storm = storm_of(lived(*slow, rest, usage(), DONE))
    for number, (kind, target, began) in enumerate(
        [
            ("kill node", "decode-1", 101.0),
            ("stop node", "decode-2", 101.0),
            ("terminate", "front-2", 101.0),
            ("stop both", "decode-1", 104.0),
        ]
    ):
        storm.done.append(Done(schedule.Fault(number, 1.0, kind, target, 0, 0), began, healed=9.0))
    storm.settle_gaps()
    assert storm.gaps == {"kill node": [2.5]}
    assert storm.worst_gap == 2.5


def test_a_report_says_what_was_lost_and_how_to_repeat_it():
    good = storm_of(lived(*told(), usage(), DONE))
    assert not good.problems
    assert report.WEATHERED in report.markdown(good, ["CPU: some"])
    bad = storm_of(
        failed("worker_lost", begun=True), lived(*told([5, 6, 9, 10, 11, 12], "abefgh"), DONE)
    )
    bad.done.append(Done(fault("kill node", "decode-1"), 100.0, healed=103.0))
    bad.last_words.append("the last of decode-1's log")
    page = report.markdown(bad, [])
    assert "Not weathered" in page
    assert "`--stall-timeout 3s` (default 10 s) and `--verify-kv all` (default sample)" in page
    assert "| 1 | 2 | 8 | 2 | 2 | 0 |" in page
    assert report.as_json(bad)["tokens_lost"] == 2
    text = report.failure(bad)
    for word in ("seed s", "kill node, decode-1", "worker_lost", "x-pdserve-worker", "the last of"):
        assert word in text


def good_and(*others: ClientRequest, good: int = 1) -> Storm:
    return storm_of(*(lived(*told(), usage(), DONE) for _ in range(good)), *others)


def test_too_small_a_share_that_completes_is_a_problem():
    def refused() -> ClientRequest:
        return failed("draining", after=0.1)

    cut = lived(event([5, 6], "ab"))
    cut.broken = "reset"
    storm = Storm("s", "sim", 2, 10.0, 100.0)
    lives = [lived(*told(), usage(), DONE) for _ in range(9)] + [refused(), refused(), refused()]
    left = lived(event([5, 6], "ab"))
    left.hung_up = True
    for one in (*lives, left):
        storm.take(one, judge(one, RIGHTS, away()))
    storm.take(cut, judge(cut, RIGHTS, Circumstances({"front-1": [101.0]})))
    assert storm.outcomes == Counter(
        {checker.COMPLETED: 9, checker.REJECTED: 3, checker.CANCELLED: 1, checker.CUT: 1}
    )
    assert storm.completed("patient") == (9, 12)
    assert storm.problems == ["9 of 12 patient requests completed, less than 80%"]
    one = refused()
    one.hurried = True
    hurried = [one] + [failed("deadline_exceeded", 504, after=3.1, hurried=True)] * 30
    assert "hurried" in good_and(*hurried, good=99).problems[-1]


def test_a_report_tells_frontends_apart_and_who_was_taken():
    storm = storm_of(
        lived(*told(), usage(), DONE),
        lived(*told(), usage(), DONE, hurried=True, frontend="hurried"),
        failed("deadline_exceeded", 504, after=3.1, hurried=True, frontend="hurried"),
    )
    for after in (0.2, 4.5):
        one = failed("draining", after=after)
        storm.take(one, judge(one, RIGHTS, away(until=110.0)))
    page = report.markdown(storm, [])
    for row in (
        "| completed | 2 | 1 | 0 | 1 | 0 |  |",
        "| rejected early | 2 | 0 | 2 | 0 | 0 |  |",
        "| deadline | 1 | 0 | 0 | 0 | 1 |  |",
        "| completed | 1 | 1 |",
        "| rejected early | 2 | 0 |",
        "| draining | front-1 | 2 | 0.20 s | 4.50 s | 4.50 s |",
        "- patient: 1 of 3 completed (33.3%; at least 80% must)",
    ):
        assert row in page
    numbers = report.as_json(storm)
    assert numbers["outcomes_by_frontend"]["front-1"] == {"completed": 1, "rejected early": 2}
    assert numbers["outcomes_by_group"]["hurried, not taken"] == {"deadline": 1}
    assert numbers["refused_seconds"]["draining at front-1"]["max"] == 4.5


def test_quantiles_are_samples():
    values = [float(value) for value in range(1, 101)]
    random.Random(1).shuffle(values)
    assert [report.quantile(values, share) for share in (0.5, 0.99, 1.0)] == [50.0, 99.0, 100.0]


# ---------------------------------------------------------------------- the storm


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.long(one_in=4)
@pytest.mark.timeout(900)
def test_nothing_is_lost_in_a_short_storm():
    storm = run(Wishes(run_seed(), SECONDS, every=2.0))
    assert not storm.problems, report.failure(storm)
    assert sum(storm.injected.values()) >= 8, "of 20; a busy machine takes longer over each"
    assert storm.outcomes[checker.COMPLETED] >= 500
    assert storm.most_open >= 200
