"""Converts Mistral's `tekken.json` to the equivalent `tokenizer.json`.

`tekken.json` lists special tokens, whose ids come first, and byte sequences by rank: two neighbours
merge where the merged sequence has the lowest rank. `tokenizer.json` names the pairs instead. One
pair per sequence is exact: merging a sequence's own bytes always ends with the same two parts.
Two differences are intended: special tokens are recognised in text, as in every other tokenizer
here, and a text begins with the first token that the model expects.
"""

from __future__ import annotations

import base64
import binascii
from itertools import pairwise

import msgspec

from pdserve.errors import ConfigError
from pdserve.text.tokenization.token_text_table import BYTE_LEVEL_ALPHABET

_OLD_SPECIALS = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
"""Special tokens by id, for files of the first versions, which do not list them."""

_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


class _Special(msgspec.Struct):
    rank: int
    token_str: str


class _Token(msgspec.Struct):
    rank: int
    token_bytes: str


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Special] | None = None


def from_tekken(content: bytes) -> tuple[bytes, bytes]:
    """Convert the content of `tekken.json` to `tokenizer.json` and `tokenizer_config.json`.

    Takes some seconds for a vocabulary of a hundred thousand. Raises `ConfigError`.
    """
    try:
        file = msgspec.json.decode(content, type=_File)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"tekken.json is malformed: {error}") from None
    specials = _specials(file)
    tokens = _tokens(file, len(specials))
    names = [_spelled(token) for token in tokens]
    both = set(names).intersection(specials)
    if both:
        raise ConfigError(f"tekken.json: {sorted(both)[0]!r} is both a word and a special token")
    named = {key: token for key, token in _NAMED.items() if token in specials}
    tokenizer = _tokenizer(file.config.pattern, specials, names, _merges(tokens))
    return msgspec.json.encode(tokenizer), msgspec.json.encode(named)


def _specials(file: _File) -> list[str]:
    """Special tokens by id; ids without an entry get a made-up name."""
    count = file.config.default_num_special_tokens
    names = [f"<SPECIAL_{rank}>" for rank in range(count)]
    listed = dict(enumerate(_OLD_SPECIALS))
    if file.special_tokens is not None:
        listed = {special.rank: special.token_str for special in file.special_tokens}
    for rank, name in listed.items():
        if not 0 <= rank < count:
            raise ConfigError(f"tekken.json: special token {name!r} has the rank {rank}")
        names[rank] = name
    if len(set(names)) != count:
        raise ConfigError("tekken.json: a special token is listed twice")
    return names


def _tokens(file: _File, specials: int) -> list[bytes]:
    """Byte sequences by rank, as many as the model has."""
    count = file.config.default_vocab_size - specials
    if not 256 <= count <= len(file.vocab):
        raise ConfigError(f"tekken.json: {len(file.vocab)} words do not make up {count}")
    tokens = []
    for rank, entry in enumerate(file.vocab[:count]):
        try:
            token = base64.b64decode(entry.token_bytes, validate=True)
        except binascii.Error:
            token = b""
        if not token or entry.rank != rank or (rank < 256 and token != bytes([rank])):
            raise ConfigError(f"tekken.json: word {rank} is malformed")
        tokens.append(token)
    if len(set(tokens)) != count:
        raise ConfigError("tekken.json: a word is listed twice")
    return tokens


def _merges(tokens: list[bytes]) -> list[tuple[str, str]]:
    """The pair that each token is merged from, by rank."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens[256:]:
        parts = _joined(token, ranks)
        if len(parts) == 2:
            merges.append((_spelled(parts[0]), _spelled(parts[1])))
    return merges


def _joined(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The parts left before the last merge of the bytes of `token`: two, or more if it cannot be
    merged."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        known = ((ranks.get(a + b), at) for at, (a, b) in enumerate(pairwise(parts)))
        best = min(((rank, at) for rank, at in known if rank is not None), default=None)
        if best is None:
            break
        at = best[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _spelled(token: bytes) -> str:
    """The bytes written in the byte-level alphabet of vocabularies."""
    return token.decode("latin-1").translate(_LETTERS)


_LETTERS = {value: letter for letter, value in BYTE_LEVEL_ALPHABET.items()}


def _tokenizer(
    pattern: str, specials: list[str], names: list[str], merges: list[tuple[str, str]]
) -> dict[str, object]:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(rank, name) for rank, name in enumerate(specials)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                _byte_level(),
            ],
        },
        "post_processor": _beginning(specials),
        "decoder": _byte_level(),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {name: number for number, name in enumerate([*specials, *names])},
            "merges": merges,
        },
    }


def _special(rank: int, name: str) -> dict[str, object]:
    return {
        "id": rank,
        "content": name,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _beginning(specials: list[str]) -> dict[str, object]:
    """The post-processor that puts the first token before every text, if there is one."""
    bos = _NAMED["bos_token"]
    begin: list[object] = [{"Sequence": {"id": "A", "type_id": 0}}]
    named: dict[str, object] = {}
    if bos in specials:
        begin.insert(0, {"SpecialToken": {"id": bos, "type_id": 0}})
        named[bos] = {"id": bos, "ids": [specials.index(bos)], "tokens": [bos]}
    return {
        "type": "TemplateProcessing",
        "single": begin,
        "pair": [*begin, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": named,
    }


def _byte_level() -> dict[str, object]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
