"""Samples that many families share: lists of objects between the family's own markers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.text.golden.samples import Call, Cut, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

PARIS: Call = ("get_weather", {"city": "Paris"})
NOW: Call = ("now", {})


class Layout:
    """How one family writes a list of calls."""

    def __init__(
        self, start: str, end: str, *, name: str = "name", arguments: str = "arguments"
    ) -> None:
        self.start = start
        self.plain = start.endswith("[")
        """The start is plain text, with the bracket of the list."""
        self.end = end
        self.name = name
        self.arguments = arguments

    def object(self, name: str, arguments: str) -> str:
        return f'{{"{self.name}": "{name}", "{self.arguments}": {arguments}}}'

    def listed(self, *objects: str) -> str:
        """The list with its start, without its end."""
        opening = "" if self.plain else "["
        return f"{self.start}{opening}{', '.join(objects)}]"

    def calls(self, *objects: str) -> str:
        return self.listed(*objects) + self.end

    @property
    def paris(self) -> str:
        return self.object("get_weather", '{"city": "Paris"}')

    @property
    def now(self) -> str:
        return self.object("now", "{}")

    def samples(self) -> list[Sample]:
        return [*self._whole(), *self._unusual(), *self._broken()]

    def _whole(self) -> Sequence[Sample]:
        paris, now = self.paris, self.now
        return [
            Sample("no call", "It is mild.\n\n[1] {2}", "It is mild.\n\n[1] {2}"),
            Sample("one call", self.calls(paris), "", [PARIS]),
            Sample("two calls", self.calls(paris, now), "", [PARIS, NOW]),
            Sample("without space", self.calls(paris, now).replace(", ", ","), "", [PARIS, NOW]),
            Sample("text before", f"I ask.\n{self.calls(paris)}", "I ask.", [PARIS]),
            Sample("text after", f"{self.calls(now)}\n\nDone.", "Done.", [NOW]),
            Sample("text around", f"One. {self.calls(now)}\nTwo.", "One.\nTwo.", [NOW]),
            Sample("blank space around", f"\n{self.calls(now)}\n \n", "", [NOW]),
            Sample("two lists", self.calls(now) + "\n" + self.calls(paris), "", [NOW, PARIS]),
            Sample(
                "layout",
                self.calls(paris, now).replace("{", "{\n  ").replace(", ", " ,\n "),
                "",
                [PARIS, NOW],
            ),
            Sample("CRLF", self.calls(paris, now).replace(" ", "\r\n"), "", [PARIS, NOW]),
            self._of(
                "unicode and escapes",
                "write_file",
                '{"path": "C:\\\\ü\\/é.txt", "content": "“日本” \\ud83d\\ude00\\n\\t\\"q\\""}',
                {"path": "C:\\ü/é.txt", "content": '“日本” 😀\n\t"q"'},
            ),
            self._of(
                "brackets and markers in strings",
                "write_file",
                f'{{"path": "]}}[{{", "content": "{self.end}{self.start} }}]"}}',
                {"path": "]}[{", "content": f"{self.end}{self.start} }}]"},
            ),
            self._of(
                "nested",
                "plan",
                '{"steps": ["a", "b"], "opt_tree": {"label": "r", "children": [{}, []]},'
                ' "opt_ratio": -2.5e2, "opt_note": null, "opt_any": [true, false]}',
                {
                    "steps": ["a", "b"],
                    "opt_tree": {"label": "r", "children": [{}, []]},
                    "opt_ratio": -250.0,
                    "opt_note": None,
                    "opt_any": [True, False],
                },
            ),
            self._of(
                "raw line breaks in a string",
                "write_file",
                '{"path": "a", "content": "x\n y\r\nz"}',
                {"path": "a", "content": "x\n y\r\nz"},
            ),
        ]

    def _of(self, about: str, name: str, text: str, arguments: dict[str, Any]) -> Sample:
        return Sample(about, self.calls(self.object(name, text)), "", [(name, arguments)])

    def _unusual(self) -> Sequence[Sample]:
        paris, now, key = self.paris, self.now, self.arguments
        return [
            Sample("no list", self.start.removesuffix("[") + now + self.end, "", [NOW])
            if not self.plain
            else Sample("a list in the list", self.start + now + "]", "", [NOW]),
            Sample(
                "other keys",
                self.calls(f'{{"id": "1", "x": [{{}}], {paris[1:-1]}, "y": null}}'),
                "",
                [PARIS],
            ),
            Sample(
                "arguments first",
                self.calls(f'{{"{key}": {{"city": "Paris"}}, "{self.name}": "get_weather"}}'),
                "",
                [PARIS],
            ),
            Sample(
                "arguments as a string",
                self.calls(self.object("get_weather", '"{\\"city\\": \\"Paris\\"}"')),
                "",
                [PARIS],
            ),
            Sample("null", self.calls(self.object("now", "null")), "", [NOW]),
            *self._of_markers(),
        ]

    def _of_markers(self) -> Sequence[Sample]:
        """Calls that only a marker tells from text."""
        if self.plain:
            return []
        cut = self.listed()[:-1] + f'{{"{self.name}": "now", "'
        return [
            Sample("no arguments", self.calls(f'{{"{self.name}": "now"}}'), "", [NOW]),
            Sample("an unknown tool", self.calls(self.object("fly", "{}")), "", [("fly", {})]),
            Sample("an empty list", f"a{self.listed()}{self.end}b", "ab"),
            Sample("cut after the name", cut, "", [("now", Cut(""))]),
        ]

    def _broken(self) -> Sequence[Sample]:
        paris, now = self.paris, self.now
        head = self.listed()[:-1]
        return [
            Sample("the end is missing", self.listed(paris), "", [PARIS]),
            Sample("the bracket is missing", self.listed(paris)[:-1] + self.end, "", [PARIS]),
            Sample("both are missing", self.listed(paris)[:-1], "", [PARIS]),
            Sample("a bracket too many", self.calls(now + "}"), "", [NOW]),
            Sample("a bracket too few", self.calls(paris[:-1]), "", [PARIS]),
            Sample(
                "no JSON", f"{head}{{'name': 'now'}}]{self.end}", self._shown("{'name': 'now'}]")
            ),
            Sample("no name", f'{head}{{"a": 1}}]{self.end}', self._shown('{"a": 1}]')),
            Sample(
                "arguments that are no object",
                self.calls(self.object("now", "[1]")),
                self._shown(self.object("now", "[1]") + "]"),
            ),
            Sample("the second is broken", self.calls(now, "{1}"), "{1}]", [NOW]),
            Sample("words in the list", f"{head}or so]{self.end}", self._shown("or so]")),
            Sample("cut in the start", f"Hm {self.start[:-1]}", f"Hm {self.start[:-1]}"),
            Sample(
                "cut in the key", head + f'{{"{self.name[:2]}', self._shown(f'{{"{self.name[:2]}')
            ),
            Sample(
                "cut in the name",
                head + f'{{"{self.name}": "get_w',
                self._shown(f'{{"{self.name}": "get_w'),
            ),
            Sample(
                "cut in the arguments",
                head + self.object("get_weather", '{"city": "Par')[:-1],
                "",
                [("get_weather", Cut('{"city": "Par'))],
            ),
            Sample("cut before the end", f"{self.listed(now)}{self.end[:-1]}", "", [NOW]),
        ]

    def _shown(self, text: str) -> str:
        """What is shown of a list that is none."""
        return self.start + text if self.plain else f"[{text}"

    def pieces(self) -> list[str]:
        found = [self.start, self.end, self.object("now", "{")[:-1], f'"{self.name}"', "now"]
        return [each for each in found if each]

    def long_calls(self) -> dict[str, str]:
        return {
            "call": self.calls(self.object("now", '{"a": "%s"}')),
            "content": "%s",
            "blank": self.calls(self.now) + "%s",
            "no call": self.listed('{"a": "%s"}'),
        }
