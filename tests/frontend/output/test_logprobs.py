import pytest

from pdserve.frontend.output.logprobs import (
    FLOOR,
    best_of,
    chat_logprobs,
    completion_logprobs,
    concatenate,
    prompt_logprobs,
    scored_prompt,
)
from pdserve.messages.request import TokenLogprob
from tests.frontend.support import TOKENIZER, tokens


def test_chat_entries_carry_exact_bytes_even_of_parts_of_characters():
    ids = tokens("a👍")
    entries = chat_logprobs(TOKENIZER, [TokenLogprob(token, -1.0, 1, []) for token in ids]).content
    assert entries is not None
    assert b"".join(bytes(entry.bytes or []) for entry in entries) == "a👍".encode()
    assert entries[0].token == "a"
    assert "�" in entries[-1].token


def test_the_top_is_in_the_engines_order_and_infinity_is_a_number():
    logprob = TokenLogprob(5, float("-inf"), 9, [(6, -0.1), (7, float("-inf"))])
    (entry,) = chat_logprobs(TOKENIZER, [logprob]).content or []
    assert entry.logprob == FLOOR
    assert [top.logprob for top in entry.top_logprobs] == [-0.1, FLOOR]


def test_completions_keep_parts_of_characters_apart():
    parts = [token for token in tokens("👍") if "�" in TOKENIZER.token_text(token)]
    assert len(parts) >= 2
    logprob = TokenLogprob(parts[0], -1.0, 1, [(part, -1.0) for part in parts])
    got = completion_logprobs(TOKENIZER, [logprob], [4])
    assert got.tokens[0].startswith("bytes:\\x")
    assert got.top_logprobs[0] is not None
    assert len(got.top_logprobs[0]) == len(set(parts))
    assert got.text_offset == [4]


def test_the_sampled_token_is_among_its_alternatives():
    got = completion_logprobs(TOKENIZER, [TokenLogprob(70, -3.0, 5, [(71, -0.1)])], [0])
    assert got.top_logprobs[0] == {
        TOKENIZER.token_text(71): -0.1,
        TOKENIZER.token_text(70): -3.0,
    }


def test_an_echoed_prompt_begins_with_a_token_without_logprob():
    ids = tokens("hello")
    echoed = prompt_logprobs(
        TOKENIZER, ids, "hello", [TokenLogprob(token, -0.5, 1, []) for token in ids[1:]], True
    )
    assert echoed.token_logprobs == [None] + [-0.5] * (len(ids) - 1)
    assert echoed.top_logprobs[0] is None
    assert "".join(echoed.tokens) == "hello"
    assert echoed.text_offset == [len(TOKENIZER.decode(ids[:index])) for index in range(len(ids))]
    own = completion_logprobs(TOKENIZER, [TokenLogprob(70, -1.0, 1, [])], [5])
    both = concatenate(echoed, own)
    assert len(both.tokens) == len(both.text_offset) == len(ids) + 1
    assert concatenate(None, own) is own


@pytest.mark.parametrize("skip", [True, False])
def test_offsets_point_into_a_text_prompt_as_it_was_sent(skip: bool) -> None:
    """It keeps the special tokens it spells; those the tokenizer puts in front are not in it."""
    first, end = (TOKENIZER.token_text(token) for token in (0, 1))
    ids = [0, *tokens("a"), 1, *tokens("👍b")]
    logprobs = [TokenLogprob(token, -0.5, 1, []) for token in ids[1:]]
    as_text = prompt_logprobs(TOKENIZER, ids, f"a{end}👍b", logprobs, skip)
    parts = len(ids) - 4
    start = 1 + len(end)
    assert as_text.text_offset == [0, 0, 1] + [start] * parts + [start + 1]
    whole = prompt_logprobs(TOKENIZER, ids, f"{first}a{end}👍b", logprobs, False)
    start += len(first)
    assert whole.text_offset == [0, len(first), len(first) + 1] + [start] * parts + [start + 1]
    bare = prompt_logprobs(TOKENIZER, ids, "a👍b", logprobs, True)
    assert bare.text_offset == [0, 0, 1] + [1] * parts + [2]


def test_tokens_can_be_named_by_their_ids():
    logprob = TokenLogprob(70, -1.0, 2, [(71, -0.5)])
    (entry,) = chat_logprobs(TOKENIZER, [logprob], as_ids=True).content or []
    assert entry.token == "token_id:70"
    assert entry.bytes == list(TOKENIZER.token_bytes(70))
    assert [top.token for top in entry.top_logprobs] == ["token_id:71"]
    echoed = prompt_logprobs(TOKENIZER, [69, 70], "ab", [logprob], True, as_ids=True)
    assert echoed.tokens == ["token_id:69", "token_id:70"]
    assert echoed.top_logprobs[1] == {"token_id:71": -0.5, "token_id:70": -1.0}


def test_a_scored_prompt_goes_by_token_id_and_its_first_token_has_no_score():
    first, scores = scored_prompt(TOKENIZER, [TokenLogprob(70, -3.0, 9, [(71, -0.1), (70, -3.0)])])
    assert first is None
    assert scores is not None
    assert list(scores) == ["70", "71"]
    assert (scores["70"].logprob, scores["70"].rank) == (-3.0, 9)
    assert (scores["71"].rank, scores["71"].decoded_token) == (1, TOKENIZER.token_text(71))


def test_alternatives_that_another_field_asked_for_are_left_out():
    one = TokenLogprob(70, -3.0, 9, [(71, -0.1), (72, -0.2)])
    assert [found.top for found in best_of([one], 1)] == [[(71, -0.1)]]
    assert best_of([one], 5) == [one]
