"""Conversations as clients send them, to be rendered by many templates.

Each text has a word in capitals, by which a rendering shows whether the text came through.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Conversation:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    generation: bool = True
    continued: bool = False
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The words that a template may show."""
        texts = [text for message in self.messages for text in _texts(message)]
        return [word for text in texts for word in re.findall(r"[A-Z]{5,}", text)]

    @property
    def called(self) -> list[str]:
        """The words in arguments of calls."""
        calls = [call for message in self.messages for call in message.get("tool_calls", ())]
        return [
            word
            for call in calls
            for word in re.findall(r"[A-Z]{5,}", call["function"]["arguments"])
        ]


def _texts(message: dict[str, Any]) -> list[str]:
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return [
        *texts,
        message.get("reasoning_content", ""),
        *(call["function"]["arguments"] for call in message.get("tool_calls", ())),
    ]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def calling(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", **more, "tool_calls": list(calls)}


def call(number: int, name: str, arguments: str) -> dict[str, Any]:
    # Mistral's templates accept only ids of nine characters.
    function = {"name": name, "arguments": arguments}
    return {"id": f"callcall{number}", "type": "function", "function": function}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter & <b>météo</b>, the 'weather' 天气",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "A city's name"},
                "unit": {"type": "string", "enum": ["c", "f"]},
            },
            "required": ["city"],
        },
    },
}
STOP = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "nights": {"type": "integer", "minimum": 1}},
    "required": ["place"],
}
NESTED = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Books a trip",
        "parameters": {
            "type": "object",
            "properties": {
                "trip": {
                    "type": "object",
                    "properties": {
                        "stops": {"type": "array", "items": STOP},
                        "class": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    },
                    "required": ["stops"],
                },
                "dry_run": {"type": "boolean", "default": False},
            },
            "required": ["trip"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, NESTED]

SYSTEM = said("system", "The SYSTEM says: be brief.")
USER = said("user", "A USERS question: is 1 < 2?")
ANSWER = said("assistant", "The ANSWER is yes.")
AGAIN = said("user", "And AGAIN?")
ONE = call(1, "get_weather", '{"city": "KOELN", "unit": "c"}')
TWO = call(2, "book", '{"trip": {"stops": [{"place": "BERNE", "nights": 2}]}, "dry_run": true}')
SUNNY = said("tool", "SUNNY, 12 °C", tool_call_id="callcall1", name="get_weather")
BOOKED = said("tool", '{"BOOKED": true}', tool_call_id="callcall2", name="book")

CONVERSATIONS = {
    "user": Conversation([USER]),
    "system": Conversation([SYSTEM, USER]),
    "developer": Conversation([said("developer", "The SYSTEM says: be brief."), USER]),
    "turns": Conversation([SYSTEM, USER, ANSWER, AGAIN]),
    "named": Conversation([{**USER, "name": "alice"}, ANSWER, AGAIN]),
    "unicode": Conversation(
        [said("user", "  USERS \u2028 naïve 日本語 🙂 <|im_end|> {{ x }}\n\n")]
    ),
    "no generation prompt": Conversation([SYSTEM, USER, ANSWER], generation=False),
    "continued": Conversation(
        [SYSTEM, USER, said("assistant", "The ANSWER is ")], generation=False, continued=True
    ),
    "parts": Conversation(
        [
            SYSTEM,
            said("user", parts("The FIRST part", "the SECOND")),
            ANSWER,
            said("user", parts("a THIRD")),
        ]
    ),
    "documents": Conversation([USER], documents=[{"title": "A", "text": "b"}, {"text": "c"}]),
    "thinking": Conversation([SYSTEM, USER], kwargs={"enable_thinking": True}),
    "no thinking": Conversation([USER], kwargs={"enable_thinking": False, "thinking": False}),
    "effort": Conversation([USER], kwargs={"reasoning_effort": "low"}),
    "reasoning": Conversation([USER, {**ANSWER, "reasoning_content": "A THOUGHT"}, AGAIN]),
    "tools": Conversation([SYSTEM, USER], TOOLS),
    "call, null content": Conversation([USER, calling(ONE, content=None), SUNNY], TOOLS),
    "call, empty content": Conversation([SYSTEM, USER, calling(ONE, content=""), SUNNY], TOOLS),
    "call, no tools": Conversation([USER, calling(ONE), SUNNY]),
    "call behind text": Conversation(
        [SYSTEM, USER, calling(ONE, content="WAITING"), SUNNY, ANSWER, AGAIN], TOOLS
    ),
    "call behind reasoning": Conversation(
        [USER, calling(ONE, content=None, reasoning_content="A THOUGHT"), SUNNY], TOOLS
    ),
    "call at the end": Conversation([USER, calling(ONE, content=None)], TOOLS, generation=False),
    "parallel calls": Conversation(
        [SYSTEM, USER, calling(ONE, TWO, content=None), SUNNY, BOOKED], TOOLS
    ),
    "many calls": Conversation(
        [
            USER,
            calling(ONE, content=None),
            SUNNY,
            calling(TWO, content=None),
            BOOKED,
            ANSWER,
            AGAIN,
        ],
        TOOLS,
    ),
    "result in parts": Conversation(
        [USER, calling(ONE), {**SUNNY, "content": parts("SUNNY", "WARMER")}], TOOLS
    ),
}
