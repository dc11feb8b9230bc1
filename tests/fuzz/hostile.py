"""Requests of some kilobytes that ask for as much work as they can: drawn from a seed.

What costs a server is structure: references that lead back to themselves, lists in lists, unions of
unions, the same again and again, patterns, numbers and names of the worst kind. Every endpoint that
plans gets them, in every place where a client may send a schema or a list of anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pdserve.text.tool_parsers import ALIASES, TOOL_PARSERS

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

__all__ = ["FORMATS", "LARGEST", "OTHER_FORMATS", "Case", "draw"]

LARGEST = 4096
"""Bytes of one body, about."""
FORMATS = ("hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral")
"""Of tool calls; each is also the name of a model that writes them so."""
OTHER_FORMATS = tuple(sorted(set(TOOL_PARSERS) - set(ALIASES) - set(FORMATS)))
"""They share most of their work with those above, so they are drawn less often."""
PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/route",
    "/tokenize",
    "/api/chat",
    "/api/generate",
    "/v1/embeddings",
    "/v1/rerank",
    "/v1/score",
    "/invocations",
)
NAMES = ("x", "a", "é😀", "x/y~z", "", "\u2028", "</tool_call>", "'\"\\", "x" * 60, "required")
TEXTS = ("", "x", "é😀", "a" * 300, "\\" * 60, '"' * 60, "{" * 200, "<" * 60, "\n" * 99, "0" * 300)
NUMBERS = (0, 1, -1, 7, 1000003, 10**9, 2**53, 1e300, 1e-300, 0.1, 10**18 + 9)
PATTERNS = (
    "(a+)+$",
    "(x{1,1000}){1,1000}",
    "[^a]*a[^b]{999}",
    "a|b|" * 20,
    "(" * 50,
    "\\d{5,9999}",
)


@dataclass(frozen=True)
class Case:
    """One request, and what the model answers it with."""

    path: str
    body: dict[str, Any]
    says: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.path} {self.headers or ''} {json.dumps(self.body)[: 2 * LARGEST]}"


def draw(chance: Random) -> Case:
    """The next request."""
    path, scale = chance.choice(PATHS), 1.0
    while True:
        case = _case(chance, path, scale)
        if len(json.dumps(case.body)) <= LARGEST:
            return case
        scale *= 0.7


def _case(chance: Random, path: str, scale: float) -> Case:
    make = _Bodies(chance, _Schemas(chance, scale))
    body: dict[str, Any] = {"model": _format(chance)} | make.body(path)
    headers = {}
    if chance.random() < 0.03:
        headers["x-pdserve-slo-ttft-ms"] = "1" * chance.randrange(1, 4000) + "x"
    if chance.random() < 0.03:
        headers["x-pdserve-worker"] = ",".join(["!w"] * chance.randrange(1, 300))
    return Case(path, body, make.says(body["model"]), headers)


def _format(chance: Random) -> str:
    return chance.choice(FORMATS if chance.random() < 0.7 else OTHER_FORMATS)


class _Schemas:
    """Schemas of one request."""

    def __init__(self, chance: Random, scale: float) -> None:
        """`scale`: 1 or less, for smaller ones."""
        self._chance = chance
        self._scale = scale
        self._depth = 1 + int(3 * scale)

    def parameters(self) -> Any:
        """What a tool takes."""
        chance = self._chance
        names = [*chance.sample(NAMES[1:], self._many(2)), "x"]
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self.schema() for name in names},
        }
        if chance.random() < 0.5:
            schema["required"] = chance.choices([*names, "nowhere", 7], k=self._many(40))
        if chance.random() < 0.3:
            schema["$defs"] = {name: self.schema() for name in names}
        if chance.random() < 0.2:
            schema["additionalProperties"] = chance.choice([True, False, self.schema()])
        return schema if chance.random() < 0.95 else chance.choice([{}, {"$ref": "#"}, schema])

    def schema(self) -> Any:
        """Any of the worst."""
        chance = self._chance
        kinds: list[Callable[[], Any]] = [
            *(self._circle, self._circle, self._lists, self._lists, self._mesh, self._union),
            *(self._values, self._limits, self._deep, self._strange, self._plain),
        ]
        return chance.choice(kinds)()

    def _many(self, most: int) -> int:
        return self._chance.randrange(1, 2 + int(most * self._scale))

    def _reference(self) -> dict[str, str]:
        chance = self._chance
        name = chance.choice(NAMES).replace("~", "~0").replace("/", "~1")
        places = [f"#/properties/{name}", f"#/$defs/{name}", "#/properties/x", "#/$defs/x"]
        return {"$ref": chance.choice([*places, "#", "#/", "#" + "/a" * self._many(400), "x"])}

    def _circle(self) -> Any:
        """References to itself, or to what refers to it."""
        key = self._chance.choice(["anyOf", "oneOf", "allOf"])
        return {
            key: [self._chance.choice([{"$ref": "#/properties/x"}, self._reference()])]
            * self._many(40)
        }

    def _lists(self) -> Any:
        """Lists in lists; what is listed is listed twice."""
        chance = self._chance
        schema: Any = chance.choice([{"type": "string"}, self._reference(), {}])
        kinds = chance.choice(["array", ["array"] * self._many(9), ["array", "object", "null"]])
        for _ in range(chance.randrange(1, 50)):
            schema = {"type": kinds, "items": schema} | chance.choice([{}, {"minItems": 1}])
        return schema

    def _mesh(self) -> Any:
        """Properties of which each refers to all."""
        names = [f"p{number}" for number in range(self._many(12))]
        all_of_them = [{"$ref": f"#/properties/x/properties/{name}"} for name in names]
        return {"type": "object", "properties": {name: {"anyOf": all_of_them} for name in names}}

    def _union(self) -> Any:
        """Unions of unions."""
        chance = self._chance
        schema: Any = chance.choice([{"type": "integer"}, self._reference()])
        for _ in range(self._many(5)):
            schema = {chance.choice(["anyOf", "oneOf", "allOf"]): [schema] * self._many(4)}
        return schema

    def _values(self) -> Any:
        chance = self._chance
        values: list[Any] = [*TEXTS, *NUMBERS, None, True, [[]], {"a": {}}]
        found = [chance.choice(values)] * self._many(50) + chance.choices(values, k=self._many(9))
        return chance.choice([{"enum": found}, {"const": found}, {"enum": 7}, {"enum": {"a": 1}}])

    def _limits(self) -> Any:
        chance = self._chance
        words = ("minLength", "maxLength", "minItems", "maxItems", "multipleOf", "minimum")
        limits = {chance.choice(words): chance.choice(NUMBERS) for _ in range(3)}
        kind = chance.choice(["string", "array", "integer", "number", ["string"] * 40, 7])
        return limits | {"type": kind, "pattern": chance.choice(PATTERNS)}

    def _deep(self) -> Any:
        schema: Any = self._plain()
        for _ in range(self._many(90)):
            schema = {"properties": {"a": schema}} if self._depth % 2 else {"not": schema}
        return schema

    def _strange(self) -> Any:
        """What is no schema, or hardly."""
        odd: tuple[Any, ...] = (
            True,
            False,
            None,
            7,
            [],
            "x",
            {"type": 7},
            {"anyOf": {}},
            {"items": [{}]},
            [[{}]],
        )
        return self._chance.choice([*odd, {"properties": []}, {"$ref": 7}, {"required": {"a": 1}}])

    def _plain(self) -> Any:
        if self._depth and self._chance.random() < 0.5:
            self._depth -= 1
            return {"type": "object", "properties": {"a": self.schema(), "b": self.schema()}}
        return {"type": self._chance.choice(["string", "integer", "boolean", "null", "object"])}


class _Bodies:
    """Bodies for each endpoint."""

    def __init__(self, chance: Random, schemas: _Schemas) -> None:
        self._chance = chance
        self._schemas = schemas
        self._tools = [self._tool(place) for place in range(chance.choice([0, 1, 1, 1, 2]))]

    def body(self, path: str) -> dict[str, Any]:
        """One for this endpoint."""
        chance = self._chance
        if path == "/v1/completions":
            return self._common() | {"prompt": self._prompt()}
        if path.startswith("/v1/responses"):
            return self._responses()
        if path.startswith("/v1/messages"):
            return self._messages() | ({} if "count" in path else {"max_tokens": 100})
        if path.startswith("/api/"):
            return self._ollama(chat=path == "/api/chat")
        if path == "/v1/embeddings":
            return {"messages": self._turns()} | self._template()
        if path in ("/v1/rerank", "/v1/score"):
            return self._pairs("query" if path == "/v1/rerank" else "queries")
        if path == "/tokenize":
            return {"messages": self._turns()} | self._template()
        if path == "/route" and chance.random() < 0.2:
            return self._common() | {"prompt": self._prompt()}
        called = self._called()
        common = {} if called and chance.random() < 0.7 else self._common()
        return common | {"messages": self._turns()} | self._template() | called

    def _pairs(self, first: str) -> dict[str, Any]:
        """A query and many documents, or few long ones."""
        chance = self._chance
        text = chance.choice(TEXTS) or "x"
        document = chance.choice([text, {"text": text}])
        some = {
            "instruction": text,
            "max_tokens_per_doc": chance.choice([1, 9]),
            "truncate_prompt_tokens": chance.choice([-1, 1, 60]),
            "no such field": self._schemas.schema(),
        }
        body = {
            first: chance.choice(TEXTS) or "x",
            "documents": [document] * chance.randrange(1, 400),
        }
        fields = {name: some[name] for name in chance.sample(sorted(some), 2)}
        return body | fields | (self._template() if chance.random() < 0.5 else {})

    def says(self, format: str) -> str:
        """An answer that calls a tool, with values that are hard to read."""
        chance = self._chance
        values = ("[[" * 200, "{'a': None}" * 30, "1" * 400, "[" + "-1," * 150 + "]", "\\" * 300)
        value = chance.choice([*values, *TEXTS])
        if format == "qwen3_coder":
            inner = f"<parameter=x>\n{value}\n</parameter>\n" * chance.randrange(1, 6)
            return f"<tool_call>\n<function=f0>\n{inner}</function>\n</tool_call>"
        if format == "pythonic":
            return f"[f0(x={value}), f0(x='{value}')]"
        key = "parameters" if format == "llama3_json" else "arguments"
        call = f'{{"name": "f0", "{key}": {{"x": {json.dumps(value)}, "y": {value}}}}}'
        around = {"hermes": ("<tool_call>\n", "\n</tool_call>"), "mistral": ("[TOOL_CALLS][", "]")}
        before, after = around.get(format, ("", ""))
        return before + call + after

    def _tool(self, place: int) -> dict[str, Any]:
        strict = self._chance.choice([None, True, False])
        spec = {"name": f"f{place}", "parameters": self._schemas.parameters(), "strict": strict}
        return {"type": "function", "function": spec}

    def _called(self) -> dict[str, Any]:
        if not self._tools:
            return {}
        named = {"type": "function", "function": {"name": "f0"}}
        choice = self._chance.choice(
            [None, "auto", "none", "required", "required", "required", named]
        )
        return {"tools": self._tools, "tool_choice": choice}

    def _common(self) -> dict[str, Any]:
        """Fields that both kinds of completions have."""
        chance = self._chance
        some: dict[str, Any] = {
            "n": 3,
            "stop": chance.sample(["ab" * 60, "a" * 120, "é", "{", "x" * 99 + "y"], 3),
            "logit_bias": {str(token): 1 for token in range(chance.randrange(99))},
            "stop_token_ids": [9] * 128,
            "repetition_detection": {"max_pattern_size": 1024, "min_count": 999},
            "echo": True,
            "stream": True,
            "truncate_prompt_tokens": 9,
            "no such field": self._schemas.schema(),
        }
        wishes: list[dict[str, Any]] = [
            {"structured_outputs": self._structured()},
            {"response_format": self._format()},
            {"allowed_token_ids": [5] * chance.randrange(1, 300)},
            {"bad_words": ["x" * chance.randrange(1, 200)] * chance.randrange(1, 9)},
            {},
        ]
        fields = chance.choice(wishes) | {"max_tokens": chance.choice([4, 400])}
        return fields | {name: some[name] for name in chance.sample(sorted(some), 2)}

    def _format(self) -> dict[str, Any]:
        named = {"name": "n", "schema": self._schemas.parameters()}
        return self._chance.choice(
            [{"type": "json_object"}, {"type": "json_schema", "json_schema": named}, self._tagged()]
        )

    def _tagged(self) -> dict[str, Any]:
        count = self._chance.randrange(1, 20)
        triggers = [f"<{number:02}" for number in range(count)]
        structures = [{"begin": each, "schema": {}, "end": ">"} for each in triggers]
        return {"type": "structural_tag", "triggers": triggers, "structures": structures}

    def _structured(self) -> dict[str, Any]:
        chance = self._chance
        return chance.choice(
            [
                {"json": self._schemas.parameters(), "disable_additional_properties": True},
                {"json": json.dumps(self._schemas.parameters())},
                {"regex": chance.choice(PATTERNS)},
                {"choice": [chance.choice(TEXTS)] * chance.randrange(1, 40)},
                {"grammar": "start: " + "(" * chance.randrange(1, 99) + '"a"'},
                {"structural_tag": json.dumps(self._tagged())},
            ]
        )

    def _prompt(self) -> Any:
        chance = self._chance
        ids = [chance.randrange(99) for _ in range(chance.randrange(1, 600))]
        return chance.choice([*TEXTS[1:], ids, ids, [ids[:9]] * 9, ["a"] * 9, [[]], ["a", 1]])

    def _text(self) -> str:
        return self._chance.choice(TEXTS) * self._chance.randrange(1, 4)

    def _turns(self) -> list[dict[str, Any]]:
        chance = self._chance
        arguments = chance.choice(["{}", '{"a":' * 50 + "1" + "}" * 50, "[" * 300, self._text()])
        call = {"function": {"name": "f0", "arguments": arguments}, "id": "c" * 9}
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": self._text()},
            {"role": "user", "content": [{"type": "text", "text": "a"}] * chance.randrange(1, 30)},
            {"role": "assistant", "content": "", "tool_calls": [call] * chance.randrange(1, 9)},
            {"role": "assistant", "content": "", "reasoning": self._text()},
            {"role": "tool", "content": self._text(), "tool_call_id": self._text()},
        ]
        return [*chance.choices(turns, k=chance.randrange(1, 9)), turns[0]]

    def _template(self) -> dict[str, Any]:
        """What is handed to the template."""
        chance = self._chance
        kwargs: dict[str, Any] = {
            "custom_tools": [self._schemas.schema()] * chance.randrange(1, 9),
            "loops": [[[]] * 20] * chance.randrange(1, 20),
            "enable_thinking": False,
        }
        some: dict[str, Any] = {
            "chat_template_kwargs": kwargs,
            "documents": [{"title": self._text(), "text": self._schemas.schema()}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        }
        return {name: some[name] for name in chance.sample(sorted(some), chance.randrange(3))}

    def _responses(self) -> dict[str, Any]:
        chance = self._chance
        summary = [{"type": "summary_text", "text": "a"}] * chance.randrange(3)
        items: list[dict[str, Any]] = [
            {"role": "user", "content": self._text()},
            {"type": "reasoning", "summary": summary},
            {"type": "function_call", "name": "f0", "call_id": "c", "arguments": self._text()},
            {"type": "function_call_output", "call_id": "c", "output": self._text()},
            {"role": "assistant", "content": [{"type": "output_text", "text": "a"}] * 9},
        ]
        functions = [{"type": "function"} | tool["function"] for tool in self._tools]
        space = {"type": "namespace", "name": "n", "description": "d" * 300, "tools": functions}
        fields: dict[str, Any] = {"input": chance.choices(items, k=chance.randrange(1, 30))}
        if functions:
            fields["tools"] = chance.choice([functions, [*functions, space]])
            allowed = [{"type": "function", "name": "f0"}] * 20
            by_name = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
            fields["tool_choice"] = chance.choice([None, "required", "auto", by_name])
        else:
            schema = self._schemas.parameters()
            fields["text"] = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
        return fields | {"max_output_tokens": 200, "stream": chance.choice([True, False])}

    def _ollama(self, *, chat: bool) -> dict[str, Any]:
        chance = self._chance
        called = {"function": {"name": "f0", "arguments": {"a": self._schemas.schema()}}}
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": self._text()},
            {"role": "assistant", "tool_calls": [called] * chance.randrange(1, 9)},
            {"role": "tool", "content": self._text(), "tool_name": chance.choice(["f0", "x"])},
        ]
        options = {"num_predict": 200, "stop": chance.choice([None, ["x" * 100] * 9])}
        fields: dict[str, Any] = {"options": options, "stream": chance.choice([True, False])}
        fields["think"] = chance.choice([None, True, False, "low"])
        if not chat:
            text = {"prompt": self._text() or "x", "raw": chance.choice([True, False])}
            return fields | text | {"format": self._schemas.parameters()}
        format = {"tools": self._tools} if self._tools else {"format": self._schemas.parameters()}
        return fields | format | {"messages": chance.choices(turns, k=chance.randrange(1, 30))}

    def _messages(self) -> dict[str, Any]:
        chance = self._chance
        use = {"type": "tool_use", "id": "c", "name": "f0", "input": {"a": self._schemas.schema()}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": self._text()}
        think = {"type": "thinking", "thinking": self._text(), "signature": ""}
        said = {"type": "text", "text": "a"}
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": self._text() or "x"},
            {"role": "user", "content": [result, said] * chance.randrange(1, 9)},
            {"role": "assistant", "content": [think, said, use] * chance.randrange(1, 9)},
        ]
        tools = [
            {
                "name": tool["function"]["name"],
                "input_schema": tool["function"]["parameters"],
                "strict": tool["function"]["strict"],
            }
            for tool in self._tools
        ]
        said_so_far = chance.choices(turns, k=chance.randrange(1, 9))
        fields: dict[str, Any] = {"messages": [*said_so_far, turns[0]]}
        if tools:
            choice = chance.choice(["auto", "any", "none"])
            fields |= {"tools": tools, "tool_choice": {"type": choice}}
        return fields | {"stop_sequences": [self._text() or "s"]}
