"""Building sequences and telling how they end."""

from __future__ import annotations

import pytest

from pdserve.engine_core.scheduler.submission import (
    Submission,
    build_sequences,
    end_reason,
    finish_record,
)
from pdserve.messages.request import GenerateRequest, SamplingParams, TokenLogprob


def request(**changes: object) -> GenerateRequest:
    fields = {"request_id": "r", "model": "m", "prompt": [1, 2, 3]} | changes
    fields.setdefault("sampling", SamplingParams(max_tokens=4, min_tokens=2, stop_token_ids=(7,)))
    return GenerateRequest(**fields)  # type: ignore[arg-type]


def test_each_choice_is_a_sequence_of_its_own():
    one, two = build_sequences(5, request(n=2, output=[[4], []], priority=3), 1.5, 9, 100)
    assert (one.tokens.tolist(), two.tokens.tolist()) == ([1, 2, 3, 4], [1, 2, 3])
    assert (one.key, two.key) == ((5, 0), (5, 1))
    assert (one.order, two.order) == ((-3, 9, 0), (-3, 9, 1))
    assert (one.max_len, one.min_len, one.prompt_len) == (7, 5, 3)
    one.tokens.append(99)
    assert two.tokens.tolist() == [1, 2, 3]


def test_the_models_length_bounds_the_sequence():
    (sequence,) = build_sequences(1, request(), 0.0, 0, 5)
    assert sequence.max_len == 5


def test_a_prompt_that_ends_with_a_stop_id_has_not_ended():
    (sequence,) = build_sequences(1, request(prompt=[1, 7]), 0.0, 0, 100)
    assert end_reason(sequence) is None
    sequence.tokens.extend([7, 7])
    assert end_reason(sequence) is None  # min_tokens
    sequence.tokens.append(7)
    assert end_reason(sequence) == ("stop", 7)


def test_what_never_ran_has_only_waited():
    (sequence,) = build_sequences(1, request(), 2.0, 0, 100)
    finish = finish_record(sequence, "length", None, 5.0)
    assert (finish.queue_seconds, finish.prefill_seconds) == (3.0, 0.0)


def test_the_cache_is_read_again_once_prompt_logprobs_are_complete():
    wants = request(sampling=SamplingParams(max_tokens=1, prompt_logprobs=0))
    submission = Submission(1, wants, None, [])
    assert not submission.reads_cache
    submission.prompt_logprobs += [TokenLogprob(2, -1.0, 1, [])] * 2
    assert submission.reads_cache
    assert Submission(1, request(), None, []).reads_cache


def test_choices_that_have_ended_have_no_sequence():
    wants = request(n=4, output=[[4], [5, 6], [], [7, 7]], ended=(2, 0, 2))
    assert [*wants.live] == [1, 3]
    assert wants.given == [5, 6]
    assert wants.diverged
    assert [(s.choice, s.num_output) for s in build_sequences(5, wants, 0.0, 0, 100)] == [
        (1, 2),
        (3, 2),
    ]
    alone = request(n=2, output=[[4], [5]], ended=(0,))
    assert not alone.diverged
    assert alone.given == [5]
    assert not request(n=2, output=[[4], []], ended=(0,)).diverged


def test_a_vectors_prompt_has_no_end_of_its_own():
    wants = request(pooling="last", sampling=SamplingParams(max_tokens=1, stop_token_ids=(3,)))
    (sequence,) = build_sequences(1, wants, 0.0, 0, 3)
    assert (sequence.pools, sequence.max_len) == (True, 4)
    assert end_reason(sequence) is None


@pytest.mark.parametrize(("pooling", "reads"), [("mean", False), ("last", True), ("", True)])
def test_a_mean_reads_no_cache(pooling, reads):
    wants = request(pooling=pooling)
    assert Submission(1, wants, None, []).reads_cache == reads
