"""Reasoning between `<think>` and `</think>`: R1, Qwen 3, QwQ and many more."""

from __future__ import annotations

from tests.text.golden.samples import Sample

SAMPLES = [
    Sample("none", "Hello.\n", "Hello.\n"),
    Sample("nothing", ""),
    Sample("blank space", " \n", " \n"),
    Sample("a block", "<think>\nHm.\n</think>\n\nHello.\n", "Hello.\n", reasoning="Hm."),
    Sample("no layout", "<think>Hm.</think>Hello.", "Hello.", reasoning="Hm."),
    Sample("CRLF", "<think>\r\nHm.\r\n</think>\r\n\r\nHello.", "Hello.", reasoning="Hm."),
    Sample("blank space before", "\n\n <think>Hm.</think>Hello.", "Hello.", reasoning="Hm."),
    Sample("an empty block", "<think>\n\n</think>\n\nHello.", "Hello."),
    Sample("only a block", "<think>\nHm.\n</think>\n\n", "", reasoning="Hm."),
    Sample("paragraphs", "<think>\n a\n\n\n b \n</think> c", "c", reasoning="a\n\n\n b"),
    Sample("never ended", "<think>\nHm, so\n", "", reasoning="Hm, so"),
    Sample("cut in the end", "<think>\nHm, so\n</thi", "", reasoning="Hm, so\n</thi"),
    Sample("cut in the start", "<thin", "<thin"),
    Sample("unicode", "<think>\u3000é 😀\u3000</think>日本", "日本", reasoning="é 😀"),
    Sample(
        "looks like markers",
        "<think>a < b </thin> <think </think >\n</think>\n<thinking> <think",
        "<thinking> <think",
        reasoning="a < b </thin> <think </think >",
    ),
    Sample(
        "markers that are talked about later",
        "<think>a</think>Write <think> and </think>.",
        "Write <think> and </think>.",
        reasoning="a",
        literal=["<think>", "</think>"],
    ),
    Sample(
        "a start in the block",
        "<think>a <think> b</think>c",
        "c",
        reasoning="a <think> b",
        literal=["<think>"],
    ),
    Sample(
        "a start that is no beginning",
        "Write <think> here.",
        "Write <think> here.",
        literal=["<think>"],
    ),
    Sample("an end that nothing began", "Hm.\n</think>\n\nHello.", "Hm.\n\n\nHello."),
    Sample("begun by the prompt", "Hm.\n</think>\n\nHello.", "Hello.", reasoning="Hm.", begun=True),
    Sample("begun, and at once over", "\n</think>\n\nHello.", "Hello.", begun=True),
    Sample("begun, and never ended", "\nHm, so ", "", reasoning="Hm, so", begun=True),
    Sample("begun twice", "\n<think>\nHm.</think>\nHello.", "Hello.", reasoning="Hm.", begun=True),
    Sample("begun, looks like a start", "<thin", "", reasoning="<thin", begun=True),
    Sample("begun, and nothing", "", begun=True),
]
