"""Reads text that arrives in pieces: the base of `reasoning_parsers/` and `tool_parsers/`.

A reader keeps only text that it cannot judge yet, so the cost does not depend on where the text is
cut. Its states are methods: each looks at the text from `at`, moves `at` past what it understood
and returns whether to go on. A state that more text could change must wait (return False and keep
`at`); otherwise the result would depend on the cuts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable

    from pdserve.text.output_parts import OutputPart

    State = Callable[[], bool]

_LONGEST: Final = 32
"""Maximum length of a marker in characters."""


def partial_marker_length(text: str, markers: Iterable[str], at: int = 0) -> int:
    """Return the length of an incomplete marker at the end of `text[at:]`; 0 if there is none."""
    most = 0
    room = len(text) - at
    for marker in markers:
        size = min(len(marker) - 1, room)
        while size > most and not text.endswith(marker[:size]):
            size -= 1
        most = max(most, size)
    return most


class IncrementalReader:
    """Holds the text that is not judged yet, and the state that judges it next."""

    __slots__ = ("at", "last", "parts", "state", "text")

    def __init__(self, state: State) -> None:
        self.state = state
        """Reads `text` from `at`. Returns True if there may be more to do, False if it needs
        more text; once `last` is set, it has read everything."""
        self.text = ""
        self.at = 0
        self.last = False
        self.parts: list[OutputPart] = []

    @property
    def in_reasoning(self) -> bool:
        return False

    @property
    def settled(self) -> bool:
        return False

    def feed(self, text: str) -> list[OutputPart]:
        self.text = self.text[self.at :] + text
        self.at = 0
        return self._run()

    def finish(self) -> list[OutputPart]:
        self.last = True
        parts = self._run()
        self.text = ""
        self.at = 0
        return parts

    def settle(self) -> list[OutputPart]:
        """Judge what is held back as if the text ended here; then go on."""
        self.last = True
        parts = self._run()
        self.last = False
        return parts

    def _run(self) -> list[OutputPart]:
        while self.state():
            pass
        parts, self.parts = self.parts, []
        return parts

    def turn(self, state: State) -> bool:
        """Continue from `at` with `state`; return True."""
        self.state = state
        return True

    def skip_blank(self) -> bool:
        """Move past whitespace; return whether other text follows."""
        text, at = self.text, self.at
        while at < len(text) and text[at].isspace():
            at += 1
        self.at = at
        return at < len(text)

    def meets(self, markers: Iterable[str], at: int | None = None) -> str | None:
        """Return the marker at `at`; "" if there is none; None if more text may complete one."""
        text = self.text
        at = self.at if at is None else at
        rest = text[at : at + _LONGEST]
        waits = False
        for marker in markers:
            if rest.startswith(marker):
                return marker
            waits = waits or (len(rest) < len(marker) and marker.startswith(rest))
        return None if waits and not self.last else ""

    def ends_in_half(self, markers: Iterable[str], at: int | None = None) -> bool:
        """Return True if the text has ended and its rest is an incomplete marker."""
        at = self.at if at is None else at
        rest = self.text[at : at + _LONGEST]
        return self.last and bool(rest) and any(each.startswith(rest) for each in markers)

    def drop_half(self, markers: Iterable[str]) -> None:
        """Drop an incomplete marker at the end of the text, inside of markup."""
        if self.ends_in_half(markers):
            self.at = len(self.text)

    def seek(self, pattern: re.Pattern[str], markers: Iterable[str]) -> tuple[str, str]:
        """Return the text before the next match of `pattern`, and the match; move past both.

        Without a match: all the text that cannot belong to one of `markers`, and "".
        """
        begin = self.at
        found = pattern.search(self.text, begin)
        if found is not None:
            self.at = found.end()
            return self.text[begin : found.start()], found[0]
        self.at = len(self.text) - (
            0 if self.last else partial_marker_length(self.text, markers, begin)
        )
        return self.text[begin : self.at], ""


class WhitespaceBuffer:
    """Holds back whitespace around shown text until more text follows it."""

    __slots__ = ("_bare", "_before", "_held", "_trims")

    def __init__(self, *, bare: bool) -> None:
        """`bare`: whitespace at both ends of the text is not shown."""
        self._bare = bare
        self._trims = bare
        self._held: list[str] = []
        self._before = ""
        """The whitespace before markup; shown if there is none after it."""

    def add(self, text: str) -> str:
        """Add text; return what can be shown now."""
        bare = text.rstrip()
        shown = ""
        if bare:
            shown = self._join(bare)
            self._held.clear()
        if len(bare) < len(text):
            self._held.append(text[len(bare) :])
        return shown

    def _join(self, text: str) -> str:
        if self._bare:
            self._bare = False
            self._before = ""
            return text.lstrip()
        inside = text.lstrip()
        space = "".join(self._held) + text[: len(text) - len(inside)]
        space, self._before = space or self._before, ""
        return space + inside

    def markup(self, *, first: bool) -> None:
        """Note that markup follows. From here on whitespace at the end is not shown; if the markup
        comes `first`, none so far is."""
        self._trims = True
        self._bare = self._bare or first
        self._before = self._before or "".join(self._held)
        self._held.clear()

    def flush(self) -> str:
        """End the text; return the whitespace to show at its end."""
        held = "" if self._trims else "".join(self._held)
        self._held.clear()
        return held
