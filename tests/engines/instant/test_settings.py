"""The little that the instant engine reads of a model, and its options."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.messages.engine import EngineSpec
from pdserve_engines.instant.settings import (
    InstantOptions,
    InstantVocabulary,
    ordinary_ids,
    parse_options,
    read_vocabulary,
)

if TYPE_CHECKING:
    from pathlib import Path

WORDS = {"<s>": 0, "\u0120the": 1, "\u2581cat": 2, "##ing": 3, "!": 4, "sat": 5, "\u0120x": 6}


def write(directory: Path, config: dict[str, Any], tokenizer: object = None) -> None:
    content = {"model": {"vocab": WORDS}} if tokenizer is None else tokenizer
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(content))


def read(
    directory: Path, options: InstantOptions | None = None, **fields: Any
) -> InstantVocabulary:
    spec = EngineSpec(engine="instant", model=str(directory), **fields)
    return read_vocabulary(spec, options or InstantOptions())


def test_words_are_ordinary_and_marks_and_specials_are_not():
    tokenizer = {"model": {"vocab": WORDS}, "added_tokens": [{"id": 5, "content": "sat"}]}
    assert ordinary_ids(tokenizer) == (1, 2, 3)


def test_a_unigram_vocabulary_is_a_list():
    vocab = [["<unk>", 0.0], ["\u2581hello", -1.0], ["?", -2.0], ["world", -3.0]]
    assert ordinary_ids({"model": {"vocab": vocab}}) == (1, 3)


def test_without_words_letters_serve():
    assert ordinary_ids({"model": {"vocab": {"a": 0, "b": 1, "?": 2}}}) == (0, 1)
    assert ordinary_ids({"model": {"vocab": {"?": 2}}}) == ()


def test_a_large_vocabulary_is_sampled_evenly():
    vocab = {f"w{'abcdefghij'[n % 10]}{'klmnopqrst'[n // 10 % 10]}{'uvwxyz'[n // 100]}": n
             for n in range(600)}  # fmt: skip
    ids = ordinary_ids({"model": {"vocab": vocab}})
    assert len(ids) == 64
    assert ids[-1] > 500


def test_limits_come_from_the_config_and_the_wish(tmp_path: Path):
    write(tmp_path, {"vocab_size": 99, "max_position_embeddings": 512, "eos_token_id": [7, 8]})
    vocabulary = read(tmp_path)
    assert (vocabulary.vocab_size, vocabulary.max_model_len) == (99, 512)
    assert vocabulary.eos_token_ids == (7, 8)
    assert read(tmp_path, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="513 is over the checkpoint's limit of 512"):
        read(tmp_path, max_model_len=513)


def test_a_text_config_inside_is_the_one_that_counts(tmp_path: Path):
    text = {"vocab_size": 50, "max_position_embeddings": 64, "eos_token_id": 3}
    write(tmp_path, {"model_type": "wrapper", "text_config": text})
    vocabulary = read(tmp_path)
    assert (vocabulary.vocab_size, vocabulary.eos_token_ids) == (50, (3,))


def test_given_tokens_need_no_tokenizer(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    assert read(tmp_path, InstantOptions(tokens=(1, 9))).tokens == (1, 9)
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        read(tmp_path, InstantOptions(tokens=(1, 10)))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "not JSON"), ("[]", "no JSON object"), ('{"model": {}}', "no plain words")],
)
def test_a_file_that_does_not_serve_is_named(tmp_path: Path, content: str, message: str):
    write(tmp_path, {"vocab_size": 10})
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=rf"tokenizer\.json.*{message}"):
        read(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"nowhere/config\.json cannot be read: No such file"):
        read(tmp_path / "nowhere")


def test_options_are_parsed_and_mistakes_named():
    assert parse_options(
        {"tokens_per_second": "50", "ttft_ms": "20", "tokens": "3,4"}
    ) == InstantOptions(50.0, 0.02, (3, 4))
    for wrong, message in (
        ({"speed": "1"}, "no option speed"),
        ({"ttft_ms": "soon"}, "not a number"),
        ({"tokens": "a"}, "not a number"),
        ({"tokens_per_second": "-1"}, "not negative"),
        ({"tokens_per_second": "inf"}, "finite"),
        ({"tokens_per_second": "nan"}, "finite"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_options(wrong)
