"""Expressions that the splitter takes, and those that it leaves to `tokenizers`.

That compiled ones match the same is tested in test_fast_encoder.py.
"""

from __future__ import annotations

import pytest

from pdserve.text.tokenization.split_pattern import UncoveredPattern, compile_pattern


def first_letters(pattern: str) -> list[set[str]]:
    """ASCII characters with which each alternative may begin."""
    program = compile_pattern(pattern)
    return [
        {chr(code) for code, bits in enumerate(program.starts) if bits >> place & 1}
        for place in range(len(program.alternatives))
    ]


@pytest.mark.parametrize(
    "pattern",
    [
        r"\w+",
        r".",
        r"^a",
        r"a$",
        r"a++",
        r"a+?",
        r"(?:ab)+",
        r"(?!ab)c",
        r"(?=a)a",
        r"(?<=a)b",
        r"[a[b]]",
        r"[\p{L}&&[^a]]",
        r"\p{Han}",
        r"[[:alpha:]]",
        r"a*",
        r"(?:a|b)?",
        r"|a",
        r"a)",
        r"(a",
        r"[a",
        r"a{2,1}",
        r"a{,2}",
        "a{1,²}",
        "a{1" + "0" * 5000 + "}",
        "a" * 2000,
        "(?:" * 40 + "a" + ")" * 40,
        r"(?i:straße)",
        r"(?i:first)",
        r"(?i:[a])",
        r"[^\u4e00\P{L}]",
        "[z-a]",
        r"[a-\d]",
        "|".join("abcdefghijklmnopqrstuvwxyzABCDEFGHI"),
    ],
)
def test_others_are_refused(pattern):
    with pytest.raises(UncoveredPattern):
        compile_pattern(pattern)


def test_alternatives_know_how_they_begin():
    contraction, word, blank = first_letters(r"(?i:'s|'ll)|[^\r\n\p{L}]?\p{Lu}+|\s+(?!\S)")
    assert contraction == {"'"}
    assert word == {chr(code) for code in range(128)} - {"\r", "\n"} - set(
        "abcdefghijklmnopqrstuvwxyz"
    )
    assert blank == set("\t\n\v\f\r ")


def test_an_optional_part_lets_the_next_one_begin():
    assert first_letters(r"(?:a|b)?c{2,3}d") == [{"a", "b", "c"}]


def test_a_letter_in_any_case_may_be_beyond_ascii():
    (letters,) = compile_pattern("(?i:s)").sets
    assert letters[4] == [(0x17F, 0x17F)]


def test_steps_lead_on():
    program = compile_pattern(r"(?:a(?:b|c)?|d)e|f")
    for place, (step, *targets) in enumerate(program.steps):
        if step in (1, 2):
            assert all(target > place for target in targets[: 3 - step])
