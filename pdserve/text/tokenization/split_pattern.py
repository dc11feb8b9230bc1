"""Compiles the regular expressions that cut text before BPE, for `native/src/bpe/splitter.cpp`.

It takes what tokenizers' files use: alternatives of sets of characters, with greedy counts; groups,
also optional ones; negative lookahead at one set; contractions in any case. For anything else it
raises `UncoveredPattern`, and the tokenizer stays with `tokenizers`. The compiled form matches what
the expression matches in `tokenizers`: of the alternatives the first that fits, each count as high
as the rest allows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pdserve.text.tokenization.unicode_classes import CLASSES, WHITE, character_classes

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SplitProgram", "UncoveredPattern", "compile_pattern"]

_ALL_CLASSES: Final = (1 << 13) - 1
_ASCII: Final = (1 << 128) - 1
_NO_LIMIT: Final = 2**31 - 1
_ESCAPES: Final = {"r": "\r", "n": "\n", "t": "\t", "v": "\v", "f": "\f"}
_GROUPS: Final = {"L": ("Lu", "Ll", "Lt", "Lm", "Lo"), "N": ("Nd", "N")}
_FOLDS: Final = {"s": "sS\u017f", "k": "kK\u212a"}
"""Letters that are equal to one beyond ASCII when case is ignored."""
_JOINED: Final = ("ss", "st", "ff", "fi", "fl")
"""Letters that together are equal to a single one when case is ignored."""
_MOST_ALTERNATIVES: Final = 32
_MOST_STEPS: Final = 1024
"""Most steps of a program: the matcher's stack grows with each, and usual ones have some fifty."""
_DIGITS: Final = 20
"""Most digits of a count, both numbers together."""
_DEEPEST: Final = 32
"""Most groups within one another."""
SET, FORK, JUMP, NOT_AHEAD, DONE = range(5)
"""Steps of a program: take characters of a set; try one place, then the other; go on elsewhere;
fail if a character of a set follows; match."""


class UncoveredPattern(Exception):
    """An expression has a part that the splitter does not know; the message names it."""


@dataclass(frozen=True, slots=True)
class _Set:
    """A set of characters. Beyond ASCII: those of `classes` or `ranges`, or all others."""

    ascii: int = 0
    classes: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    inverted: bool = False

    def union(self, other: _Set) -> _Set:
        return _Set(
            self.ascii | other.ascii, self.classes | other.classes, self.ranges + other.ranges
        )

    def complement(self) -> _Set:
        return _Set(_ASCII & ~self.ascii, self.classes, self.ranges, not self.inverted)

    def without_inversion(self) -> _Set:
        """The same set, as a member of a larger one."""
        if not self.inverted:
            return self
        if self.ranges:
            raise UncoveredPattern("a set that excludes a range, within another one")
        return _Set(self.ascii, _ALL_CLASSES & ~self.classes)


@dataclass(frozen=True, slots=True)
class _Take:
    """Between `least` and `most` characters of a set."""

    set: _Set
    least: int = 1
    most: int = 1


@dataclass(frozen=True, slots=True)
class _NotAhead:
    set: _Set


@dataclass(frozen=True, slots=True)
class _Choice:
    """The first of several sequences that fits."""

    sequences: tuple[tuple[_Node, ...], ...]


_Node = _Take | _NotAhead | _Choice


@dataclass(frozen=True, slots=True)
class SplitProgram:
    """A compiled expression, in the form that the extension takes."""

    sets: list[tuple[int, int, int, bool, list[tuple[int, int]]]]
    """Bits of ASCII, low and high half; bits of classes; inverted; ranges."""
    steps: list[tuple[int, int, int, int]]
    starts: list[int]
    """By ASCII character: a bit for each alternative that may begin with it."""
    alternatives: list[int]
    """The first step of each."""


def compile_pattern(pattern: str) -> SplitProgram:
    """Compile a regular expression. Raises `UncoveredPattern`."""
    choice = _Parser(pattern).whole()
    if len(choice.sequences) > _MOST_ALTERNATIVES:
        raise UncoveredPattern("more than 32 alternatives")
    if any(_nullable(sequence) for sequence in choice.sequences):
        raise UncoveredPattern("a match of nothing")
    emitter = _Emitter()
    alternatives = []
    for sequence in choice.sequences:
        alternatives.append(len(emitter.steps))
        emitter.sequence(sequence)
        emitter.steps.append((DONE, 0, 0, 0))
    if len(emitter.steps) > _MOST_STEPS:
        raise UncoveredPattern(f"more than {_MOST_STEPS} steps")
    firsts = [_first(sequence) for sequence in choice.sequences]
    starts = [
        sum(1 << place for place, first in enumerate(firsts) if first >> code & 1)
        for code in range(128)
    ]
    return SplitProgram(emitter.sets, emitter.steps, starts, alternatives)


def _nullable(sequence: Sequence[_Node]) -> bool:
    return all(_node_nullable(node) for node in sequence)


def _node_nullable(node: _Node) -> bool:
    if isinstance(node, _Take):
        return node.least == 0
    return isinstance(node, _NotAhead) or any(map(_nullable, node.sequences))


def _first(sequence: Sequence[_Node]) -> int:
    """Bits of the ASCII characters with which a match of a sequence may begin."""
    bits = 0
    for node in sequence:
        if isinstance(node, _Take):
            bits |= node.set.ascii
        elif isinstance(node, _Choice):
            for each in node.sequences:
                bits |= _first(each)
        if not _node_nullable(node):
            break
    return bits


class _Emitter:
    """Writes the steps of sequences one after the other."""

    def __init__(self) -> None:
        self.sets: list[tuple[int, int, int, bool, list[tuple[int, int]]]] = []
        self.steps: list[tuple[int, int, int, int]] = []

    def sequence(self, nodes: Sequence[_Node]) -> None:
        for node in nodes:
            if isinstance(node, _Take):
                self.steps.append((SET, self._set(node.set), node.least, node.most))
            elif isinstance(node, _NotAhead):
                self.steps.append((NOT_AHEAD, self._set(node.set), 0, 0))
            else:
                self._choice(node)

    def _choice(self, choice: _Choice) -> None:
        jumps = []
        for sequence in choice.sequences[:-1]:
            fork = len(self.steps)
            self.steps.append((FORK, fork + 1, 0, 0))
            self.sequence(sequence)
            jumps.append(len(self.steps))
            self.steps.append((JUMP, 0, 0, 0))
            self.steps[fork] = (FORK, fork + 1, len(self.steps), 0)
        self.sequence(choice.sequences[-1])
        for jump in jumps:
            self.steps[jump] = (JUMP, len(self.steps), 0, 0)

    def _set(self, set: _Set) -> int:
        low, high = set.ascii & (1 << 64) - 1, set.ascii >> 64
        self.sets.append((low, high, set.classes, set.inverted, list(set.ranges)))
        return len(self.sets) - 1


class _Parser:
    """Reads an expression from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> _Choice:
        choice = self._alternatives(fold=False)
        if self._at < len(self._pattern):
            raise UncoveredPattern("a bracket too many")
        return choice

    def _takes(self, text: str) -> bool:
        """Whether `text` comes next; if so, go past it."""
        if self._pattern.startswith(text, self._at):
            self._at += len(text)
            return True
        return False

    def _next(self) -> str:
        if self._at >= len(self._pattern):
            raise UncoveredPattern("an end in the middle")
        self._at += 1
        return self._pattern[self._at - 1]

    def _alternatives(self, *, fold: bool) -> _Choice:
        sequences = [self._sequence(fold=fold)]
        while self._takes("|"):
            sequences.append(self._sequence(fold=fold))
        return _Choice(tuple(sequences))

    def _sequence(self, *, fold: bool) -> tuple[_Node, ...]:
        begin = self._at
        nodes: list[_Node] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            nodes.append(self._item(fold=fold))
        written = self._pattern[begin : self._at].lower()
        if fold and any(pair in written for pair in _JOINED):
            raise UncoveredPattern(f"{written!r} in any case")
        return tuple(nodes)

    def _item(self, *, fold: bool) -> _Node:
        if self._takes("(?!"):
            unwanted = self._set_of_one(fold=fold)
            self._close()
            return _NotAhead(unwanted)
        for opening, folded in (("(?i:", True), ("(?:", fold), ("(", fold)):
            if self._takes(opening):
                return self._group(fold=folded)
        return self._counted(self._set_of_one(fold=fold))

    def _group(self, *, fold: bool) -> _Choice:
        if self._takes("?"):
            raise UncoveredPattern("a special group")
        self._depth += 1
        if self._depth > _DEEPEST:
            raise UncoveredPattern(f"more than {_DEEPEST} groups within one another")
        inner = self._alternatives(fold=fold)
        self._close()
        self._depth -= 1
        if self._takes("?"):
            inner = _Choice((*inner.sequences, ()))
        if self._pattern[self._at : self._at + 1] in ("*", "+", "{", "?"):
            raise UncoveredPattern("a repeated group")
        return inner

    def _close(self) -> None:
        if not self._takes(")"):
            raise UncoveredPattern("a long lookahead, or an open bracket")

    def _counted(self, set: _Set) -> _Take:
        least, most = self._count()
        if self._pattern[self._at : self._at + 1] in ("*", "+", "{", "?"):
            raise UncoveredPattern("a count that is not greedy")
        return _Take(set, least, most)

    def _count(self) -> tuple[int, int]:
        for sign, counts in (("?", (0, 1)), ("*", (0, _NO_LIMIT)), ("+", (1, _NO_LIMIT))):
            if self._takes(sign):
                return counts
        if not self._takes("{"):
            return 1, 1
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at : max(end, self._at)].partition(",")
        given = low + high
        if not low or not given.isascii() or not given.isdigit() or len(given) > _DIGITS:
            raise UncoveredPattern("a count of another form")
        self._at = end + 1
        least = int(low)
        most = int(high) if high else _NO_LIMIT if comma else least
        if not most >= 1 or not least <= most <= _NO_LIMIT:
            raise UncoveredPattern("an odd count")
        return least, most

    def _set_of_one(self, *, fold: bool) -> _Set:
        letter = self._next()
        if letter == "[":
            if fold:
                raise UncoveredPattern("a set in any case")
            return self._bracket()
        if letter in ".^$?*+{})":
            raise UncoveredPattern(f"{letter!r}")
        found = self._escape() if letter == "\\" else letter
        if isinstance(found, _Set):
            return found
        return _any_case(found) if fold else _one(found)

    def _bracket(self) -> _Set:
        inverted = self._takes("^")
        found = _Set()
        while not self._takes("]"):
            found = found.union(self._member().without_inversion())
        if found == _Set():
            raise UncoveredPattern("an empty set")
        return found.complement() if inverted else found

    def _member(self) -> _Set:
        low = self._letter()
        if isinstance(low, _Set):
            return low
        rest = self._pattern[self._at : self._at + 2]
        if rest[:1] != "-" or rest == "-]":
            return _one(low)
        self._at += 1
        high = self._letter()
        if isinstance(high, _Set) or high < low:
            raise UncoveredPattern("an odd range")
        return _range(ord(low), ord(high))

    def _letter(self) -> str | _Set:
        """A member of a bracket."""
        letter = self._next()
        if letter == "[" or (letter == "&" and self._takes("&")):
            raise UncoveredPattern("a set within a set")
        return self._escape() if letter == "\\" else letter

    def _escape(self) -> str | _Set:
        letter = self._next()
        if letter in "pP" and self._takes("{"):
            name = self._pattern[self._at :].partition("}")[0]
            self._at += len(name) + 1
            return _category(name) if letter == "p" else _category(name).complement()
        if letter in "sS":
            white = _of_classes(1 << WHITE)
            return white if letter == "s" else white.complement()
        if letter == "d":
            return _category("Nd")
        if letter in _ESCAPES:
            return _ESCAPES[letter]
        if letter.isascii() and letter.isalnum():
            raise UncoveredPattern(f"\\{letter}")
        return letter


def _one(letter: str) -> _Set:
    return _range(ord(letter), ord(letter))


def _range(low: int, high: int) -> _Set:
    ascii_bits = sum(1 << code for code in range(low, min(high, 127) + 1))
    return _Set(ascii_bits, ranges=((max(low, 128), high),) if high > 127 else ())


def _any_case(letter: str) -> _Set:
    if not letter.isascii():
        raise UncoveredPattern(f"{letter!r} in any case")
    found = _Set()
    for each in _FOLDS.get(letter.lower(), letter.lower() + letter.upper()):
        found = found.union(_one(each))
    return found


def _category(name: str) -> _Set:
    names = _GROUPS.get(name, (name,))
    # `N` alone stands for the numbers that are no digits.
    if not all(each in CLASSES for each in names):
        raise UncoveredPattern(f"\\p{{{name}}}")
    return _of_classes(sum(1 << CLASSES[each] for each in names))


def _of_classes(classes: int) -> _Set:
    table = character_classes()
    ascii_bits = sum(1 << code for code in range(128) if classes >> table[code] & 1)
    return _Set(ascii_bits, classes)
