"""The queue's bounds, and what each answer of a collector means."""

import pytest

from pdserve.tracing.export.delivery import (
    BATCH_SPANS,
    QUEUE_SPANS,
    RETRY_FOR,
    CollectorAnswer,
    SpanQueue,
    judge,
    pause_before,
)
from tests.support.traces import make_trace

NOW = 1_790_000_000.0


def filled(number, **bounds):
    queue = SpanQueue(**bounds)
    for n in range(number):
        queue.add(make_trace(f"r{n}"))
    return queue


def drained(queue):
    batches = []
    while (batch := queue.take()) is not None:
        batches.append(batch)
    return batches


def test_what_comes_out_is_what_went_in():
    queue = filled(3)
    (batch,) = drained(queue)
    assert batch.spans == 21
    assert list(batch.traces()) == [make_trace(f"r{n}") for n in range(3)]
    assert (queue.spans, queue.size, queue.take()) == (0, 0, None)


def test_the_queue_is_bounded_in_spans_and_a_trace_goes_in_whole():
    queue = filled(10_000)
    assert QUEUE_SPANS - 7 < queue.spans <= QUEUE_SPANS
    assert queue.spans % 7 == 0
    assert not queue.add(make_trace())
    queue.take()
    assert queue.add(make_trace())


def test_the_queue_is_bounded_in_bytes():
    queue = SpanQueue(limit=10_000)
    assert queue.add(make_trace("a" * 8_000))
    assert not queue.add(make_trace("b" * 8_000))
    assert queue.size <= 10_000
    assert queue.spans == 7


def test_batches_are_bounded_in_spans_and_bytes():
    assert all(batch.spans <= BATCH_SPANS for batch in drained(filled(500)))
    large = SpanQueue()
    for _ in range(5):
        large.add(make_trace("x" * 600_000))
    assert [batch.spans for batch in drained(large)] == [7] * 5


def test_a_trace_larger_than_a_batch_goes_alone():
    queue = SpanQueue()
    queue.add(make_trace("x" * 2_000_000))
    queue.add(make_trace())
    assert [batch.spans for batch in drained(queue)] == [7, 7]


def test_a_full_batch_is_seen():
    queue = filled(BATCH_SPANS // 7)
    assert not queue.full_batch
    queue.add(make_trace())
    assert queue.full_batch
    queue.take()
    queue.add(make_trace("x" * 2_000_000))
    assert queue.full_batch


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("status", [200, 202, 204])
def test_success(status):
    verdict = judge(CollectorAnswer(status, body=b"{}"), NOW)
    assert (verdict.retry, verdict.refused, verdict.rejected, verdict.problem) == (
        *(False, False, 0, ""),
    )


def test_partial_success_names_number_and_words():
    body = b'{"partialSuccess":{"rejectedSpans":"3","errorMessage":"clock"}}'
    verdict = judge(CollectorAnswer(200, body=body), NOW)
    assert (verdict.rejected, verdict.problem) == (3, "it has not taken 3 spans: clock")
    warns = judge(CollectorAnswer(200, body=body.replace(b"3", b"0")), NOW)
    assert (warns.rejected, warns.problem) == (0, "it warns: clock")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_what_is_sent_again(status):
    verdict = judge(CollectorAnswer(status), NOW)
    assert verdict.retry
    assert not verdict.refused
    assert str(status) in verdict.problem


def test_no_answer_is_sent_again():
    verdict = judge(CollectorAnswer(failure="it cannot be reached"), NOW)
    assert verdict.retry
    assert verdict.problem.startswith("it cannot be reached")


@pytest.mark.parametrize(
    ("status", "remedy"),
    [
        *((400, "log"), (401, "HEADERS"), (403, "HEADERS"), (404, "4318"), (405, "4318")),
        *((413, "log"), (415, "JSON"), (500, "log"), (501, "log"), (301, "redirects")),
    ],
)
def test_what_is_never_sent_again_has_a_remedy(status, remedy):
    verdict = judge(CollectorAnswer(status), NOW)
    assert not verdict.retry
    assert verdict.refused
    assert str(status) in verdict.problem
    assert remedy in verdict.problem


@pytest.mark.parametrize(
    ("text", "wait"),
    [
        ("7", 7.0),
        (" 120 ", 120.0),
        ("0", 0.0),
        ("9" * 400, 999_999_999.0),
        ("Mon, 21 Sep 2026 14:13:50 GMT", 30.0),
        ("Mon, 21 Sep 2020 14:13:50 GMT", 0.0),
        ("Mon, 99 Sep 2026", 0.0),
        ("soon", 0.0),
        ("-5", 0.0),
        ("", 0.0),
        ("²", 0.0),
    ],
)
def test_retry_after(text, wait):
    assert judge(CollectorAnswer(429, retry_after=text), NOW).wait == wait


def test_pauses_grow_to_a_bound_and_heed_the_collector():
    least = [pause_before(n, 0.0, 0.0) for n in range(1, 8)]
    most = [pause_before(n, 0.0, 1.0) for n in range(1, 8)]
    assert least == [0.25, 0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
    assert most == [0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert pause_before(1, 20.0, 0.5) == 20.0
    assert pause_before(10**6, 0.0, 1.0) < RETRY_FOR
