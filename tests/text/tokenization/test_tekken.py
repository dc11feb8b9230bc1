"""A converted `tekken.json` against the library that its authors publish, id by id."""

from __future__ import annotations

import json
import random
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.text.tokenization.tekken import from_tekken
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.text.builders import CORPUS, tekken_file, tekken_words

if TYPE_CHECKING:
    from pathlib import Path

NAMED = {0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]"}
ALPHABETS = [
    range(32, 127),
    range(0x20, 0x250),
    range(0x4E00, 0x4E40),
    range(0x1F440, 0x1F460),
    range(0xD7FF),
    [9, 10, 13, 32, 0x85, 0xA0, 0x3000, 39, 48, 65, 97],
]


def texts(rng: random.Random, count: int) -> list[str]:
    """Pieces of prose and characters of all kinds side by side."""
    prose = " ".join(CORPUS)
    made = list(CORPUS)
    for _ in range(count):
        start = rng.randrange(len(prose))
        strange = "".join(map(chr, rng.choices(rng.choice(ALPHABETS), k=rng.randint(1, 20))))
        made.append(prose[start : start + rng.randint(0, 30)] + strange)
    return made


def reference(path: Path, content: bytes) -> Any:
    library = pytest.importorskip("mistral_common.tokens.tokenizers.tekken")
    file = path / "tekken.json"
    file.write_bytes(content)
    return library.Tekkenizer.from_file(file)


def compare(path: Path, content: bytes, rng: random.Random, count: int) -> None:
    theirs, ours = reference(path, content), Tokenizer.from_bytes(*from_tekken(content))
    for text in texts(rng, count):
        ids = theirs.encode(text, bos=False, eos=False)
        assert ours.encode(text, add_special_tokens=False).tolist() == ids
        assert ours.encode(text).tolist() == theirs.encode(text, bos=True, eos=False)
        assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids) == text
    for _ in range(20):
        ids = rng.choices(range(theirs.n_words), k=30)
        assert ours.decode(ids, skip_special_tokens=True) == b"".join(
            theirs.id_to_byte_piece(id) for id in ids
        ).decode(errors="replace")


def test_a_trained_vocabulary_gives_the_same_ids(tmp_path: Path, seed: int) -> None:
    compare(tmp_path, tekken_file(tekken_words(), NAMED), random.Random(seed), 300)


def test_a_vocabulary_in_any_order_gives_the_same_ids(tmp_path: Path, seed: int) -> None:
    """Words that nothing can be joined to, that come before their parts, that overlap."""
    rng = random.Random(seed)
    prose = " ".join(CORPUS).encode() + b"aaaaaaaababababab    " * 20
    words = {prose[at : at + rng.randint(2, 7)] for at in rng.choices(range(len(prose)), k=500)}
    longer = sorted(word for word in words if len(word) > 1)
    rng.shuffle(longer)
    content = tekken_file([*(bytes([value]) for value in range(256)), *longer], NAMED)
    compare(tmp_path, content, rng, 300)


@pytest.mark.long
def test_the_published_vocabulary_gives_the_same_ids(tmp_path: Path, seed: int) -> None:
    """The one that comes with the library: a hundred thousand words."""
    common = pytest.importorskip("mistral_common")
    source = files(common.__name__) / "data" / "tekken_240911.json"
    compare(tmp_path, source.read_bytes(), random.Random(seed), 300)


def test_special_tokens_are_recognised_and_hidden() -> None:
    content = tekken_file(tekken_words(), NAMED, specials=8)
    ours = Tokenizer.from_bytes(*from_tekken(content))
    ids = ours.encode("[INST]the</s><SPECIAL_7>", add_special_tokens=False)
    assert (ids[0], *ids[-2:]) == (3, 2, 7)
    assert ours.decode(ids, skip_special_tokens=True) == "the"
    assert ours.decode(ids, skip_special_tokens=False) == "[INST]the</s><SPECIAL_7>"
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert ours.vocab_size == len(tekken_words()) + 8


def test_a_file_of_the_first_versions_lists_no_special_tokens() -> None:
    content = tekken_file(tekken_words(), {}, special_tokens=None)
    ours = Tokenizer.from_bytes(*from_tekken(content))
    assert ours.encode("[TOOL_CALLS][IMG]", add_special_tokens=False).tolist() == [9, 10]


def test_only_as_many_words_as_the_model_has_are_taken() -> None:
    raw = json.loads(tekken_file(tekken_words(), NAMED))
    raw["config"]["default_vocab_size"] = 20 + 256
    ours = Tokenizer.from_bytes(*from_tekken(json.dumps(raw).encode()))
    ids = ours.encode("the", add_special_tokens=False).tolist()
    assert ids == [20 + value for value in b"the"]


BYTES = [bytes([value]) for value in range(256)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "is malformed"),
        (b"{}", "is malformed"),
        (tekken_file(BYTES[:200], NAMED), "200 words do not make up 200"),
        (tekken_file([*BYTES[1:], b"\0"], NAMED), "word 0 is malformed"),
        (tekken_file([*BYTES, b""], NAMED), "word 256 is malformed"),
        (tekken_file([*BYTES, b"ab", b"ab"], NAMED), "a word is listed twice"),
        (tekken_file([*BYTES, b"<s>"], NAMED), "'<s>' is both a word and a special token"),
        (tekken_file(BYTES, {20: "<s>"}), "'<s>' has the rank 20"),
        (tekken_file(BYTES, {1: "<s>", 2: "<s>"}), "a special token is listed twice"),
    ],
)
def test_what_cannot_be_converted_is_refused(content: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"tekken\.json.*{re.escape(says)}"):
        from_tekken(content)
