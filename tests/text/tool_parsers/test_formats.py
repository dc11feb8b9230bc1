"""Every format reads its golden samples, cut at every border there is."""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from pdserve.text.incremental_reader import IncrementalReader
from pdserve.text.output_parts import merge_parts
from pdserve.text.reasoning_parsers import reasoning_format
from pdserve.text.tool_parsers import ALIASES, TOOL_PARSERS, detect_tool_format, tool_format
from tests.support.seeds import is_long, number_for, run_seed
from tests.text.formats import CORPORA, FORMATS, SLICE
from tests.text.golden.samples import TOOLS, Sample
from tests.text.tool_parsers.reading import calls, content, cut, decoded, read, reasoning

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.text.output_parts import OutputParser

pytestmark = pytest.mark.timeout(600 if is_long() else 60)
EVERY = [(name, sample) for name in FORMATS for sample in CORPORA[name].SAMPLES]
DRAWN = [(name, sample) for name, sample in EVERY if name in SLICE]
every_format = pytest.mark.parametrize("name", FORMATS)
"""One test takes all samples of a format: two thousand tests would cost more than what they do."""
drawn_samples = pytest.mark.parametrize(
    ("name", "sample"), DRAWN, ids=[f"{name}: {sample.about}" for name, sample in DRAWN]
)
PAIRS_UP_TO = 200 if is_long() else 48
"""Characters of a sample that is cut at every two places."""
EXAMPLES = 2000 if is_long() else 25
SEED = number_for(run_seed(), __name__)


def parser(name: str) -> Callable[[], OutputParser]:
    return partial(FORMATS[name].parser, TOOLS)


def thoughtful(name: str) -> Callable[[], OutputParser]:
    return lambda: reasoning_format("think").parser(False, parser(name)())


def shows_no_marker(name: str, text: str, sample: Sample) -> bool:
    return not any(each in text for each in FORMATS[name].markers if each not in sample.literal)


def test_every_format_has_its_samples():
    assert set(FORMATS) == set(TOOL_PARSERS) - set(ALIASES)
    assert all(tool_format(name) for name in ALIASES)
    assert all(len(corpus.SAMPLES) >= 20 for corpus in CORPORA.values())
    assert all("call" in corpus.LONG_CALLS for corpus in CORPORA.values())


@every_format
def test_samples_are_read(name: str):
    for sample in CORPORA[name].SAMPLES:
        found = read(parser(name), [sample.text])
        assert content(found) == sample.content, sample.about
        assert decoded(calls(found), sample.calls) == list(sample.calls), sample.about


@every_format
def test_reasoning_goes_before_them(name: str):
    for sample in CORPORA[name].SAMPLES:
        found = read(
            thoughtful(name), [f"<think>\nWhat <tool_call> [ARGS]?\n</think>\n\n{sample.text}"]
        )
        assert reasoning(found) == "What <tool_call> [ARGS]?", sample.about
        bare = content(read(parser(name), [sample.text.lstrip()]))
        assert content(found) == bare, sample.about
        assert decoded(calls(found), sample.calls) == list(sample.calls), sample.about


MARKED = [
    (name, sample)
    for name, sample in EVERY
    if sample.about == "one call" and any(each in sample.text for each in FORMATS[name].starts)
]


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(("name", "sample"), MARKED, ids=[name for name, _ in MARKED])
def test_a_call_ends_reasoning_that_was_left_open(name: str, sample: Sample, begun: bool):
    format = FORMATS[name]

    def make() -> OutputParser:
        return reasoning_format("think").parser(begun, parser(name)(), format.starts)

    text = f"{'' if begun else '<think>'}I look at it.\n{sample.text}"
    found = read(make, [text])
    assert reasoning(found) == "I look at it."
    assert decoded(calls(found), sample.calls) == list(sample.calls)
    assert read(make, text) == found


@drawn_samples
def test_a_cut_changes_nothing(name: str, sample: Sample):
    text = sample.text
    whole = read(parser(name), [text])
    assert read(parser(name), text) == whole, "character by character"
    for at in range(len(text) + 1):
        assert read(parser(name), cut(text, [at])) == whole, f"cut at {at}"
    if len(text) <= PAIRS_UP_TO:
        for pair in combinations(range(len(text) + 1), 2):
            assert read(parser(name), cut(text, pair)) == whole, f"cut at {pair}"


@drawn_samples
def test_an_answer_may_end_anywhere(name: str, sample: Sample):
    """Wherever it ends, it ends well: no marker is shown and nothing depends on cuts."""
    for end in range(len(sample.text)):
        text = sample.text[:end]
        found = read(parser(name), [text])
        assert shows_no_marker(name, content(found), sample), text
        assert read(parser(name), text) == found, text
        names = [each for each, _ in calls(found)]
        expected = [each for each, _ in sample.calls]
        assert names == expected[: len(names)] or not expected, text


@drawn_samples
def test_nothing_shown_is_taken_back(name: str, sample: Sample):
    """What is said of a beginning is the beginning of what is said of the whole."""
    whole = read(parser(name), [sample.text])
    one = parser(name)()
    shown = []
    for char in sample.text:
        shown += one.feed(char)
        assert content(whole).startswith(content(shown))
        for (name_then, then), (name_now, now) in zip(calls(shown), calls(whole), strict=False):
            assert name_then == name_now
            assert now.startswith(then)


@seed(SEED)
@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(st.data())
@pytest.mark.parametrize("name", SLICE)
def test_samples_in_a_row_are_cut_at_random(name: str, data: st.DataObject):
    picked = data.draw(st.lists(st.sampled_from(CORPORA[name].SAMPLES), min_size=1, max_size=3))
    text = data.draw(st.sampled_from(["", "\n", "x"])).join(each.text for each in picked)
    borders = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert read(thoughtful(name), cut(text, borders)) == read(thoughtful(name), [text])


COMMON = [
    '"',
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\n",
    "\r\n",
    " ",
    "1",
    "null",
    '{"a": ',
    "x",
    "<",
]


def check_soup(name: str, text: str, borders: list[int]) -> None:
    found = read(parser(name), [text])
    assert read(parser(name), cut(text, borders)) == found
    assert read(parser(name), text) == found
    shown = content(found)
    for marker in FORMATS[name].markers:
        # Content may only look like a marker where one was cut out of another's middle.
        assert marker not in shown or _can_be_spliced(name, text, marker), (marker, shown)


def _can_be_spliced(name: str, text: str, marker: str) -> bool:
    rest = text
    for each in FORMATS[name].markers:
        rest = rest.replace(each, "")
    return marker in rest or marker in ("[ARGS]", "[CALL_ID]")


@seed(SEED)
@settings(max_examples=EXAMPLES * 4, deadline=None, database=None)
@given(st.data())
@pytest.mark.parametrize("name", SLICE)
def test_any_soup_of_markup_is_read_alike_however_cut(name: str, data: st.DataObject):
    pieces = st.sampled_from([*CORPORA[name].PIECES, *COMMON])
    text = "".join(data.draw(st.lists(pieces, max_size=14)))
    check_soup(name, text, data.draw(st.lists(st.integers(0, len(text)), max_size=5)))


SLIPS = (
    *('"', "'", "\\", "{", "}", "[", "]", ",", ":", "\n", " ", "<", ">", "/", "=", "(", ")", "1"),
    *("\\u12", "\\x41", "\\q", "\\ud800", "NaN", "None", "True", "tru", "1.", "01", "+1", "1e999"),
    *(".5", "1_000", "-", "\t", "// c\n"),
)
"""What models write in place of something else, or besides."""
CALLING = {
    name: [sample.text for sample in CORPORA[name].SAMPLES if sample.calls] for name in FORMATS
}


def slipped(data: st.DataObject, text: str) -> str:
    """The text with some of it left out, replaced or added."""
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        size = data.draw(st.integers(0, 5))
        text = text[:at] + data.draw(st.sampled_from(("", *SLIPS))) + text[at + size :]
    return text


@seed(SEED)
@settings(max_examples=EXAMPLES * 2, deadline=None, database=None)
@given(st.data())
@pytest.mark.parametrize("name", SLICE)
def test_a_complete_call_has_valid_arguments_whatever_the_model_wrote(
    name: str, data: st.DataObject
):
    """Content behind a call is shown only once it is complete."""
    text = slipped(data, data.draw(st.sampled_from(CALLING[name])))
    found = merge_parts(parser(name)().feed(f"{text}\nafter it"))
    if "after it" in content(found):
        for called, arguments in calls(found):
            value = json.loads(arguments, parse_constant=no_json)
            assert isinstance(value, dict) or (name == "harmony" and isinstance(value, str)), called
            arguments.encode()


def no_json(constant: str) -> None:
    pytest.fail(f"{constant} is no JSON")


@seed(SEED)
@settings(max_examples=EXAMPLES, deadline=None, database=None)
@given(st.text(max_size=60))
@pytest.mark.parametrize("name", SLICE)
def test_text_without_markup_comes_out_as_it_is(name: str, text: str):
    text = text.replace("<", "(").replace("[", "(").replace("{", "(")
    if name == "harmony":
        text = text.replace("to=", "to:")  # begins a header, without a marker
    assert content(read(parser(name), text)) == text


LONG_VALUE = 'a\\n\\"b\\" {[<日> ' * (12_500 if is_long() else 3_000)
LONG_CALLS = [(name, case) for name in SLICE for case in CORPORA[name].LONG_CALLS]


def work(make: Callable[[], OutputParser], text: str) -> tuple[int, int]:
    """(functions called while reading it character by character, most characters held back)."""
    count = 0

    def watch(frame: Any, event: str, what: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    one = make()
    assert isinstance(one, IncrementalReader)
    held = 0
    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        for char in text:
            one.feed(char)
            held = max(held, len(one.text))
        one.finish()
    finally:
        sys.setprofile(before)
    return count, held


@pytest.mark.parametrize(("name", "case"), LONG_CALLS)
def test_long_answers_cost_no_more_than_their_length(name: str, case: str):
    """Steps per character do not grow, and nothing is looked at again and again: what is kept to be
    looked at once more stays small however long the answer."""
    text = CORPORA[name].LONG_CALLS[case]
    value = " \n" * 1000 if case == "blank" else LONG_VALUE[:2000]
    once, held = work(parser(name), text % value)
    thrice, held_then = work(parser(name), text % (value * 3))
    assert thrice <= 3.1 * once
    assert held == held_then <= 128


@pytest.mark.parametrize("name", SLICE)
def test_a_long_call_arrives_whole(name: str):
    found = read(parser(name), CORPORA[name].LONG_CALLS["call"] % LONG_VALUE)
    assert [each for each, _ in calls(found)] == ["now"]
    assert len(calls(found)[0][1]) >= len(LONG_VALUE) * 0.8


TEMPLATES = [(name, template) for name in FORMATS for template in CORPORA[name].TEMPLATES]
UNKNOWN = [
    None,
    "{{ messages }}",
    '{% if tools %}<tool_call>\n{"function": ...}\n</tool_call>',
    "{% if tools %}<tool_call>{{ call.name }}<sep>{{ call.arguments | tojson }}</tool_call>",
    '{% if tools %}{"name": "f", "arguments": {}}<tool_call>{{ call["name"] }}<sep>'
    "{{ call['arguments'] }}",
    '{% if tools %}<tool_calls>\n<tool_call>{"name": ..., "arguments": ...}',
    "{% if tools %}<|python_tag|> {{ '<function=' + name + '>' }}",
    "{% if tools %}tell me",
    "{% if tools %}<other:tool_call><function=f><parameter=p>",
    '{% if tools %}{"name": "f", "parameters": {}}',
]


@pytest.mark.parametrize(("name", "template"), [*TEMPLATES, *(("", each) for each in UNKNOWN)])
def test_a_template_tells_the_format(name: str, template: str | None):
    assert detect_tool_format(template) == name


def test_ids_of_calls():
    for name, format in FORMATS.items():
        ids = {format.call_id() for _ in range(100)}
        assert len(ids) == 100
        if name == "mistral":
            assert all(len(each) == 9 and each.isalnum() and each.isascii() for each in ids)
