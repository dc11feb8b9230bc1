"""Declares families whose calls are JSON objects with a name and arguments, behind their own
markers.

They differ in the markers and in the layout; `marked_objects.py` reads them all.
"""

from __future__ import annotations

from typing import Final

from pdserve.text.tool_parsers.json_calls.marked_objects import MarkedObjects

_CALLS: Final = "<tool_calls>"
_CALLS_END: Final = "</tool_calls>"

NEMOTRON_JSON: Final = MarkedObjects("<TOOLCALL>", "</TOOLCALL>")
"""`<TOOLCALL>[{...}, ...]</TOOLCALL>`: Llama-Nemotron, Nemotron Nano v2."""

JAMBA: Final = MarkedObjects(
    _CALLS, _CALLS_END, head="[\n    ", joint=",\n    ", tail="\n]", marks=("<|bom|>",)
)
"""`<tool_calls>[...]</tool_calls>`: Jamba 1.5 to 1.7."""

HUNYUAN_A13B: Final = MarkedObjects(
    _CALLS,
    _CALLS_END,
    around=("<answer>", "</answer>", "助手："),
    marks=("<|extra_0|>",),
    foreign=("<tool_call>",),
)
"""The same, in an answer between markers."""

MINIMAX: Final = MarkedObjects(
    _CALLS,
    _CALLS_END,
    head="\n",
    joint="\n",
    tail="\n",
    marks=("<beginning_of_sentence>",),
)
"""The same without a list, an object in each line: MiniMax M1."""

APRIEL: Final = MarkedObjects(
    _CALLS,
    _CALLS_END,
    around=("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]", "<|end|>"),
    marks=("<tool_calls>[",),
)
"""The list of Apriel, and of other templates that have one."""

GRANITE: Final = MarkedObjects(
    "<|tool_call|>",
    other_starts=("<tool_call>",),
    around=("</tool_call>", "<|end_of_text|>"),
    marks=("<|start_of_role|>", "<|tool_call|>"),
)
"""`<|tool_call|>[...]` without an end: Granite 3."""

GRANITE_20B_FC: Final = MarkedObjects("<function_call>", head=" ", joint="", tail="")
"""`<function_call> {...}` for each call: Granite 20B for function calling."""

INTERNLM: Final = MarkedObjects(
    "<|action_start|>",
    "<|action_end|>",
    head="<|plugin|>\n",
    joint="",
    tail="\n",
    within=("<|plugin|>",),
    arguments_key="parameters",
    marks=("<|plugin|>",),
)
"""`<|action_start|><|plugin|>{...}<|action_end|>`: InternLM 2 and Intern-S1."""

PHI4_MINI_JSON: Final = MarkedObjects(
    "functools[",
    head="",
    bare_starts=("functools[", "functools"),
    other_starts=("<|tool_call|>",),
    around=("<|/tool_call|>",),
    marks=("functools[",),
)
"""`functools[...]`, in newer versions `<|tool_call|>[...]<|/tool_call|>`: Phi-4-mini, FireFunction
2."""

ERNIE45: Final = MarkedObjects(
    "<tool_call>",
    "</tool_call>",
    head="\n",
    joint="",
    tail="\n",
    around=("<response>", "</response>"),
    marks=("<response>", '"name"', '"arguments"'),
    foreign=("<function=", "minimax"),
)
"""Hermes' calls, and text between markers: ERNIE 4.5."""

LONGCAT: Final = MarkedObjects(
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    head="\n",
    joint="",
    tail="\n",
    foreign=("<longcat_arg_key>",),
)
"""Hermes' calls with tags of its own: LongCat-Flash."""

STEP3_VL: Final = MarkedObjects(
    "<tool_call>",
    "</tool_call>",
    head="\n",
    joint="",
    tail="\n",
    around=("<tool_calls>", "</tool_calls>"),
    marks=("<tool_calls>\\n<tool_call>\\n{",),
)
"""Hermes' calls, all of them between markers: Step3-VL."""


class _GigaChat3(MarkedObjects):
    def detect(self, template: str) -> bool:
        """The first version's template puts the start of a call together from parts."""
        return all(each in template for each in self.marks)


GIGACHAT3: Final = _GigaChat3(
    "<|function_call|>",
    head="",
    joint="",
    tail="",
    other_starts=("function call<|role_sep|>",),
    around=("<|message_sep|>", "<|role_sep|>"),
    behind=("</s>",),
    marks=("<|role_sep|>", "<|message_sep|>"),
)
"""`<|function_call|>{...}`, and as a message of its own in the first version: GigaChat 3."""
