"""The tokenizer does with a model's two files what transformers does with them."""

from __future__ import annotations

import json
import threading
import warnings
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import processors

from pdserve.errors import ConfigError, InvalidRequest
from pdserve.messages.card import ModelCard
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.seeds import is_long, number_for, run_seed
from tests.text import builders

EXAMPLES = 1000 if is_long() else 60
SEED = number_for(run_seed(), __name__)


def content_of(raw: RawTokenizer) -> bytes:
    return raw.to_str().encode()


def with_config(raw: RawTokenizer, **config: Any) -> Tokenizer:
    return Tokenizer.from_bytes(content_of(raw), json.dumps(config).encode())


def reference(folder: Any, raw: RawTokenizer, **config: Any) -> Any:
    """transformers' tokenizer over the same files."""
    (folder / "tokenizer.json").write_bytes(content_of(raw))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder))


TEXT = "fox Größe <s>naïve</s> 你好 👍🏽 <tool> it's 12:30\n\n\tif x:"
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "names": NAMES,
    "a switch without effect": {**NAMES, "add_bos_token": True},
    "switches without effect": {**NAMES, "add_bos_token": False, "add_eos_token": True},
    "tokens as objects": {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
    },
    "special only by its name": {"eos_token": "▁<tool>"},
    "further special tokens": {**NAMES, "additional_special_tokens": ["▁<tool>", "f"]},
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("processor", [None, "template"])
@pytest.mark.parametrize("build", [builders.byte_level, builders.llama_like])
def test_ids_and_text_are_those_of_transformers(tmp_path, build, processor, config):
    raw = RawTokenizer.from_str(build().to_str())
    if processor is not None:  # as Llama 3 has it: the file itself adds the first token
        ids = [("<s>", raw.token_to_id("<s>"))]
        raw.post_processor = processors.TemplateProcessing(
            single=["<s>:0", "$A:0"], special_tokens=ids
        )
    ours = with_config(raw, **CONFIGS[config])
    theirs = reference(tmp_path, raw, **CONFIGS[config])
    for add in (True, False):
        assert ours.encode(TEXT, add).tolist() == theirs.encode(TEXT, add_special_tokens=add)
    ids = theirs.encode(TEXT)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
            ids, skip_special_tokens=skip
        )
    assert ours.eos_token_id == theirs.eos_token_id


@pytest.mark.parametrize("name", ["byte_level", "gemma_like"])
def test_text_comes_back_from_its_tokens(name):
    tokenizer = Tokenizer.from_bytes(content_of(builders.KINDS[name][1]()))

    @seed(SEED)
    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<▁"), max_size=60))
    def check(text):
        assert tokenizer.decode(tokenizer.encode(text)) == text

    check()


def test_padding_and_truncation_in_the_file_are_switched_off():
    raw = RawTokenizer.from_str(builders.byte_level().to_str())
    raw.enable_padding(length=64, pad_token="<s>")
    raw.enable_truncation(4)
    tokenizer = Tokenizer.from_bytes(content_of(raw))
    assert len(tokenizer.encode("one")) < 10
    assert len(tokenizer.encode("a b c d e f g h i j k l m n")) > 10


def test_a_batch_is_its_texts_one_by_one():
    tokenizer = Tokenizer.from_bytes(content_of(builders.byte_level()))
    texts = ["one", "", "two <s>", "你好"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_text_that_is_no_unicode_is_the_requests_mistake():
    tokenizer = Tokenizer.from_bytes(content_of(builders.byte_level()))
    with pytest.raises(InvalidRequest, match="Unicode"):
        tokenizer.encode("\ud800")


def test_the_card_is_all_that_is_needed():
    card = ModelCard(
        name="m",
        max_model_len=100,
        vocab_size=1000,
        block_size=16,
        tokenizer_json=content_of(builders.byte_level()),
        tokenizer_config_json=json.dumps(NAMES).encode(),
    )
    tokenizer = Tokenizer.from_card(card)
    assert tokenizer.special_tokens == NAMES
    assert tokenizer.vocab_size == builders.byte_level().get_vocab_size()
    assert tokenizer.decode([999]) == ""
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.token_to_id("</s>") == 1


@pytest.mark.parametrize(
    ("tokenizer_json", "config", "words"),
    [
        (b"", b"{}", "no tokenizer.json; convert"),
        (b" \n", b"{}", "no tokenizer.json; convert"),
        (b"{", b"{}", "tokenizer.json cannot be used"),
        (b"{}", b"{}", "tokenizer.json cannot be used"),
        (b'{"model": {"type": "Magic"}}', b"{}", "tokenizer.json cannot be used"),
        (None, b"[]", "tokenizer_config.json"),
        (None, b"{", "tokenizer_config.json"),
        (None, b'{"chat_template": 5}', "chat_template"),
        (None, b'{"chat_template": [{"name": "x"}]}', "chat_template"),
        (None, b'{"added_tokens_decoder": {"x": {}}}', "added_tokens_decoder"),
        (None, b'{"added_tokens_decoder": {"7": {"content": "<new>"}}}', "the id 7"),
    ],
)
def test_files_that_cannot_be_used_are_the_operators_mistake(tokenizer_json, config, words):
    content = content_of(builders.byte_level()) if tokenizer_json is None else tokenizer_json
    with pytest.raises(ConfigError) as caught:
        Tokenizer.from_bytes(content, config)
    assert words in caught.value.message


def test_a_token_that_only_the_config_knows_gets_its_id():
    raw = builders.byte_level()
    new = {str(raw.get_vocab_size()): {"content": "<new>", "special": True}}
    tokenizer = with_config(raw, added_tokens_decoder=new)
    assert tokenizer.encode("a<new>")[-1] == raw.get_vocab_size()
    assert tokenizer.decode(tokenizer.encode("a<new>")) == "a"


def test_a_named_token_that_the_vocabulary_lacks_is_not_invented():
    raw = builders.byte_level()
    tokenizer = with_config(raw, pad_token="<pad>")
    assert tokenizer.vocab_size == raw.get_vocab_size()
    assert tokenizer.special_tokens["pad_token"] == "<pad>"


def test_ids_with_gaps_between_them_have_their_text():
    raw = RawTokenizer.from_str(builders.word_level().to_str())
    file = json.loads(raw.to_str())
    file["model"]["vocab"]["far"] = 5000
    tokenizer = Tokenizer.from_bytes(json.dumps(file).encode())
    assert tokenizer.encode("hello far")[-1] == 5000
    assert tokenizer.decode(tokenizer.encode("hello far")) == "hello far"
    assert tokenizer.decode([4000]) == ""


@pytest.mark.parametrize("name", [name for name in builders.KINDS if name != "word_suffix"])
def test_bytes_of_tokens_add_up_to_the_text(name):
    """Not so where a token's text depends on the one after it."""
    tokenizer = Tokenizer.from_bytes(content_of(builders.KINDS[name][1]()))
    ids = tokenizer.encode("The quick é 你", add_special_tokens=False)
    whole = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert whole.decode().strip() == tokenizer.decode(ids, skip_special_tokens=False).strip()


def test_a_tokens_text_shows_what_it_is():
    tokenizer = Tokenizer.from_bytes(content_of(builders.byte_level()))
    e_acute = tokenizer.encode("é")
    texts = [tokenizer.token_text(token_id) for token_id in e_acute]
    assert b"".join(tokenizer.token_bytes(i) for i in e_acute) == "é".encode()
    assert texts == ["é"] or texts == ["\ufffd", "\ufffd"]
    assert tokenizer.token_text(0) == "<s>"
    assert tokenizer.token_bytes(0) == b"<s>"
    llama = Tokenizer.from_bytes(content_of(builders.llama_like()))
    byte = builders.llama_like().get_vocab()["<0xE4>"]
    assert (llama.token_text(byte), llama.token_bytes(byte)) == ("\ufffd", b"\xe4")


def test_threads_may_share_a_tokenizer():
    tokenizer = Tokenizer.from_bytes(content_of(builders.byte_level()))
    expected = builders.byte_level().encode(TEXT).ids
    wrong: list[object] = []

    def work() -> None:
        for _ in range(200):
            ids = tokenizer.encode(TEXT).tolist()
            stream = tokenizer.detokenizer(skip_special_tokens=False)
            text = stream.feed_many(ids) + stream.flush()
            if ids != expected or text != TEXT:
                wrong.append((ids, text))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_encoding_leaves_the_interpreter_to_others():
    """Another thread runs while a long text is encoded: the lock is released."""
    tokenizer = Tokenizer.from_bytes(content_of(builders.byte_level()))
    started, done = threading.Event(), threading.Event()
    counted: list[None] = []

    def count() -> None:
        started.set()
        while not done.is_set():
            counted.append(None)

    thread = threading.Thread(target=count)
    thread.start()
    started.wait()
    before = len(counted)
    tokenizer.encode("The quick brown fox. " * 20_000)
    during = len(counted) - before
    done.set()
    thread.join()
    assert during > 10_000


@pytest.fixture
def at_once(monkeypatch):
    """How many characters the library was given, each time."""
    given: list[int] = []
    encode = Tokenizer._encode_at_once

    def watch(self, texts, add_special_tokens):
        given.append(sum(map(len, texts)))
        return encode(self, texts, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "_encode_at_once", watch)
    return given


def test_many_texts_are_encoded_in_bounded_batches(at_once, monkeypatch):
    monkeypatch.setattr("pdserve.text.tokenization.tokenizer._BATCH_CHARS", 100)
    tokenizer = Tokenizer.from_bytes(builders.byte_level().to_str().encode())
    texts = ["word " * count for count in (1, 5, 10, 30, 2, 0, 19)]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    assert at_once[:4] == [5 + 25 + 50, 150, 10, 95]
    assert tokenizer.encode_batch([]) == []


def test_a_long_text_is_counted_in_slices_and_no_further_than_needed(at_once, monkeypatch):
    monkeypatch.setattr("pdserve.text.tokenization.tokenizer._SLICE_CHARS", 1000)
    tokenizer = Tokenizer.from_bytes(builders.byte_level().to_str().encode())
    text = "some words that go on " * 1000
    count = len(tokenizer.encode(text))
    at_once.clear()
    assert 500 < tokenizer.count_up_to(text, 500) <= count
    assert sum(at_once) < 4000
    assert max(at_once) <= 1000
    assert 0.6 * count < tokenizer.count_up_to(text, 10**9) <= count


def test_an_enormous_id_is_refused():
    file = json.loads(builders.byte_level().to_str())
    file["model"]["vocab"]["far away"] = 2**32 - 1
    file["added_tokens"] = []
    with pytest.raises(ConfigError, match="4294967295"):
        Tokenizer.from_bytes(json.dumps(file).encode())
