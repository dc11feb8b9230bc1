"""Files of others become requests; bad ones are named by line, cause and remedy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.sim.traces.base import VOCABULARY, length_of, tokens_of
from pdserve.sim.traces.load import open_trace

if TYPE_CHECKING:
    from pathlib import Path

GOOD = {"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]}


def write(path: Path, *lines: object) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def test_a_mooncake_line_is_a_request(tmp_path) -> None:
    first, second = open_trace(write(tmp_path / "t", GOOD, "", GOOD | {"output_length": 0}))
    assert (first.number, first.at, first.output_tokens) == (0, 3.0, 5)
    assert first.pieces == ((0, 512), (7, 188))
    assert second.number == 1
    assert second.output_tokens == 1, "an engine gives one token at least"


def test_a_trace_can_be_read_twice(tmp_path) -> None:
    trace = open_trace(write(tmp_path / "t", GOOD, GOOD))
    assert list(trace) == list(trace)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"timestamp": 1', "truncated"),
        (GOOD | {"input_length": 0}, "input_length"),
        (GOOD | {"hash_ids": "x"}, "hash_ids"),
        (GOOD | {"input_length": 1025}, "does not fit 2 hash_ids of 512 tokens"),
        (GOOD | {"input_length": 512}, "does not fit"),
        (GOOD | {"hash_ids": []}, "does not fit 0 hash_ids"),
        ({"timestamp": 1}, "missing required field"),
        (GOOD | {"timestamp": -1}, "timestamp"),
    ],
)
def test_a_bad_mooncake_line_is_named(tmp_path, line, words: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "", line)
    with pytest.raises(ConfigError) as caught:
        list(open_trace(path))
    assert f"{path}, line 3: " in caught.value.message
    assert words in caught.value.message


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_an_azure_line_is_a_request(tmp_path) -> None:
    path = write(
        tmp_path / "t", HEADER, "2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:05.1,31,0"
    )
    first, second = open_trace(path)
    assert (first.at, first.output_tokens, length_of(first.pieces)) == (0.0, 10, 4808)
    assert second.at == pytest.approx(1.12004)
    assert second.output_tokens == 1
    assert tokens_of(first.pieces)[:10] != tokens_of(second.pieces)[:10]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("2023-11-16 18:17:03,1", "2 fields"),
        ("yesterday,1,1", "yesterday"),
        ("2023-11-16 18:17:03,many,1", "many"),
        ("2023-11-16 18:17:03,0,1", "lengths 0 and 1"),
        ("2022-11-16 18:17:03,1,1", "sort the file"),
    ],
)
def test_a_bad_azure_line_is_named(tmp_path, line: str, words: str) -> None:
    path = write(tmp_path / "t.csv", HEADER, "2023-11-16 18:17:03.1,5,5", line)
    with pytest.raises(ConfigError) as caught:
        list(open_trace(path))
    assert f"{path}, line 3: " in caught.value.message
    assert words in caught.value.message


@pytest.mark.parametrize("text", ["", "hello\n", "a,b,c\n1,2,3\n"])
def test_what_is_no_trace_is_refused_with_what_would_be(tmp_path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ConfigError, match="neither Mooncake's JSONL"):
        open_trace(path)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        open_trace(tmp_path / "nowhere")


def test_equal_contents_are_equal_tokens_and_others_are_not() -> None:
    one = tokens_of(((3, 512), (4, 100)))
    other = tokens_of(((3, 512), (5, 100)))
    assert len(one) == 612
    assert one[:512] == other[:512]
    assert one[512:] != other[512:]
    assert tokens_of(((3, 7),)) == tokens_of(((3, 512),))[:7]
    many = {tuple(tokens_of(((content, 2),))) for content in (0, 1, 31_983, 31_984, 10**6, 2**20)}
    assert len(many) == 6
    assert all(16 <= token < VOCABULARY for pair in many for token in pair)
