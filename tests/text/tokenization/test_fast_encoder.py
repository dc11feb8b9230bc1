"""The fast encoder gives the ids of `tokenizers`, or is not used."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from typing import Any
from unicodedata import combining, normalize

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.processors import TemplateProcessing

from pdserve import accel
from pdserve.errors import InvalidRequest
from pdserve.text.tokenization import fast_encoder
from pdserve.text.tokenization.fast_encoder import FastEncoder, find_difference
from pdserve.text.tokenization.probe_texts import PLAIN_TEXTS
from pdserve.text.tokenization.split_pattern import DONE, SET
from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.text.tokenization.unicode_classes import UNKNOWN, character_classes
from pdserve.token_ids import TokenIds, token_ids
from tests.support.seeds import is_long, number_for, run_seed
from tests.text import builders

pytestmark = pytest.mark.skipif(not accel.NATIVE, reason="the extension is not built")

EXAMPLES = 2000 if is_long() else 60
SEED = number_for(run_seed(), __name__)

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + TAIL]
QWEN = [CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + TAIL]
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
]
TEKKEN = [builders.TEKKEN_PATTERN]
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def described(raw: RawTokenizer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(raw.to_str())
    return found


UNNORMALIZED = [
    token | {"normalized": False} for token in described(builders.byte_level())["added_tokens"]
]


def split(pattern: str) -> dict[str, Any]:
    kind = {"Regex": pattern}
    return {"type": "Split", "pattern": kind, "behavior": "Isolated", "invert": False}


SMALL = described(builders.byte_level())
BUNDLED = json.loads(files("pdserve").joinpath("bundled", "tokenizer.json").read_bytes())
"""Has two thousand merges, so ids show where text was cut."""


def with_steps(base: dict[str, Any], *steps: dict[str, Any], **changes: Any) -> bytes:
    pre = {"type": "Sequence", "pretokenizers": [*steps]}
    return json.dumps(base | {"pre_tokenizer": pre} | changes).encode()


KINDS: dict[str, list[dict[str, Any]]] = {
    "gpt2": [BYTES | {"use_regex": True}],
    "starcoder": [DIGITS, BYTES | {"use_regex": True}],
    "llama3": [*map(split, LLAMA_3), BYTES],
    "qwen": [*map(split, QWEN), BYTES],
    "deepseek": [*map(split, DEEPSEEK), BYTES],
    "tekken": [*map(split, TEKKEN), BYTES],
    "matches_only": [split(LLAMA_3[0]) | {"behavior": "Removed", "invert": True}, BYTES],
    "some_matches": [split(r"[^\S\p{Lu}\d]+|\P{N}{2}|[+-]\s"), BYTES],
    "given_back": [
        split(
            r"\p{Lu}?\p{L}+|\p{N}{1,3}\p{Nd}|[^\p{N}\s]*[\p{Ll}\s]|[^a]{2,4}[^\p{L}]|[!-<]*[^\p{L}]"
        ),
        BYTES,
    ],
    "bytes": [BYTES],
}
COVERED = {
    "byte_level": json.dumps(SMALL).encode(),
    "bundled": json.dumps(BUNDLED).encode(),
    "nfc": with_steps(SMALL, *KINDS["qwen"], normalizer={"type": "NFC"}, added_tokens=UNNORMALIZED),
    **{f"small {name}": with_steps(SMALL, *steps) for name, steps in KINDS.items()},
    **{name: with_steps(BUNDLED, *steps) for name, steps in KINDS.items()},
}
WORDS = st.sampled_from(
    [
        *(
            "the quick",
            " fox",
            "It's",
            "isN'T",
            "'ſ",
            "ABCdef",
            "x1_y",
            "12345",
            "٣٤",
            "½",
            "()",
            "==",
        ),
        *(
            "\n",
            "\n\n",
            "\r\n",
            " ",
            "   ",
            "\t",
            "\u00a0",
            "\u2028",
            "\u3000",
            "\x00",
            "\x7f",
            "▁",
        ),
        *(
            "你好",
            "世界",
            "カナ",
            "한국어",
            "👍🏽",
            "👩‍👩‍👧",
            "e\u0301",
            "é",
            "İ",
            "K",
            "ﬁ",
            "\U0010ffff",
        ),
        *(
            "<s>",
            "</s>",
            "<|im_end|>",
            "<tool>",
            "▁<tool>",
            "<think 漢>",
            "<",
            "|>",
            "a" * 40,
            " " * 40,
        ),
        *('{"a": [1.5e-9]}', "def f(x):\n\treturn", "aGVsbG8gd29ybGQ+/w==", "https://a.b/c?d=%20"),
    ]
)
TEXTS = st.lists(WORDS | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join)


@pytest.fixture(scope="module")
def pairs() -> dict[str, tuple[RawTokenizer, FastEncoder]]:
    found = {}
    for name, content in COVERED.items():
        ours = Tokenizer.from_bytes(content)
        choice = ours.choose_encoder()
        assert choice.fast, (name, choice)
        found[name] = (RawTokenizer.from_buffer(content), encoder(ours))
    return found


def encoder(tokenizer: Tokenizer) -> FastEncoder:
    assert tokenizer._fast is not None
    return tokenizer._fast


def expected(raw: RawTokenizer, text: str, special: bool = False) -> TokenIds:
    (found,) = raw.encode_batch_fast([text], add_special_tokens=special)
    return token_ids(found.ids)


@seed(SEED)
@settings(max_examples=EXAMPLES, deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_ids_are_those_of_tokenizers(pairs, text, special):
    for name, (raw, fast) in pairs.items():
        ids = fast.encode(text, special)
        if ids is None:
            assert not text.isascii(), "only rare texts are left to tokenizers"
        else:
            assert ids == expected(raw, text, special), name


@seed(SEED)
@settings(max_examples=EXAMPLES, deadline=None)
@given(data=st.data(), text=TEXTS)
def test_any_order_of_merges_and_any_flags_of_added_tokens(data, text):
    file = json.loads(COVERED[data.draw(st.sampled_from(["byte_level", "small llama3", "nfc"]))])
    file["model"]["merges"] = data.draw(st.permutations(file["model"]["merges"]))
    file["model"]["ignore_merges"] = data.draw(st.booleans())
    for token in file["added_tokens"]:
        for flag in ("lstrip", "rstrip", "single_word", "normalized"):
            token[flag] = data.draw(st.booleans()) if data.draw(st.integers(0, 3)) == 0 else False
    content = json.dumps(file).encode()
    ours = Tokenizer.from_bytes(content)
    choice = ours.choose_encoder()
    assert not choice.difference
    raw = RawTokenizer.from_buffer(content)
    assert ours.encode(text, add_special_tokens=False) == expected(raw, text)


@seed(SEED)
@settings(max_examples=20 * (1 + 20 * is_long()), deadline=None)
@given(
    text=st.text(st.sampled_from("abcdef \n1"), min_size=100, max_size=3000)
    | st.text(st.sampled_from("的一是不了人我在有"), min_size=40, max_size=900)
)
def test_long_pieces_are_merged_in_the_same_order(pairs, text):
    for name in ("bytes", "small bytes", "llama3", "deepseek"):
        raw, fast = pairs[name]
        assert fast.encode(text, False) == expected(raw, text), name


def test_every_character_is_cut_where_tokenizers_cuts(pairs):
    """Every character that neighbours another category, or all in long mode."""
    classes = character_classes()
    points = [point for point in range(1, 0x110000) if not 0xD800 <= point < 0xE000]
    if not is_long():
        points = [p for p in points if classes[p] != classes[p - 1]][:: 7 + SEED % 5]
    for begin in range(0, len(points), 256):
        letters = map(chr, points[begin : begin + 256])
        text = "".join(
            f"a{c}b A{c} 1{c}2 {c}{c}! ({c}\n'{c}" for c in letters if classes[ord(c)] != UNKNOWN
        )
        for name in KINDS:
            raw, fast = pairs[name]
            assert fast.encode(text, False) == expected(raw, text), (name, hex(points[begin]))


def test_characters_without_a_class_are_left_to_tokenizers(pairs):
    raw, fast = pairs["llama3"]
    assert fast.encode("fox \u0378", False) is None
    ours = Tokenizer.from_bytes(COVERED["llama3"])
    ours.choose_encoder()
    assert ours.encode("fox \u0378", False) == expected(raw, "fox \u0378")


def test_first_letters_of_alternatives_that_are_not_there_are_ignored():
    a_and_b: tuple[Any, ...] = (0, 3 << 33, 0, False, [])
    steps = [(SET, 0, 1, 9), (DONE, 0, 0, 0)]
    one = accel.native.BpeEncoder(
        classes=character_classes(),
        patterns=[([a_and_b], steps, [0xFFFF_FFFF] * 128, [0], True)],
        merges=b"",
        bytes=list(range(256)),
        added=[],
        whole=[],
    )
    assert one.encode("ab-\u00e9") == token_ids(list("ab-\u00e9".encode())).tobytes()


def test_text_that_is_not_normalised_is_left_to_tokenizers(pairs):
    raw, fast = pairs["nfc"]
    assert fast.encode("e\u0301", False) is None
    assert fast.encode("é", False) == expected(raw, "e\u0301")


@pytest.mark.parametrize(
    "name", ["metaspace", "wordpiece", "word_level", "word_suffix", "llama_like"]
)
def test_uncovered_tokenizers_say_why_and_cache_segments(name):
    raw = builders.KINDS[name][1]()
    ours = Tokenizer.from_bytes(raw.to_str().encode())
    choice = ours.choose_encoder()
    assert not choice.fast
    assert choice.uncovered
    assert not choice.difference
    assert ours.encode("fox <s>", False) == expected(raw, "fox <s>")


def test_without_the_extension_tokenizers_encodes(monkeypatch):
    monkeypatch.setattr("pdserve.accel.NATIVE", False)
    ours = Tokenizer.from_bytes(COVERED["llama3"])
    assert ours.choose_encoder().uncovered
    assert ours.segments is not None


class Shifted(FastEncoder):
    """Gives one wrong id in texts that have a marker."""

    marker = ""

    def encode(self, text: str, add_special_tokens: bool) -> TokenIds | None:
        found = super().encode(text, add_special_tokens)
        if found and self.marker in text:
            found[-1] += 1
        return found


@pytest.mark.parametrize(
    "marker", ["你好", "👍🏽", "3.14159", "def f(", "\u2028", "<think 漢>", "'T", "नम"]
)
def test_a_planted_difference_is_noticed(monkeypatch, marker):
    monkeypatch.setattr(Shifted, "marker", marker)
    monkeypatch.setattr(fast_encoder, "FastEncoder", Shifted)
    ours = Tokenizer.from_bytes(COVERED["small llama3"])
    choice = ours.choose_encoder()
    assert not choice.fast
    assert choice.difference
    raw = RawTokenizer.from_buffer(COVERED["small llama3"])
    assert ours.encode(marker, False) == expected(raw, marker)


def test_half_a_surrogate_pair_is_the_clients_error():
    ours = Tokenizer.from_bytes(COVERED["llama3"])
    assert ours.choose_encoder().fast
    with pytest.raises(InvalidRequest):
        ours.encode("a\ud800")


def test_what_the_post_processor_adds_is_put_around_each_text():
    raw = RawTokenizer.from_str(builders.byte_level().to_str())
    bos, eos = ("<s>", raw.token_to_id("<s>")), ("</s>", raw.token_to_id("</s>"))
    raw.post_processor = TemplateProcessing(single="<s> <s> $A </s>", special_tokens=[bos, eos])
    ours = Tokenizer.from_bytes(raw.to_str().encode())
    assert ours.choose_encoder().fast
    for text in ("", "the fox", "<s>"):
        assert ours.encode(text) == expected(raw, text, special=True)


def test_only_long_segments_are_cached():
    ours = Tokenizer.from_bytes(COVERED["llama3"])
    ours.choose_encoder()
    segments = ours.segments
    assert segments is not None
    raw = RawTokenizer.from_buffer(COVERED["llama3"])
    mark = next(iter(raw.get_added_tokens_decoder().values())).content
    for length, entries in ((100, 0), (20_000, 1), (20_000, 1)):
        text = f"{'the fox ' * (length // 8)}{mark}again"
        assert ours.encode(text, add_special_tokens=False) == expected(raw, text)
        assert segments.entries == entries
    assert segments.hits > 0


def test_threads_share_an_encoder(pairs):
    raw, fast = pairs["llama3"]
    texts = [f"{place} the quick brown fox 你好 {'jumps ' * (500 * place)}" for place in range(16)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda text: fast.encode(text, False), texts * 4)]
    assert found == [expected(raw, text) for text in texts] * 4


def test_probe_texts_find_no_difference_and_are_short(pairs):
    assert sum(map(len, PLAIN_TEXTS)) < 10_000
    for raw, fast in pairs.values():
        assert not find_difference(raw, fast)


FULL = """
import itertools, resource, sys
from importlib.resources import files
from pdserve.text.tokenization.tokenizer import Tokenizer

tokenizer = Tokenizer.from_bytes(files("pdserve.bundled").joinpath("tokenizer.json").read_bytes())
words = ["".join(letters) for letters in itertools.product(" ", *["bcdfghjklmnpqrstvwxz"] * 4)]
right = tokenizer.encode_batch(words, False)
assert tokenizer.choose_encoder().fast
text = "".join(words)
grown, size, room = [], 0, len(text) // 4
for word, ids in zip(words, right):
    if room - size < len(ids):  # the ids are copied to more memory here
        room = size + max(size, len(ids))
        grown.append((word, ids))
    size += len(ids)
with open("/proc/self/status") as file:
    space = int(next(line for line in file if line.startswith("VmSize")).split()[1]) << 10
_, most = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (space + (1 << 20), most))
try:
    tokenizer._fast.encode(text, False)
    sys.exit("the memory was enough")
except MemoryError:
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
wrong = [word for word, ids in grown if tokenizer.encode(word, False) != ids]
sys.exit(f"wrong: {wrong}" if wrong else 0)
"""


def test_a_piece_that_memory_was_too_short_for_is_not_remembered():
    done = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_tokenizer_that_fails_at_the_texts_tried_is_left_to_the_library():
    """Its post-processor names a token that it does not describe."""
    file = json.loads(COVERED["llama3"])
    template = [{"SpecialToken": {"id": "<lost>", "type_id": 0}}]
    template.append({"Sequence": {"id": "A", "type_id": 0}})
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": template,
        "pair": template,
        "special_tokens": {},
    }
    ours = Tokenizer.from_bytes(json.dumps(file).encode())
    choice = ours.choose_encoder()
    assert not choice.fast
    assert "PanicException" in choice.uncovered
    assert ours.encode("the fox", False)
    with pytest.raises(InvalidRequest):
        ours.encode("the fox")


@pytest.mark.parametrize(
    ("text", "fast"),
    [
        ("é" * 50_000, True),
        ("你好" * 50_000 + "e\u0301", False),
        ("你好" * 50_000 + "q\u0301" * 50, True),
        ("q" + "\u0301" * 50_000, False),  # no place to part it
        ("q\u0301" * 50_000, True),
        ("\u1100" + "가" * 50_000, True),
    ],
)
def test_long_texts_are_looked_at_in_parts(pairs, text, fast):
    raw, encoder = pairs["nfc"]
    ids = encoder.encode(text, False)
    assert (ids is not None) == fast
    assert ids is None or ids == expected(raw, text)


def test_parts_of_a_text_begin_where_nothing_is_joined():
    """No character that is joined to the one before it, or changes place with it."""
    last = {normalize("NFD", chr(point))[1:2] for point in range(0x110000)}
    for point in range(0x110000):
        letter = chr(point)
        if fast_encoder._APART.match(letter):
            assert not combining(letter)
            assert letter not in last


@pytest.mark.alone
def test_hostile_texts_need_bounded_memory_and_time():
    seconds = "60" if is_long() else "2"
    program = [sys.executable, "-m", "tests.text.tokenization.hostile_texts", seconds]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
