"""Reasoning is set apart from the answer, however the text is cut."""

from __future__ import annotations

from itertools import combinations

import pytest

from pdserve.text.output_parts import ContentDelta
from pdserve.text.reasoning_parsers import detect_reasoning_format, reasoning_format
from pdserve.text.reasoning_parsers.marked_blocks import THINK
from pdserve.text.tool_parsers import tool_format
from tests.support.seeds import is_long
from tests.text.golden import framed_answers
from tests.text.golden.samples import TOOLS, Sample
from tests.text.golden.think import SAMPLES
from tests.text.tool_parsers.reading import calls, content, cut, read, reasoning


def turned(sample: Sample, name: str) -> Sample:
    """The same with another family's markers."""
    format = reasoning_format(name)

    def turn(text: str) -> str:
        return text.replace("<think>", format.start).replace("</think>", format.end)

    return Sample(
        sample.about,
        turn(sample.text),
        turn(sample.content),
        reasoning=turn(sample.reasoning),
        begun=sample.begun,
        literal=[turn(each) for each in sample.literal],
    )


BLOCKS = (
    "think",
    "mistral",
    "granite",
    "apertus",
    "cohere_command3",
    "ernie45",
    "hunyuan_a13b",
    "seed_oss",
    "minimax_m3",
    "hy_v3",
    "longcat",
)
EVERY = [
    *((name, turned(each, name)) for name in BLOCKS for each in SAMPLES),
    *((name, each) for name, samples in framed_answers.SAMPLES.items() for each in samples),
]
PAIRS_UP_TO = 200 if is_long() else 40
"""Characters of a sample that is cut at every two places."""


@pytest.mark.parametrize("name", sorted({name for name, _ in EVERY}))
def test_samples_are_read_however_cut(name: str):
    for other, sample in EVERY:
        if other == name:
            check_every_cut(name, sample)


def check_every_cut(name: str, sample: Sample) -> None:
    format = reasoning_format(name)

    def make():
        return format.parser(sample.begun, None)

    whole = read(make, [sample.text])
    assert reasoning(whole) == sample.reasoning, sample.about
    assert content(whole) == sample.content, sample.about
    for marker in format.markers:
        assert marker in sample.literal or marker not in content(whole) + reasoning(whole)
    assert read(make, sample.text) == whole, sample.about
    for at in range(len(sample.text) + 1):
        assert read(make, cut(sample.text, (at,))) == whole, sample.about
    if len(sample.text) <= PAIRS_UP_TO:
        for pair in combinations(range(len(sample.text) + 1), 2):
            assert read(make, cut(sample.text, pair)) == whole, sample.about
    for end in range(len(sample.text)):
        text = sample.text[:end]
        assert read(make, text) == read(make, [text]), text


CALLED = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "mistral"])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("closed", ["", "</think>", "\n</think>\n\nDone."])
def test_a_call_ends_a_block_that_was_left_open(name: str, begun: bool, closed: str):
    bodies = {
        "hermes": CALLED,
        "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "mistral": "[TOOL_CALLS]now[ARGS]{}",
    }
    text = f"{'' if begun else '<think>'}I look at it.\n{bodies[name]}{closed}"
    tools = tool_format(name)

    def make():
        return THINK.parser(begun, tools.parser(TOOLS), tools.starts)

    whole = read(make, [text])
    assert reasoning(whole) == "I look at it."
    assert [call for call, _ in calls(whole)] == ["now"]
    assert content(whole) == ("Done." if "Done" in closed else "")
    for at in range(len(text) + 1):
        assert read(make, cut(text, (at,))) == whole


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "deepseek_v3"])
@pytest.mark.parametrize("quoted", ["%s` it is", "%sHm%s.", "%s", "%s\n\n"])
def test_a_marker_that_no_call_follows_is_reasoning(name: str, quoted: str):
    tools = tool_format(name)
    marker = tools.starts[0]
    thought = f"They write `{quoted.replace('%s', marker)}"
    text = f"{thought}</think>So be it."

    def make():
        return THINK.parser(True, tools.parser(TOOLS), tools.starts)

    whole = read(make, [text])
    assert reasoning(whole) == thought.rstrip()
    assert content(whole) == "So be it."
    assert not calls(whole)
    for at in range(len(text) + 1):
        assert read(make, cut(text, (at,))) == whole


def test_a_call_may_follow_a_marker_that_was_talked_about():
    tools = tool_format("hermes")
    text = f"The marker <tool_call> is one. {CALLED}"
    whole = read(lambda: THINK.parser(True, tools.parser(TOOLS), tools.starts), [text])
    assert reasoning(whole) == "The marker <tool_call> is one."
    assert [call for call, _ in calls(whole)] == ["now"]


CONSIDERED = {
    "hermes": CALLED,
    "qwen3_coder": "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "mistral": "[TOOL_CALLS]now[ARGS]{}",
    "lfm2": "<|tool_call_start|>[now()]<|tool_call_end|>",
    "kimi_k2": "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
}


@pytest.mark.parametrize("name", CONSIDERED)
@pytest.mark.parametrize("behind", [" or not.", "\nNo.\n", " Or twice: %s", "%s No"])
@pytest.mark.parametrize("answer", ["So be it.", "%s", "Now. %s"])
def test_a_call_that_is_only_considered_is_reasoning(name: str, behind: str, answer: str):
    tools = tool_format(name)
    call = CONSIDERED[name]
    thought = f"Shall I? {call}{behind.replace('%s', call)}"
    text = f"{thought}</think>\n{answer.replace('%s', call)}"

    def make():
        return THINK.parser(True, tools.parser(TOOLS), tools.starts)

    whole = read(make, [text])
    assert reasoning(whole) == thought.rstrip()
    assert content(whole) == answer.replace("%s", "").rstrip()
    assert calls(whole) == ([("now", "{}")] if "%s" in answer else [])
    for at in range(len(text) + 1):
        assert read(make, cut(text, (at,))) == whole
    assert read(make, text) == whole


def test_an_argument_may_contain_the_end_of_a_block():
    tools = tool_format("hermes")
    body = '{"name": "get_weather", "arguments": {"city": "a</think>b"}}'
    text = f"I look.<tool_call>{body}</tool_call>"
    whole = read(lambda: THINK.parser(True, tools.parser(TOOLS), tools.starts), text)
    assert reasoning(whole) == "I look."
    assert [call for call, _ in calls(whole)] == ["get_weather"]


def test_without_tools_a_call_stays_reasoning():
    whole = read(lambda: THINK.parser(True, None), [f"I look.\n{CALLED}"])
    assert reasoning(whole) == f"I look.\n{CALLED}"


def test_reasoning_is_told_token_by_token():
    parser = THINK.parser(False, None)
    seen = []
    for token in ["\n", "<th", "ink>", "\n", "a", " b", "</", "think>", "\n\n", "c"]:
        parser.feed(token)
        seen.append(parser.in_reasoning)
    assert seen == [False, False, True, True, True, True, True, False, False, False]


def test_reasoning_that_the_prompt_begins_is_told_from_the_first_token():
    parser = THINK.parser(True, None)
    assert parser.in_reasoning
    assert parser.feed("</think>") == []
    assert not parser.in_reasoning
    assert parser.feed("\n\nHi") == [ContentDelta("Hi")]


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|Assistant|><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("user: what is <think>?\nassistant:", False),
    ],
)
def test_a_prompt_may_open_a_block(prompt: str, opens: bool):
    assert THINK.opens(prompt, "") is opens


@pytest.mark.parametrize(
    ("continued", "opens"),
    [
        ("<think>so far", True),
        ("<think>so far</think>", False),
        ("<think>a</think><think>b", True),
        ("so far", False),
    ],
)
def test_a_message_to_go_on_with_may_end_in_a_block(continued: str, opens: bool):
    assert THINK.opens("<|im_start|>assistant\n" + continued, continued) is opens


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, ""),
        ("{{ messages }}", ""),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("[THINK]{{ thinking }}[/THINK]", "mistral"),
        ("{% if add_generation_prompt %}<|role|>assistant\n<think>\n{% endif %}", "think"),
        ("{% set end = '</seed:think>' %}", "seed_oss"),
        ("{% set end = '</mm:think>' %}", "minimax_m3"),
        ("{% set end = '</think{}>'.format(suffix) %}{{ '<think{}>' }}", "hy_v3"),
        ("{{ content.split('</longcat_think>') }}", "longcat"),
        ("{{ '</other:think>' }}", ""),
        ("<|START_THINKING|>{{ plan }}<|END_THINKING|>", "cohere_command3"),
        ("<|inner_prefix|>{{ thoughts }}<|inner_suffix|>", "apertus"),
        ("{{ prompt + '... [BEGIN FINAL RESPONSE] ...' }}", "apriel"),
        ("write after 'Here is my thought process:' and 'Here is my response:'", "granite"),
        ("<think>{{ thoughts }}</think>\n<response>{{ content }}</response>", "ernie45"),
        ("<response>{{ result }}</response><minimax:tool_call></think>", "think"),
        ("<think></think><answer>{{ content }}</answer><tool_responses>", "hunyuan_a13b"),
    ],
)
def test_a_template_tells_the_format(template: str | None, name: str):
    assert detect_reasoning_format(template) == name


@pytest.mark.parametrize(
    ("other", "name"),
    [("deepseek_r1", "think"), ("kimi_k2", "think"), ("cohere_command4", "cohere_command3")],
)
def test_a_format_is_found_by_the_names_of_other_servers(other: str, name: str):
    assert reasoning_format(other) is reasoning_format(name)
