"""Parts are joined where one goes on with the other."""

from __future__ import annotations

from pdserve.text.parts import CallArguments, CallBegin, Content, Part, Reasoning, merged


def test_neighbours_of_one_kind_are_joined():
    parts: list[Part] = [
        *(Reasoning("a"), Reasoning("b"), Content("c"), Content("d")),
        *(CallBegin(0, "f"), CallArguments(0, "{"), CallArguments(0, "}"), CallBegin(1, "g")),
        *(CallBegin(2, "h"), CallArguments(2, "{}"), CallArguments(3, "{}"), Content("e")),
    ]
    assert merged(parts) == [
        *(Reasoning("ab"), Content("cd"), CallBegin(0, "f"), CallArguments(0, "{}")),
        *(CallBegin(1, "g"), CallBegin(2, "h"), CallArguments(2, "{}")),
        *(CallArguments(3, "{}"), Content("e")),
    ]
    assert merged([]) == []
