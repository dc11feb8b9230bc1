"""What a request rules out is never sampled, however it is sampled; and what else it is told."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine_core.scheduler.sequence import Sequence
from pdserve.messages.request import GenerateRequest, SamplingParams
from pdserve.token_ids import token_ids
from pdserve_engines.torch.sampling.sampler import Sampler, is_plain
from pdserve_engines.torch.sampling.token_bans import TokenBans

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

VOCAB = 12


def sequence(output: Seq[int] = (), handle: int = 1, prompt: Seq[int] = (3, 4), **sampling):
    params = SamplingParams(max_tokens=99, **sampling)
    request = GenerateRequest(request_id="r", model="m", prompt=token_ids(prompt), sampling=params)
    return Sequence(handle, 0, request, token_ids([*prompt, *output]), len(prompt), arrival=0.0)


def left(bans: TokenBans, *sequences: Sequence) -> list[set[int]]:
    """What each row may still become."""
    logits = torch.zeros(len(sequences), VOCAB)
    bans.apply(logits, sequences)
    return [{at for at, value in enumerate(row) if value > -math.inf} for row in logits.tolist()]


EVERY = set(range(VOCAB))


def test_only_allowed_tokens_are_left_in_their_own_row():
    rows = left(TokenBans(), sequence(allowed_token_ids=(2, 7)), sequence(handle=2))
    assert rows == [{2, 7}, EVERY]


def test_allowed_tokens_keep_their_numbers():
    logits = torch.arange(VOCAB, dtype=torch.float32).unsqueeze(0)
    TokenBans().apply(logits, [sequence(allowed_token_ids=(2, 7))])
    assert logits[0, [2, 7]].tolist() == [2.0, 7.0]


def test_a_bad_word_is_kept_from_its_last_token():
    bad = ((5,), (6, 7), (6, 8, 9))
    assert left(TokenBans(), sequence(bad_words=bad)) == [EVERY - {5}]
    assert left(TokenBans(), sequence([6], bad_words=bad)) == [EVERY - {5, 7}]
    assert left(TokenBans(), sequence([6, 8], bad_words=bad)) == [EVERY - {5, 9}]
    assert left(TokenBans(), sequence([1, 8], bad_words=bad)) == [EVERY - {5}]


def test_the_prompt_begins_no_bad_word():
    assert left(TokenBans(), sequence(prompt=(6,), bad_words=((6, 7),))) == [EVERY]
    assert left(TokenBans(), sequence([8], prompt=(6,), bad_words=((6, 8, 7),))) == [EVERY]


def test_a_sequence_that_is_over_is_forgotten():
    sampler = Sampler()
    one = sequence(temperature=0.0, bad_words=((5,),))
    sampler.sample(torch.zeros(1, VOCAB), [one])
    assert sampler.bans._lists
    sampler.forget([one.key])
    assert not sampler.bans._lists


words = st.lists(
    st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=3).map(tuple), max_size=6
).map(tuple)


@given(words, st.lists(st.integers(0, VOCAB - 1), max_size=8), st.floats(0, 2))
def test_no_bad_word_ever_ends(bad, output, temperature):
    """Against the plain definition: the output with its next token ends in none of them."""
    one = sequence(output, temperature=temperature, bad_words=bad)
    assert not is_plain(one) or not bad
    [token], _ = Sampler().sample(torch.randn(1, VOCAB), [one])
    said = (*output, token)
    assert not any(said[-len(word) :] == word for word in bad)


def test_logprobs_of_wanted_tokens_follow_the_likeliest_and_are_told_once():
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 3.0
    one = sequence(temperature=0.0, logprobs=1, logprob_token_ids=(9, 4), allowed_token_ids=(4,))
    expected = logits.log_softmax(-1)[0]
    _, [told] = Sampler().sample(logits, [one])
    assert told is not None
    assert [token for token, _ in told.top] == [4, 9]
    assert told.top[1][1] == float(expected[9])  # as the model has it, though it may not be said
    plain = sequence(temperature=0.0, logprobs=1)
    _, [told] = Sampler().sample(torch.zeros(1, VOCAB), [plain])
    assert told is not None
    assert len(told.top) == 1
