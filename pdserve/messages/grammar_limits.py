"""Limits the size of grammars: frontends check the limits, engines rely on them.

A client writes the grammar. Compiling and following it are bounded by counts, not by a clock, so
that a grammar is accepted on every machine or on none.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.ids import Bytes

__all__ = ["MAX_GRAMMAR", "PARSER_LIMITS"]

MAX_GRAMMAR: Final[Bytes] = 256 * 1024
"""Bytes of grammar text. It travels with each request, and again with each migration."""

PARSER_LIMITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "initial_lexer_fuel": 1_000_000,
        "step_lexer_fuel": 200_000,
        "step_max_items": 50_000,
        "max_items_in_row": 2_000,
        "max_lexer_states": 50_000,
        "max_grammar_size": 100_000,
    }
)
"""Limits by their names in `llguidance.LLParserLimits`: at most about 20 ms of compiling, 15 ms of
one step and 100 MB. Usual schemas need a hundredth. Repetitions of 100,000 and more are not counted
here and take longer: frontends measure the first steps, and refuse slow grammars."""
