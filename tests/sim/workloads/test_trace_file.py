"""Files of others become requests; bad ones are named by line, cause and remedy."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from pdserve.errors import ConfigError
from pdserve.sim.workloads.trace_file import open_trace
from pdserve.sim.workloads.trace_request import VOCABULARY, length_of, tokens_of

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
        (GOOD | {"input_length": 1025}, "input_length 1025 needs 3 hash_ids of 512 tokens, not 2"),
        (GOOD | {"input_length": 512}, "needs 1 hash_ids"),
        ({"timestamp": 1}, "missing required field"),
        (GOOD | {"timestamp": -1}, "timestamp"),
        ({"timestamp": 1, "input_length": 10**9, "output_length": 1}, "<= 16777216"),
        ({"timestamp": 1, "input_length": 1, "output_length": 10**9}, "<= 16777216"),
    ],
)
def test_a_bad_mooncake_line_is_named(tmp_path, line, words: str) -> None:
    path = write(tmp_path / "t.jsonl", GOOD, "", line)
    with pytest.raises(ConfigError) as caught:
        list(open_trace(path))
    assert f"{path}, line 3: " in caught.value.message
    assert words in caught.value.message


SHORT = {"input_length": 5, "output_length": 5}
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
        ("2023-11-16 18:17:03,1", "2 fields, the header has 3"),
        ("yesterday,1,1", "yesterday"),
        ("2023-11-16 18:17:03,many,1", "many"),
        ("2023-11-16 18:17:03,0,1", "lengths 0 and 1"),
        ("2022-11-16 18:17:03,1,1", "sort the file"),
        ("9" * 5000 + ",1,1", "out of range"),
        ("nan,1,1", "nan is out of range"),
        ("1700158624,1e999,1", "out of range"),
        (
            "1700158624,1e9,1",
            "column ContextTokens: 1000000000 tokens are more than any model takes",
        ),
        ("1700158624,1,1000000000", "column GeneratedTokens: 1000000000 tokens are more than any"),
    ],
)
def test_a_bad_azure_line_is_named(tmp_path, line: str, words: str) -> None:
    path = write(tmp_path / "t.csv", HEADER, "2023-11-16 18:17:03.1,5,5", line)
    with pytest.raises(ConfigError) as caught:
        list(open_trace(path))
    assert f"{path}, line 3: " in caught.value.message
    assert words in caught.value.message


@pytest.mark.parametrize("text", ["", "hello\n", "\x00\x01\n"])
def test_what_is_no_trace_is_refused_with_what_would_be(tmp_path, text: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ConfigError, match="no trace that pdserve reads: give JSON lines"):
        open_trace(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("\n\n", "is empty"),
        ("at;input;output\n0;5;5\n", "has semicolons between its fields: write commas"),
        ("at\tinput\toutput\n0\t5\t5\n", "has tabs between its fields: write commas"),
    ],
)
def test_what_is_nearly_a_table_is_refused_with_what_is_wrong(tmp_path, text, words) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        open_trace(path)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(GOOD) + "\r\n",
        "at,input,output\r\n1,700,5\r\n",
        json.dumps([{"conversations": [{"value": "x" * 2800}, {"value": "x" * 20}]}]),
    ],
)
def test_a_byte_order_mark_and_ends_of_lines_do_not_count(tmp_path, text: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(text.encode("utf-8-sig"))
    [request] = open_trace(path)
    assert (length_of(request.pieces), request.output_tokens) == (700, 5)


@pytest.mark.parametrize("text", [json.dumps(GOOD) + "\n", "at,input,output\n1,2,3\n"])
def test_utf_16_is_named(tmp_path, text: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(text.encode("utf-16"))
    with pytest.raises(ConfigError, match="line 1: is UTF-16: save the file as UTF-8"):
        open_trace(path)


def test_two_columns_of_one_name_are_refused(tmp_path) -> None:
    path = write(tmp_path / "t", "at,input,output,input,note,note", "1,2,3,4,a,b")
    with pytest.raises(ConfigError, match="line 1: there are 2 columns input"):
        list(open_trace(path))
    path = write(tmp_path / "t", "at,input,output,note,note", "1,2,3,a,b")
    assert [length_of(one.pieces) for one in open_trace(path)] == [2]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("at,input,output", "0,5,5", "1e12,5,5"), "seconds"),
        (({"timestamp": 0} | SHORT, {"timestamp": 1e15} | SHORT), "milliseconds"),
    ],
)
def test_times_in_another_unit_are_refused(tmp_path, lines, words: str) -> None:
    """A replay of so long a time would not end."""
    path = write(tmp_path / "t", *lines)
    with pytest.raises(ConfigError, match=f"years after the first: times must be in {words}"):
        list(open_trace(path))


def test_a_pipe_is_refused_because_a_trace_is_read_twice(tmp_path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="is a pipe, and a trace is read more than once"):
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


def test_times_of_a_clock_count_from_the_first_line(tmp_path) -> None:
    """A replay would idle for fifty years, and not end."""
    now = 1_795_000_000_000
    lines = [{"timestamp": now + ms} | SHORT for ms in (0, 1500, 500)]
    assert [one.at for one in open_trace(write(tmp_path / "t", *lines))] == [0.0, 1.5, 0.5]
    late = [{"timestamp": 27_000 + ms} | SHORT for ms in (500, 0)]
    assert [one.at for one in open_trace(write(tmp_path / "t", *late))] == [27.5, 27.0]
    with pytest.raises(ConfigError, match="line 2: is earlier than the first: sort the file"):
        list(open_trace(write(tmp_path / "t", lines[1], lines[0])))


@pytest.mark.parametrize("ids", [{}, {"hash_ids": []}, {"hash_ids": None}])
def test_lines_without_blocks_share_nothing(tmp_path, ids) -> None:
    line = {"timestamp": 0, "input_length": 700, "output_length": 5} | ids
    prompts = [
        tokens_of(request.pieces) for request in open_trace(write(tmp_path / "t", line, line))
    ]
    assert [len(prompt) for prompt in prompts] == [700, 700]
    assert prompts[0][:4] != prompts[1][:4]


NAMED = "at=t,input=i,output=o"


@pytest.mark.parametrize(
    ("lines", "columns"),
    [
        (("TIMESTAMP,ContextTokens,GeneratedTokens", "10.072,31,7", "11.5,9,2"), ""),
        (("id,at,input,output", "a,10.072,31,7", "b,11.5,9,2"), ""),
        (("t,i,o", "10072,31.0,7", "11500,9,2"), "at_ms=t,input=i,output=o"),
        (('{"t": 10.072, "i": 31, "o": 7}', '{"t": 11.5, "i": 9, "o": 2}'), NAMED),
        (("t,i,o", "2023-11-16T18:17:03.072Z,31,7", "2023-11-16T18:17:04.5Z,9,2"), NAMED),
    ],
)
def test_tables_of_any_columns(tmp_path, lines, columns) -> None:
    first, second = open_trace(write(tmp_path / "t", *lines), columns)
    assert (first.at, length_of(first.pieces), first.output_tokens) == (0.0, 31, 7)
    assert second.at == pytest.approx(1.428)
    assert (length_of(second.pieces), second.output_tokens) == (9, 2)


@pytest.mark.parametrize(
    ("lines", "columns", "words"),
    [
        (("a,b,c", "1,2,3"), "", "the columns are a, b, c: name three of them by --columns"),
        (("a,b,c", "1,2,3"), "at=a,input=b,output=x", "there is no column x; there are a, b, c"),
        (("When,b,c", "1,2,3"), "at=when,input=b,output=c", "no column when, did you mean 'When'?"),
        (("a,b,c", "1,2,3"), "at=a,input=b", "name at (or at_ms), input and output"),
        (("a,b,c", "1,2,3"), "at=a,inputs=b,output=c", "'inputs' is unknown, did you mean 'input'"),
        (("a,b,c", "1,2,3"), "zz=a", "'zz' is unknown. Known: at, at_ms, input"),
        (("a,b,c", "1,many,3"), "at=a,input=b,output=c", "line 2: column b: could not convert"),
        (
            ("a,b,c", "1,2,3"),
            "at=a,input=b,output=c,block=0",
            "block='0' is not a number of tokens",
        ),
        (
            ("a,b,h", "1,9,1 2"),
            "at=a,input=b,output=a,hash_ids=h",
            "column h: input_length 9 needs",
        ),
        (("a,b,h", "1,9,x"), "at=a,input=b,output=a,hash_ids=h", "column h: invalid literal"),
        (("a,b,h", "1,9,-1"), "at=a,input=b,output=a,hash_ids=h", "column h: ids must be from 0"),
        (("a,b,c", "1,2,3"), "at=a,input", "is not of the form name=column"),
        (("a,b\rc,d", "1,2,3"), "", "expected fields with commas"),
        (("a,b,c", "1,2.5,3"), "at=a,input=b,output=c", "not a whole number of tokens"),
        (("a,b,c", "0ms,2,3"), "at=a,input=b,output=c", "'0ms' is neither a number of seconds"),
        (("at,input,output", "2026-13-01,2,3"), "", "line 2: column at: '2026-13-01' is neither"),
        (("0,100,10", "1,100,10"), "", "line 1: has numbers where the names of the columns"),
        (("a,b,c,text", '1,2,3,"x', 'y"'), "at=a,input=b,output=c", "line 2: unexpected end"),
        (('[{"at": 1}]',), "", "a JSON array: write one object per line"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_with_a_remedy(
    tmp_path, lines, columns, words
) -> None:
    with pytest.raises(ConfigError) as caught:
        list(open_trace(write(tmp_path / "t", *lines), columns))
    assert words in caught.value.message


@pytest.mark.parametrize(
    "lines",
    [
        ("t,i,o,h", "0,100,5,4 7", '1,70,5,"[4, 8]"', "2,9,5,"),
        (
            '{"t": 0, "i": 100, "o": 5, "h": [4, 7]}',
            '{"t": 1, "i": 70, "o": 5, "h": [4, 8]}',
            '{"t": 2, "i": 9, "o": 5, "h": null}',
        ),
    ],
)
def test_a_column_of_block_ids_makes_shared_prefixes(tmp_path, lines) -> None:
    columns = "at=t,input=i,output=o,hash_ids=h,block=64"
    first, second, third = open_trace(write(tmp_path / "t", *lines), columns)
    assert first.pieces == ((4, 64), (7, 36))
    assert second.pieces == ((4, 64), (8, 6))
    assert length_of(third.pieces) == 9


def test_a_table_without_times_says_so(tmp_path) -> None:
    trace = open_trace(write(tmp_path / "t", "i,o", "5,6", "7,8"), "input=i,output=o")
    assert not trace.timed
    assert [request.at for request in trace] == [0.0, 0.0]
    assert open_trace(write(tmp_path / "m", GOOD)).timed


TALK = {
    "id": "a",
    "conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "é"}],
}


def test_messages_with_a_content_are_conversations_too(tmp_path) -> None:
    talk = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y" * 8}]
    [one] = open_trace(write(tmp_path / "t", [{"conversations": talk}]))
    assert (length_of(one.pieces), one.output_tokens) == (10, 2)


@pytest.mark.parametrize("shape", ["array", "one line", "lines"])
def test_conversations_are_read(tmp_path, shape: str) -> None:
    talks = [TALK, {"conversations": [{"from": "gpt", "value": "alone"}]}, TALK]
    path = tmp_path / "t.json"
    if shape == "lines":
        write(path, *talks)
    else:
        path.write_text(json.dumps(talks, indent=1 if shape == "array" else None))
    trace = open_trace(path)
    assert not trace.timed
    assert [(one.number, length_of(one.pieces), one.output_tokens) for one in trace] == [
        (0, 10, 1),
        (1, 10, 1),
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"conversations": 3}]', 'expected {"conversations"'),
        ('{"conversations": []}', "no conversation of two messages"),
        ('{"conversations": []}\n{"x": 1}', "line 2: "),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path, text: str, words: str) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        list(open_trace(path))
    assert words in caught.value.message
