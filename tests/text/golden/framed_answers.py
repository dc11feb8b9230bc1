"""Reasoning of families that mark the answer, too, or use words for markers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.text.golden.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def framed(start: str, end: str, begin: str, close: str) -> Sequence[Sample]:
    """What holds of every frame."""
    return [
        Sample(
            "a block and an answer",
            f"{start}\nHm.\n{end}\n{begin}\nHi.\n{close}\n",
            "Hi.",
            reasoning="Hm.",
        ),
        Sample("no layout", f"{start}Hm.{end}{begin}Hi.{close}", "Hi.", reasoning="Hm."),
        Sample("an answer without a frame", f"{start}Hm.{end}\n\nHi.\n", "Hi.\n", reasoning="Hm."),
        Sample("a frame without a block", f"{begin}\nHi.\n\nBye.\n{close}", "Hi.\n\nBye."),
        Sample(
            "the frame is not closed", f"{start}Hm.{end}\n{begin}\nHi.\n", "Hi.", reasoning="Hm."
        ),
        Sample(
            "text before the frame",
            f"{start}Hm.{end}So: {begin}Hi.{close}",
            "So: Hi.",
            reasoning="Hm.",
        ),
        Sample("text after the frame", f"{begin}Hi.{close}\nBye.\n", "Hi.\nBye."),
        Sample("an empty frame", f"{start}Hm.{end}{begin}{close}", "", reasoning="Hm."),
        Sample("begun", f"Hm.{end}\n\n{begin}\nHi.\n{close}", "Hi.", reasoning="Hm.", begun=True),
        Sample(
            "markers that are talked about",
            f"{begin}Use {begin} and {close} {close}",
            f"Use {begin} and {close}",
            literal=[begin, close],
        ),
        Sample(
            "cut in a marker",
            f"{start}Hm.{end}{begin}Hi.{close[:-1]}",
            f"Hi.{close[:-1]}",
            reasoning="Hm.",
        ),
        Sample("an end that nothing began", f"Hm.{end}Hi.", "Hm.Hi."),
    ]


SAMPLES: Mapping[str, Sequence[Sample]] = {
    "ernie45": framed("<think>", "</think>", "<response>", "</response>"),
    "hunyuan_a13b": framed("<think>", "</think>", "<answer>", "</answer>"),
    "cohere_command3": [
        *framed("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        *framed("<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        Sample(
            "citations",
            "<|START_THINKING|>As <co>he</co: 0:[1]> says.<|END_THINKING|>\n"
            "<|START_RESPONSE|>It <co>is 5 °C</co: 0:[1,2],1:[3]>.<|END_RESPONSE|>",
            "It is 5 °C.",
            reasoning="As he says.",
        ),
        Sample("almost citations", "a <co </co> <b> 1 < 2 </co: ", "a <co </co> <b> 1 < 2 </co: "),
    ],
    "granite": [
        Sample(
            "other words",
            "Here's my thought process: Hm. Here's my response: Hi.",
            "Hi.",
            reasoning="Hm.",
        ),
        Sample(
            "mixed words",
            "Here is my thought process:\nHm.\n\nHere's my response:\nHi.\n",
            "Hi.\n",
            reasoning="Hm.",
        ),
        Sample("almost the words", "Here is my thought: Hi.", "Here is my thought: Hi."),
    ],
    "apriel": [
        Sample(
            "the steps, then the response",
            "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nHi.\n[END FINAL RESPONSE]",
            "Hi.",
            reasoning="Hm.",
        ),
        Sample("begun", "Hm.\n[BEGIN FINAL RESPONSE]\nHi.\n", "Hi.", reasoning="Hm.", begun=True),
        Sample("tags", "<thinking>Hm.</thinking>\nHi.", "Hi.", reasoning="Hm."),
        Sample("only a response", "[BEGIN FINAL RESPONSE]\nHi.\n[END FINAL RESPONSE]\n", "Hi."),
    ],
}
