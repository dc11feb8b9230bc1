"""FunctionGemma: Gemma 4's calls with other markers."""

from __future__ import annotations

from dataclasses import replace

from tests.text.golden import gemma4

OWN = {
    "<|tool_call>": "<start_function_call>",
    "<tool_call|>": "<end_function_call>",
    '<|"|>': "<escape>",
    "<|tool_response>": "<start_function_response>",
}
NOT_HERE = ("<|channel>", "<channel|>", "<turn|>", "<|too", "<|tool_cal", "<tool_")


def turned(text: str) -> str:
    """Gemma 4's text in this family's markers."""
    for other, own in OWN.items():
        text = text.replace(other, own)
    return text


SAMPLES = [
    replace(sample, text=turned(sample.text), content=turned(sample.content))
    for sample in gemma4.SAMPLES
    if not any(each in turned(sample.text) for each in NOT_HERE)
    and "cut" not in sample.about
    and "half" not in sample.about
]
PIECES = [turned(each) for each in gemma4.PIECES if each not in ("<turn|>", "<|to", "<turn")]
LONG_CALLS = {case: turned(text) for case, text in gemma4.LONG_CALLS.items()}
TRIGGER = "Well.<start_function_call>"
TEMPLATES = ["{% if tools %}{{ '<start_function_call>call:' + name }}{{ '<escape>' + v }}"]
CLOSERS = ["<escape>"]
WITHOUT_DEFINITIONS = True
