"""Formats whose reasoning is one of several channels, which one reader tells apart.

The reader is that of the family's calls, `text/tool_parsers/channels`: it finds reasoning anywhere
in an answer, also where the request has no tools.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.text.reasoning_parsers.base import MarkedReasoning
from pdserve.text.tool_parsers.channels import gemma4, harmony, kimi_k3, kimi_k3_grammar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.text.output_parts import OutputParser

__all__ = ["GEMMA4", "HARMONY", "KIMI_K3"]


class HarmonyReasoning(MarkedReasoning):
    """The channel `analysis` of GPT-OSS."""

    __slots__ = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return harmony.MARKERS

    def detect(self, template: str) -> bool:
        return harmony.CHANNEL in template and harmony.MESSAGE in template

    def before_answer(self, special: Mapping[str, int]) -> str:
        return harmony.before_answer(special)

    def parser(
        self, begun: bool, then: OutputParser | None = None, calls: tuple[str, ...] = ()
    ) -> OutputParser:
        reader = then
        if not isinstance(reader, harmony.HarmonyReader):
            reader = harmony.HarmonyReader(calls=False)
        if begun:
            reader.begin_reasoning()
        return reader


class Gemma4Reasoning(MarkedReasoning):
    """The channel `thought` of Gemma 4."""

    __slots__ = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return gemma4.MARKERS

    def detect(self, template: str) -> bool:
        return gemma4.CHANNEL in template and gemma4.CHANNEL_END in template

    def opens(self, prompt: str, continued: str) -> bool:
        if continued.rfind(self.start) > continued.rfind(self.end):
            return True
        tail = prompt.rstrip()
        return tail.endswith((self.start, f"{self.start}thought"))

    def parser(
        self, begun: bool, then: OutputParser | None = None, calls: tuple[str, ...] = ()
    ) -> OutputParser:
        reader = then if isinstance(then, gemma4.Gemma4Reader) else gemma4.Gemma4Reader(calls=False)
        if begun:
            reader.begin_reasoning()
        return reader


class KimiK3Reasoning(MarkedReasoning):
    """The tag `think` of Kimi K3."""

    __slots__ = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return kimi_k3.MARKERS

    def detect(self, template: str) -> bool:
        return kimi_k3.is_family(template)

    def before_answer(self, special: Mapping[str, int]) -> str:
        return kimi_k3_grammar.before_answer(special)

    def parser(
        self, begun: bool, then: OutputParser | None = None, calls: tuple[str, ...] = ()
    ) -> OutputParser:
        reader = then
        if not isinstance(reader, kimi_k3.KimiK3Reader):
            reader = kimi_k3.KimiK3Reader(calls=False)
        if begun:
            reader.begin_reasoning()
        return reader


HARMONY: Final = HarmonyReasoning(f"{harmony.CHANNEL}analysis{harmony.MESSAGE}", harmony.END)
GEMMA4: Final = Gemma4Reasoning(gemma4.CHANNEL, gemma4.CHANNEL_END)
KIMI_K3: Final = KimiK3Reasoning(kimi_k3.THINK, kimi_k3.THINK_END)
