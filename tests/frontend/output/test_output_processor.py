from hypothesis import given
from hypothesis import strategies as st

from pdserve.frontend.output.output_processor import ChoiceOutputProcessor, merge_deltas
from pdserve.messages.request import Finish, TokenDelta
from pdserve.text.stop_matcher import StopMatcher
from tests.frontend.support import TOKENIZER, tokens
from tests.support.fake_backend import logprob_of


def run(ids, cuts=(), stops=(), include=False, reason="length", min_tokens=0):
    """Feed `ids` in deltas cut at `cuts`; all pieces and the choice."""
    matcher = StopMatcher(stops, include_stop=include, min_tokens=min_tokens) if stops else None
    choice = ChoiceOutputProcessor(TOKENIZER.detokenizer(), matcher)
    borders = sorted({0, len(ids), *(cut for cut in cuts if 0 < cut < len(ids))})
    pieces = []
    for begin, end in zip(borders, borders[1:] or [0], strict=False):
        part = ids[begin:end]
        last = end == len(ids)
        delta = TokenDelta(
            0,
            0,
            part,
            Finish(reason=reason) if last else None,
            [logprob_of(token, 0) for token in part],
        )
        pieces += choice.feed(delta)
        if choice.finish_reason is not None:
            break
    return pieces, choice


def test_each_token_with_text_is_a_piece():
    ids = tokens("The quick brown fox")
    pieces, choice = run(ids, cuts=range(len(ids)))
    assert [piece.tokens for piece in pieces] == [[token] for token in ids]
    assert choice.finish_reason == "length"


def test_bytes_of_one_character_are_told_with_its_last_token():
    ids = tokens("a👍b")
    pieces, _ = run(ids, cuts=range(len(ids)))
    assert "".join(piece.text for piece in pieces) == "a👍b"
    assert all("�" not in piece.text for piece in pieces)
    assert [token for piece in pieces for token in piece.tokens] == ids


def test_a_stop_string_across_tokens_cuts_text_and_keeps_its_tokens():
    ids = tokens("one two three four")
    pieces, choice = run(ids, cuts=range(len(ids)), stops=("wo thr",))
    whole = merge_deltas(pieces)
    assert whole.text == "one t"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", "wo thr")
    assert whole.tokens == ids[: choice.completion_tokens]
    assert len(whole.logprobs) == choice.completion_tokens
    assert "wo thr" in TOKENIZER.decode(whole.tokens)
    assert "wo thr" not in TOKENIZER.decode(whole.tokens[:-1])


def test_a_stop_string_may_be_included():
    pieces, _ = run(tokens("one two three"), stops=("two",), include=True)
    assert merge_deltas(pieces).text == "one two"


def test_text_held_for_a_stop_string_comes_at_the_end():
    pieces, choice = run(tokens("abc sto"), stops=("stop",), reason="stop")
    assert merge_deltas(pieces).text == "abc sto"
    assert (choice.finish_reason, choice.stop_reason) == ("stop", None)


def test_unfinished_bytes_at_the_end_become_a_replacement():
    ids = tokens("x👍")[:-1]
    pieces, _ = run(ids, cuts=range(len(ids)))
    assert merge_deltas(pieces).text.startswith("x�")


def test_a_choice_may_end_without_tokens():
    pieces, choice = run([], reason="stop")
    assert [piece.text for piece in pieces] == [""]
    assert choice.finish_reason == "stop"


def test_offsets_count_the_characters_before_each_token():
    ids = tokens("héllo 你 x")
    pieces, _ = run(ids, cuts=[3])
    whole = merge_deltas(pieces)
    shown = [TOKENIZER.detokenizer().feed_many(ids[:count]) for count in range(len(ids))]
    assert whole.offsets == [len(text) for text in shown]


IDS = st.lists(st.integers(0, 460), max_size=30)
STOPS = st.lists(st.sampled_from(["e", "th", "fox", " ", "好", "<s>"]), max_size=3, unique=True)


@given(IDS, st.lists(st.integers(1, 30)), STOPS, st.booleans(), st.integers(0, 4))
def test_however_deltas_are_cut_the_pieces_add_up(ids, cuts, stops, include, min_tokens):
    one, end_one = run(ids, stops=tuple(stops), include=include, min_tokens=min_tokens)
    many, end_many = run(ids, cuts, tuple(stops), include, min_tokens=min_tokens)
    assert merge_deltas(one) == merge_deltas(many)
    assert end_one.finish_reason == end_many.finish_reason
    assert end_one.stop_reason == end_many.stop_reason
    whole = merge_deltas(many)
    told = end_many.completion_tokens
    assert whole.tokens == ids[:told]
    assert [logprob.token for logprob in whole.logprobs] == ids[:told]
    if end_many.stop_reason is None:
        assert told == len(ids)
        assert whole.text == TOKENIZER.decode(ids)
    else:
        assert end_many.finish_reason == "stop"
        assert TOKENIZER.decode(ids).startswith(whole.text.rstrip("�"))
