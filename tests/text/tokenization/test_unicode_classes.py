"""The table of categories says what the regular expressions of `tokenizers` say."""

from __future__ import annotations

from unicodedata import category

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from pdserve.text.tokenization.unicode_classes import (
    CLASSES,
    UNKNOWN,
    WHITE,
    character_classes,
    normalizable_classes,
)
from tests.support.seeds import is_long

PATTERNS = {
    **{rf"\p{{{name}}}": {kind} for name, kind in CLASSES.items()},
    r"\p{N}": {CLASSES["Nd"], CLASSES["N"]},
    r"\p{L}": {CLASSES[name] for name in ("Lu", "Ll", "Lt", "Lm", "Lo")},
    r"\s": {WHITE},
}


def edges() -> list[int]:
    """Code points whose neighbour has another class; all of them in long mode."""
    classes = character_classes()
    points = [point for point in range(0x10FFFF) if not 0xD7FF <= point < 0xE000]
    if is_long():
        return points
    return [p for p in points if classes[p] != classes[p + 1] or classes[p] != classes[p - 1]]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_classes_are_those_of_the_library(pattern):
    classes = character_classes()
    points = [point for point in edges() if classes[point] != UNKNOWN]
    split = Split(Regex(pattern), "removed", invert=True)
    found = set()
    for begin in range(0, len(points), 2048):
        text = "".join(map(chr, points[begin : begin + 2048]))
        found |= {letter for piece, _ in split.pre_tokenize_str(text) for letter in piece}
    assert found == {chr(point) for point in points if classes[point] in PATTERNS[pattern]}


def test_every_code_point_has_an_entry():
    classes = character_classes()
    assert len(classes) == 0x110000
    assert classes[ord("a")] == CLASSES["Ll"]
    assert classes[0xD800] == classes[0x378] == UNKNOWN
    assert not any(classes[point] == UNKNOWN for point in range(0x370))


def test_what_the_interpreter_does_not_know_has_no_class_where_text_is_normalised():
    for point, kind in enumerate(normalizable_classes()):
        if kind == CLASSES["M"]:
            assert category(chr(point))[0] == "M"
