"""Increments add up to the decode of the whole, for every kind of tokenizer and any ids."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from pdserve.text.tokenization.detokenizer import MAX_BYTE_RUN, Detokenizer
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.seeds import is_long, number_for, run_seed
from tests.text import builders

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLES = 500 if is_long() else 60
SEED = number_for(run_seed(), __name__)
EXTRA_ROWS = 64
"""Ids that the model has and the tokenizer lacks."""

_made: dict[str, Tokenizer] = {}


def made(name: str) -> Tokenizer:
    if name not in _made:
        content = builders.KINDS[name][1]().to_str().encode()
        size = builders.KINDS[name][1]().get_vocab_size() + EXTRA_ROWS
        _made[name] = Tokenizer.from_bytes(content, model_vocab_size=size)
    return _made[name]


def whole(name: str, ids: Sequence[int], skip: bool) -> str:
    return builders.KINDS[name][1]().decode(ids, skip_special_tokens=skip)


def ids_of(name: str, max_size: int = 60) -> st.SearchStrategy[list[int]]:
    raw = builders.KINDS[name][1]()
    last = raw.get_vocab_size() + EXTRA_ROWS + 5
    vocab = raw.get_vocab()
    bytes_only = [i for token, i in vocab.items() if token.startswith("<0x")]
    special = sorted(raw.get_added_tokens_decoder())
    one = st.integers(0, last) | st.sampled_from(special)
    if bytes_only:
        one = one | st.sampled_from(bytes_only)
    texts = st.text(max_size=12).map(lambda text: raw.encode(text).ids)
    parts = st.lists(texts | st.lists(one, max_size=8), max_size=8)
    return parts.map(lambda lists: [i for part in lists for i in part][:max_size])


def drain(stream: Detokenizer, ids: Sequence[int]) -> str:
    return "".join([stream.feed(token_id) for token_id in ids]) + stream.flush()


@pytest.mark.parametrize("name", builders.KINDS)
def test_the_decoder_is_recognised(name):
    assert made(name)._pieces.shape.kind == builders.KINDS[name][0]


@pytest.mark.parametrize("name", builders.KINDS)
@pytest.mark.parametrize("skip", [False, True])
def test_increments_add_up_to_a_decode_of_the_whole(name, skip):
    @seed(SEED)
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(ids_of(name))
    def check(ids):
        stream = made(name).detokenizer(skip_special_tokens=skip)
        assert drain(stream, ids) == whole(name, ids, skip)

    check()


@pytest.mark.parametrize("name", builders.KINDS)
def test_special_tokens_that_are_kept_are_shown_among_skipped_ones(name):
    special = sorted(made(name).special_ids)
    keep = frozenset(special[::2])

    @seed(SEED)
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(ids_of(name))
    def check(ids):
        shown = [i for i in ids if i in keep or i not in made(name).special_ids]
        assert drain(made(name).detokenizer(keep=keep), ids) == whole(name, shown, False)
        as_json = made(name).detokenizer(keep=keep)
        escaped = b"".join([as_json.feed_json([i]) for i in ids])
        assert json.loads(b'"%s"' % escaped) + as_json.flush() == whole(name, shown, False)

    check()


@pytest.mark.parametrize("name", builders.KINDS)
def test_json_increments_are_the_text_escaped(name):
    @seed(SEED)
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(ids_of(name), st.integers(1, 5))
    def check(ids, step):
        stream = made(name).detokenizer()
        parts = [stream.feed_json(ids[at : at + step]) for at in range(0, len(ids), step)]
        text = "".join(json.loads(b'"' + part + b'"') for part in parts) + stream.flush()
        assert text == whole(name, ids, True)
        assert not any(b"\n" in part or b"\r" in part for part in parts)

    check()


@pytest.mark.parametrize("name", builders.KINDS)
@pytest.mark.parametrize("skip", [False, True])
def test_output_continues_its_prompt(name, skip):
    """The decode of prompt and output together is the prompt's text and the increments."""

    @seed(SEED)
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(ids_of(name), st.text(max_size=12, alphabet="ab 你é."))
    def check(ids, prompt_text):
        prompt = made(name).encode(prompt_text + "a")
        stream = made(name).detokenizer(skip_special_tokens=skip, prompt=prompt)
        together = whole(name, [*prompt, *ids], skip)
        assert whole(name, prompt, skip) + drain(stream, ids) == together

    check()


def test_half_a_surrogate_is_not_held_back():
    """The bytes ED A1, which no third makes a character."""
    vocab = builders.byte_level().get_vocab()
    ids = [vocab[letter] for letter in ("a", "\u00ed", "\u00a1")]
    stream = made("byte_level").detokenizer()
    assert [stream.feed(each) for each in ids] == ["a", "", "\ufffd" * 2]
    assert stream.flush() == ""


@pytest.mark.parametrize("skip", [False, True])
def test_byte_level_text_is_shown_as_soon_as_it_is_certain(skip):
    @seed(SEED)
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(ids_of("byte_level", max_size=20))
    def check(ids):
        stream = made("byte_level").detokenizer(skip_special_tokens=skip)
        shown = ""
        for count, token_id in enumerate(ids, 1):
            shown += stream.feed(token_id)
            assert len(shown) >= len(whole("byte_level", ids[:count], skip)) - 1

    check()


@pytest.mark.parametrize("name", ["byte_level", "llama_like", "odd_byte_level"])
def test_a_character_is_never_split(name):
    tokenizer = made(name)
    stream = tokenizer.detokenizer()
    ids = tokenizer.encode("a🦀b")
    increments = [stream.feed(token_id) for token_id in ids]
    assert len(ids) > 3
    assert [part for part in [*increments, stream.flush()] if "🦀" in part] != []
    assert not any("\ufffd" in part for part in increments)


def test_bytes_that_are_no_character_are_replaced():
    stream = made("byte_level").detokenizer()
    vocab = builders.byte_level().get_vocab()
    euro = [vocab[token] for token in "âĤ¬"]  # E2 82 AC
    assert [stream.feed(token_id) for token_id in euro] == ["", "", "€"]
    assert stream.feed(euro[0]) == ""
    assert stream.feed(vocab["a"]) == "\ufffda"
    assert stream.feed(euro[0]) == ""
    assert stream.flush() == "\ufffd"


def byte_ids(data: bytes) -> list[int]:
    vocab = builders.llama_like().get_vocab()
    return [vocab[f"<0x{byte:02X}>"] for byte in data]


def test_a_run_of_byte_tokens_is_shown_when_it_ends():
    stream = made("llama_like").detokenizer()
    run = [stream.feed(token_id) for token_id in byte_ids("မြန်".encode())]
    assert "".join(run) == ""
    assert stream.feed(builders.llama_like().get_vocab()["a"]) == "မြန်a"


def test_a_bad_byte_spoils_its_run_as_in_a_decode_of_the_whole():
    ids = byte_ids("é".encode() + b"\xff" + b"a")
    stream = made("llama_like").detokenizer()
    assert [stream.feed(token_id) for token_id in ids] == ["", "", "\ufffd" * 3, "\ufffd"]
    assert whole("llama_like", ids, True) == "\ufffd" * 4


@pytest.mark.parametrize("name", ["llama_like", "odd_byte_fallback"])
def test_a_long_run_of_byte_tokens_does_not_stall_the_stream(name):
    text = "ကခဂဃင" * 20
    stream = made(name).detokenizer()
    shown, longest_wait = "", 0
    for fed, token_id in enumerate(byte_ids(text.encode()), 1):
        shown += stream.feed(token_id)
        longest_wait = max(longest_wait, fed - len(shown.encode()))
    assert longest_wait < MAX_BYTE_RUN + 4  # the character that reaches the bound is finished
    assert shown + stream.flush() == text


@pytest.mark.parametrize("name", builders.KINDS)
def test_ids_that_the_vocabulary_lacks_have_no_text(name):
    tokenizer = made(name)
    beyond = [tokenizer.vocab_size, tokenizer.vocab_size + EXTRA_ROWS + 1000, 2**31 - 1]
    stream = tokenizer.detokenizer()
    assert drain(stream, beyond) == ""
    assert tokenizer.detokenizer().feed_json(beyond) == b""
    assert [tokenizer.token_text(i) for i in beyond] == ["", "", ""]
    assert [tokenizer.token_bytes(i) for i in beyond] == [b"", b"", b""]


@pytest.mark.parametrize("name", ["word_level", "wordpiece", "word_suffix"])
def test_spaces_between_special_tokens_can_be_left_out(name):
    raw = builders.KINDS[name][1]()
    a, b = raw.get_vocab()["<s>"], raw.get_vocab()["</s>"]
    hello = raw.encode("hello").ids
    ids = [a, b, a, *hello, b, b]
    plain = made(name).decode(ids, skip_special_tokens=False)
    glued = made(name).decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)
    assert plain == raw.decode(ids, skip_special_tokens=False)
    assert glued.startswith("<s></s><s>")
    assert glued.endswith("</s></s>")
    assert glued.replace(" ", "") == plain.replace(" ", "")


def test_the_start_of_a_text_is_told_from_its_continuation():
    tokenizer = made("llama_like")
    ids = tokenizer.encode("quick fox")
    assert tokenizer.decode(ids) == "quick fox"
    assert drain(tokenizer.detokenizer(prompt=tokenizer.encode("The")), ids) == " quick fox"
    bos = [builders.llama_like().get_vocab()["<s>"]]
    assert drain(tokenizer.detokenizer(prompt=bos), ids) == "quick fox"  # nothing shown yet
    shown = tokenizer.detokenizer(prompt=bos, skip_special_tokens=False)
    assert drain(shown, ids) == " quick fox"


def test_one_table_serves_many_sequences_at_once():
    tokenizer = made("byte_level")
    ids = tokenizer.encode("naïve 👍🏽 café")
    streams = [tokenizer.detokenizer() for _ in range(3)]
    texts = ["", "", ""]
    for token_id in ids:  # in step, each holding the same half characters
        for index, stream in enumerate(streams):
            texts[index] += stream.feed(token_id)
    assert texts == ["naïve 👍🏽 café"] * 3
