"""Parts are joined where one goes on with the other."""

from __future__ import annotations

from pdserve.text.output_parts import (
    ContentDelta,
    OutputPart,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_parts,
)


def test_neighbours_of_one_kind_are_joined():
    parts: list[OutputPart] = [
        *(ReasoningDelta("a"), ReasoningDelta("b"), ContentDelta("c"), ContentDelta("d")),
        *(
            ToolCallStart(0, "f"),
            ToolCallArguments(0, "{"),
            ToolCallArguments(0, "}"),
            ToolCallStart(1, "g"),
        ),
        *(
            ToolCallStart(2, "h"),
            ToolCallArguments(2, "{}"),
            ToolCallArguments(3, "{}"),
            ContentDelta("e"),
        ),
    ]
    assert merge_parts(parts) == [
        *(
            ReasoningDelta("ab"),
            ContentDelta("cd"),
            ToolCallStart(0, "f"),
            ToolCallArguments(0, "{}"),
        ),
        *(ToolCallStart(1, "g"), ToolCallStart(2, "h"), ToolCallArguments(2, "{}")),
        *(ToolCallArguments(3, "{}"), ContentDelta("e")),
    ]
    assert merge_parts([]) == []
