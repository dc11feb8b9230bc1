"""Reading text that comes in pieces: the machinery under `reasoning.py` and `tools/`.

A reader keeps only what it cannot judge yet, so that a text costs the same however it is cut. Its
states are methods: each looks at the text from `at` on, moves `at` past what it has understood and
says whether to go on. A state that could judge more with more text must wait for it (return False
and leave `at`), or the answer would depend on where the text was cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable

    from pdserve.text.parts import Part

    State = Callable[[], bool]

_LONGEST: Final = 32
"""Characters; no marker is longer."""


def overlap(text: str, markers: Iterable[str], at: int = 0) -> int:
    """Characters at the end of `text[at:]` that some marker begins with, short of a whole one."""
    most = 0
    room = len(text) - at
    for marker in markers:
        size = min(len(marker) - 1, room)
        while size > most and not text.endswith(marker[:size]):
            size -= 1
        most = max(most, size)
    return most


class Reader:
    """The text that is still to be judged, and the state that judges it next."""

    __slots__ = ("at", "last", "parts", "state", "text")

    def __init__(self, state: State) -> None:
        self.state = state
        """Looks at `text` from `at` on. True: there may be more to do. False: not without more
        text; once `last`, it has taken all there was."""
        self.text = ""
        self.at = 0
        self.last = False
        self.parts: list[Part] = []

    @property
    def in_reasoning(self) -> bool:
        return False

    @property
    def settled(self) -> bool:
        return False

    def feed(self, text: str) -> list[Part]:
        self.text = self.text[self.at :] + text
        self.at = 0
        return self._run()

    def finish(self) -> list[Part]:
        self.last = True
        parts = self._run()
        self.text = ""
        self.at = 0
        return parts

    def _run(self) -> list[Part]:
        while self.state():
            pass
        parts, self.parts = self.parts, []
        return parts

    def turn(self, state: State) -> bool:
        """`state` goes on from `at`."""
        self.state = state
        return True

    def skip_blank(self) -> bool:
        """Move past blank space; whether anything else is there."""
        text, at = self.text, self.at
        while at < len(text) and text[at].isspace():
            at += 1
        self.at = at
        return at < len(text)

    def meets(self, markers: Iterable[str], at: int | None = None) -> str | None:
        """The marker that stands at `at`; "" if none can; None if more text may complete one."""
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
        """The text has ended, and all that is left of it is the beginning of a marker."""
        at = self.at if at is None else at
        rest = self.text[at : at + _LONGEST]
        return self.last and bool(rest) and any(each.startswith(rest) for each in markers)

    def drop_half(self, markers: Iterable[str]) -> None:
        """Inside of markup, a marker that only began is no text."""
        if self.ends_in_half(markers):
            self.at = len(self.text)

    def seek(self, pattern: re.Pattern[str], markers: Iterable[str]) -> tuple[str, str]:
        """The text up to the next match of `pattern`, and the match; the reader moves past both.

        Without one: all the text that cannot belong to one of the `markers` that it looks for.
        """
        begin = self.at
        found = pattern.search(self.text, begin)
        if found is not None:
            self.at = found.end()
            return self.text[begin : found.start()], found[0]
        self.at = len(self.text) - (0 if self.last else overlap(self.text, markers, begin))
        return self.text[begin : self.at], ""


class Layout:
    """Blank space around pieces of shown text: kept back until text follows that it sets apart."""

    __slots__ = ("_bare", "_before", "_held", "_trims")

    def __init__(self, *, bare: bool) -> None:
        """`bare`: blank space at both ends is not shown."""
        self._bare = bare
        self._trims = bare
        self._held: list[str] = []
        self._before = ""
        """The space before markup; shown if there is none after it."""

    def add(self, text: str) -> str:
        """What is to be shown now that `text` has come."""
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
        """Markup follows. Blank space at the end is not shown from here on; nor is any so far if
        the markup comes `first`."""
        self._trims = True
        self._bare = self._bare or first
        self._before = self._before or "".join(self._held)
        self._held.clear()

    def flush(self) -> str:
        """The text has ended: the space at its end."""
        held = "" if self._trims else "".join(self._held)
        self._held.clear()
        return held
