"""Reasoning on channels, beside content and calls, however the text is cut."""

from __future__ import annotations

from itertools import combinations

import pytest

from pdserve.text.reasoning_parsers import detect_reasoning_format, reasoning_format
from pdserve.text.reasoning_parsers.channels import GEMMA4, HARMONY
from pdserve.text.tool_parsers import tool_format
from pdserve.text.tool_parsers.channels.gemma4 import Gemma4Reader
from tests.text.golden.samples import TOOLS, Sample
from tests.text.tool_parsers.reading import calls, content, cut, decoded, read, reasoning

ANALYSIS = "<|channel|>analysis<|message|>"
SAMPLES = {
    "harmony": [
        Sample(
            "reasoning and an answer",
            f"{ANALYSIS}I think.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            "Yes.",
            reasoning="I think.",
        ),
        Sample(
            "reasoning and a call",
            f"{ANALYSIS}I look.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
            "<|constrain|>json<|message|>{}<|call|>",
            calls=[("now", {})],
            reasoning="I look.",
        ),
        Sample(
            "reasoning twice",
            f"{ANALYSIS}One.<|end|><|start|>assistant{ANALYSIS}Two.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Three.",
            "Three.",
            reasoning="One.\nTwo.",
        ),
        Sample("no end", f"{ANALYSIS}I am cut", reasoning="I am cut"),
        Sample(
            "an end that was left out",
            f"{ANALYSIS}Hm.<|channel|>final<|message|>So.",
            "So.",
            reasoning="Hm.",
        ),
        Sample(
            "begun by the prompt",
            "I think.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            "Yes.",
            reasoning="I think.",
            begun=True,
        ),
    ],
    "gemma4": [
        Sample(
            "reasoning and an answer",
            "<|channel>thought\nI think.\n<channel|>Yes.",
            "Yes.",
            reasoning="I think.",
        ),
        Sample(
            "reasoning and a call",
            "<|channel>thought\nI look.<channel|><|tool_call>call:now{}<tool_call|>",
            calls=[("now", {})],
            reasoning="I look.",
        ),
        Sample(
            "a call within the reasoning",
            "<|channel>thought\nI look.<|tool_call>call:now{}<tool_call|><channel|>Well.",
            "Well.",
            [("now", {})],
            reasoning="I look.",
        ),
        Sample("no thought", "<|channel>thought\n<channel|>Yes.", "Yes."),
        Sample("no label", "<|channel>Hm.<channel|>Yes.", "Yes.", reasoning="Hm."),
        Sample("only the label", "thought\nHm.<channel|>Yes.", "Yes.", reasoning="Hm."),
        Sample("a word like the label", "thought is free", "thought is free"),
        Sample("no end", "<|channel>thought\nI am cut", reasoning="I am cut"),
        Sample("begun by the prompt", "\nHm.<channel|>Yes.", "Yes.", reasoning="Hm.", begun=True),
        Sample(
            "thoughts between answers",
            "A.<|channel>thought\nHm.<channel|>B.",
            "A.B.",
            reasoning="Hm.",
        ),
    ],
    "kimi_k3": [
        Sample(
            "reasoning and an answer",
            "<|open|>think<|sep|>I think.<|close|>think<|sep|><|open|>response<|sep|>Yes."
            "<|close|>response<|sep|>",
            "Yes.",
            reasoning="I think.",
        ),
        Sample(
            "begun by the prompt",
            "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.",
            "Yes.",
            reasoning="Hm.",
            begun=True,
        ),
        Sample("no end", "I am cut", reasoning="I am cut", begun=True),
        Sample(
            "an end that was left out",
            "Hm.<|open|>response<|sep|>Yes.",
            "Yes.",
            reasoning="Hm.",
            begun=True,
        ),
        Sample(
            "a call within the reasoning",
            'Hm.<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|>',
            "",
            [("now", {})],
            reasoning="Hm.",
            begun=True,
        ),
    ],
}
EVERY = [(name, sample) for name, samples in SAMPLES.items() for sample in samples]


@pytest.mark.parametrize(
    ("name", "sample"), EVERY, ids=[f"{name}: {sample.about}" for name, sample in EVERY]
)
def test_a_sample_is_read_however_cut(name: str, sample: Sample):
    def make():
        return reasoning_format(name).parser(sample.begun, tool_format(name).parser(TOOLS))

    whole = read(make, [sample.text])
    assert reasoning(whole) == sample.reasoning
    assert content(whole) == sample.content
    assert decoded(calls(whole), sample.calls) == list(sample.calls)
    assert read(make, sample.text) == whole
    for pair in combinations(range(len(sample.text) + 1), 2):
        if sum(pair) % 7 == 0:
            assert read(make, cut(sample.text, pair)) == whole


@pytest.mark.parametrize(
    ("name", "sample"), EVERY, ids=[f"{name}: {sample.about}" for name, sample in EVERY]
)
def test_without_tools_there_are_no_calls(name: str, sample: Sample):
    found = read(lambda: reasoning_format(name).parser(sample.begun), [sample.text])
    assert calls(found) == []
    assert reasoning(found).startswith(sample.reasoning)
    shown = content(found) + reasoning(found)
    assert not any(marker in shown for marker in reasoning_format(name).markers)


@pytest.mark.parametrize("behind", ["x<|end|>y", "<|message|>y", "<|channel|>final<|message|>y"])
@pytest.mark.parametrize("inside", ["word ", " ", "to=f ", "<|constrain|>"])
def test_a_header_that_is_too_long_is_read_however_cut(inside: str, behind: str):
    text = "<|channel|>" + inside * (150 // len(inside)) + behind

    def make():
        return HARMONY.parser(False)

    whole = read(make, [text])
    assert content(whole).endswith("y")
    for step in (1, 2, 3, 5, 7, 50, 127, 128, 129, 140):
        assert read(make, cut(text, range(step, len(text), step))) == whole


def test_blanks_in_a_header_are_looked_at_once():
    """Each run of them may belong to several places of a header; trying all takes minutes."""
    text = "<|channel|>" + " " * 5000 + "to=" + " " * 5000 + "!!<|end|>"
    assert content(read(lambda: HARMONY.parser(False), [text])).endswith("!!")
    text = "<|channel|>" + " " * 110 + "!<|end|>"
    assert content(read(lambda: HARMONY.parser(False), [text] * 300)).count("!") == 300


@pytest.mark.parametrize("blanks", [64, 65, 66, 1000])
def test_blanks_at_the_beginning_wait_for_a_label_only_while_they_are_few(blanks: int):
    text = " " * blanks + "thought\nx<channel|>y"

    def make():
        return GEMMA4.parser(False)

    whole = read(make, [text])
    assert (reasoning(whole) == "x") == (blanks == 64)
    for step in (1, 7, 63, 64, 65):
        assert read(make, cut(text, range(step, len(text), step))) == whole
    parser = make()
    parser.feed(" " * blanks)
    assert isinstance(parser, Gemma4Reader)
    assert (parser.at == 0) == (blanks == 64), "more are not looked at again"


def test_it_is_known_token_by_token_whether_it_reasons():
    parser = HARMONY.parser(False)
    seen = []
    for token in ["<|channel|>", "analysis", "<|message|>", "a", "<|end|>", "<|start|>", "x"]:
        parser.feed(token)
        seen.append(parser.in_reasoning)
    assert seen == [False, False, True, True, False, False, False]


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<|turn>model\n", False),
        ("<|turn>model\n<|channel>thought\n", True),
        ("<|turn>model\n<|channel>thought\n<channel|>", False),
    ],
)
def test_a_prompt_may_open_the_channel(prompt: str, opens: bool):
    assert GEMMA4.opens(prompt, "") is opens


def test_templates_tell_the_format():
    assert detect_reasoning_format("<|channel|>analysis<|message|>") == "harmony"
    assert detect_reasoning_format("<|channel>thought\\n<channel|>") == "gemma4"
