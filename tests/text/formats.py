"""All formats of tool calls with their corpora, `tests/text/golden/NAME.py`."""

from __future__ import annotations

from importlib import import_module
from random import Random
from typing import TYPE_CHECKING, Protocol, cast

from pdserve.text.tool_parsers import ALIASES, TOOL_PARSERS, tool_format
from tests.support.seeds import is_long, number_for, run_seed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.text.golden.samples import Sample


class Corpus(Protocol):
    """What a module of `tests/text/golden` holds."""

    SAMPLES: Sequence[Sample]
    PIECES: Sequence[str]
    """Bits of markup, for random soup."""
    LONG_CALLS: Mapping[str, str]
    """Texts with `%s` for a long value; `call` is one call of `now`."""
    TRIGGER: str
    """Free text that ends where a call has begun."""
    TEMPLATES: Sequence[str]
    """Templates, shortened to what tells the format."""


FORMATS = {name: tool_format(name) for name in TOOL_PARSERS if name not in ALIASES}
CORPORA = {name: cast("Corpus", import_module(f"tests.text.golden.{name}")) for name in FORMATS}

SLICE = (
    sorted(FORMATS)
    if is_long()
    else sorted(Random(number_for(run_seed(), __name__)).sample(sorted(FORMATS), 5))
)
"""The formats whose long tests an ordinary run takes."""


def unions_as_text(name: str) -> bool:
    """Whether a value of several types may be read as text."""
    return getattr(CORPORA[name], "UNIONS_AS_TEXT", False)
