"""Chooses and compiles the grammar of an answer, and finds where its reasoning ends.

`response_format`, `structured_outputs` and required or strict tools give at most one grammar. It is
compiled here against the model's vocabulary, so an engine never gets a grammar it cannot follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from pdserve.errors import InvalidRequest
from pdserve.frontend.preprocess.text_cost import MIN_STRUCTURED_CHARS
from pdserve.messages.grammar_limits import MAX_GRAMMAR
from pdserve.messages.request import Thinking
from pdserve.protocols.completion_requests import ChatRequest, NamedTool, TaggedStructure
from pdserve.text.grammar.grammar_source import (
    DEFAULT_JSON_STYLE,
    GrammarSource,
    JsonStyle,
    after,
    any_of,
    from_choice,
    from_grammar,
    from_regex,
    from_schema,
    from_tags,
)
from pdserve.text.tool_parsers.tool_call_grammar import (
    llguidance_schema,
    parameters,
    parameters_field,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pdserve.frontend.model_registry import PreparedModel
    from pdserve.frontend.preprocess.input_processor import PlanContext
    from pdserve.protocols.completion_requests import (
        GenerationRequest,
        ResponseFormat,
        StructuredOutputs,
        Tool,
    )

__all__ = ["grammar_of", "grammar_source_of", "thinking_of"]

_MOST_BLAMED = 16
"""Most tools that are compiled one by one to find the wrong one: each takes time."""
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


async def grammar_of(request: GenerationRequest, context: PlanContext) -> str:
    """The grammar of the answer; empty: anything is allowed.

    Errors: `InvalidRequest` that names the field and the place in it, `Overloaded`, `Unavailable`.
    """
    model = context.model
    source = await context.pool.run(_work(request), grammar_source_of, request, model)
    if source is None:
        return ""
    if "grammar" not in model.card.features:
        raise InvalidRequest(
            f"'{source.param}': the engine of '{model.card.name}' follows no grammars",
            param=source.param,
        )
    for field in ("allowed_token_ids", "bad_words"):
        if getattr(request, field) is not None:
            raise InvalidRequest(
                f"'{field}' and '{source.param}' exclude each other: leave one of them out",
                param=field,
            )
    compiling = context.pool.compile_grammar(model.tokenizer, model.card.vocab_size, source)
    try:
        return await compiling
    except InvalidRequest as error:
        if error.param == "tools" and isinstance(request, ChatRequest):
            await _blame_tool(request, context)
            said = error.message.partition("\n")[0]
            raise InvalidRequest(said, param="tools") from None
        raise


async def _blame_tool(request: ChatRequest, context: PlanContext) -> None:
    """Finds the tool whose schema is wrong. An error about all tools together would speak of a
    grammar that the client has not written.

    Errors: `InvalidRequest` that names the place in the first schema that is wrong by itself.
    """
    model = context.model
    sources = await context.pool.run(MIN_STRUCTURED_CHARS, _schemas_of_tools, request)
    for source in sources:
        await context.pool.compile_grammar(model.tokenizer, model.card.vocab_size, source)


def _schemas_of_tools(request: ChatRequest) -> list[GrammarSource]:
    """The first schemas that are part of the grammar of calls, in the form they have there."""
    choice = request.tool_choice
    name = choice.function.name if isinstance(choice, NamedTool) else None
    wanted = [
        (index, tool)
        for index, tool in enumerate(_tools(request))
        if name in (None, tool.function.name)
    ]
    sources = []
    for index, tool in sorted(wanted, key=_less_strict)[:_MOST_BLAMED]:
        schema = llguidance_schema(parameters(tool), strict=bool(tool.function.strict))
        text = msgspec.json.encode({"grammars": [{"json_schema": schema}]}).decode()
        sources.append(GrammarSource("schema", text, parameters_field(index)))
    return sources


def _less_strict(numbered: tuple[int, Tool]) -> bool:
    """Orders strict tools first: they are more often wrong."""
    return not numbered[1].function.strict


def _work(request: GenerationRequest) -> int:
    """Cost of `grammar_source_of` in characters: work that reads a client's schema never runs in
    place."""
    wanted = request.response_format
    plain = wanted is None or wanted.type in ("text", "json_object")
    if not plain or request.structured_outputs is not None:
        return MIN_STRUCTURED_CHARS
    if not isinstance(request, ChatRequest) or not _tools(request):
        return 0
    free = wanted is None and request.tool_choice in (None, "auto")
    return (
        0
        if free and not any(tool.function.strict for tool in _tools(request))
        else MIN_STRUCTURED_CHARS
    )


def grammar_source_of(request: GenerationRequest, model: PreparedModel) -> GrammarSource | None:
    """The grammar that the request's fields describe, not compiled yet. Errors:
    `InvalidRequest`."""
    answer = _of_answer(request, model)
    if answer is not None and isinstance(request, ChatRequest):
        answer = _behind_markup(answer, model)
    if not isinstance(request, ChatRequest) or not _tools(request) or model.tools is None:
        return answer
    if answer is not None and request.tool_choice in (None, "auto"):
        return _either(request, model, answer)
    # If a tool must be called, there is no other answer that a grammar could describe.
    return _of_tools(request, model)


def _behind_markup(answer: GrammarSource, model: PreparedModel) -> GrammarSource:
    """The grammar with the markup that the model's family puts before an answer."""
    if model.reasoning is None:
        return answer
    term = model.reasoning.before_answer(_special(model.reasoning.markers, model))
    return after(term, answer) if term else answer


def thinking_of(request: GenerationRequest, model: PreparedModel, begun: bool) -> Thinking | None:
    """Where the model's reasoning begins and ends; None if that is not needed. `begun`: the prompt
    has opened it.

    Errors: `InvalidRequest`.
    """
    if not isinstance(request, ChatRequest) or model.reasoning is None:
        return None
    budget = request.thinking_token_budget
    if budget is not None and "thinking" not in model.card.features:
        raise InvalidRequest(
            f"'thinking_token_budget' is not supported by the engine of '{model.card.name}'; "
            "leave it out",
            param="thinking_token_budget",
        )
    marks = model.reasoning.start, model.reasoning.end, _call_marker(request, model)
    start, end, call = (
        tuple(model.tokenizer.encode(mark, add_special_tokens=False)) if mark else ()
        for mark in marks
    )
    if not start or not end:
        return None
    return Thinking(start=start, end=end, begun=begun, budget=budget, call=call)


def _call_marker(request: ChatRequest, model: PreparedModel) -> str:
    """The text with which a call begins, as the answer's parser expects it; empty without tools."""
    return model.tools.starts[0] if model.tools is not None and _tools(request) else ""


# ---------------------------------------------------------------- the answer


def _of_answer(request: GenerationRequest, model: PreparedModel) -> GrammarSource | None:
    wanted, outputs = request.response_format, request.structured_outputs
    if wanted is not None and (wanted.type != "text" or wanted.schema is not None):
        if outputs is not None:
            raise InvalidRequest(
                "'response_format' and 'structured_outputs' exclude each other: leave one of them "
                "out",
                param="structured_outputs",
            )
        return _of_format(wanted, model)
    return None if outputs is None else _of_outputs(outputs, model)


def _of_format(wanted: ResponseFormat, model: PreparedModel) -> GrammarSource:
    if wanted.schema is not None:
        return _of_nameless(wanted, wanted.schema)
    if wanted.type == "json_object":
        return from_schema({"type": "object"}, "response_format")
    if wanted.type == "structural_tag":
        return _of_tags(
            wanted.structures, wanted.triggers, "response_format", model, DEFAULT_JSON_STYLE
        )
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        where = "response_format.json_schema"
        where += "" if wanted.json_schema is None else ".schema"
        raise InvalidRequest(f"'{where}' is required", param=where)
    return from_schema(wanted.json_schema.schema, "response_format.json_schema.schema")


def _of_nameless(wanted: ResponseFormat, schema: dict[str, Any] | bool) -> GrammarSource:
    """llama.cpp takes a schema without a name with both types."""
    if wanted.type not in ("json_object", "json_schema") or wanted.json_schema is not None:
        raise InvalidRequest(
            "'response_format.schema' goes with the types json_object and json_schema, and without "
            "'json_schema'; leave it out",
            param="response_format.schema",
        )
    return from_schema(schema, "response_format.schema")


def _of_outputs(outputs: StructuredOutputs, model: PreparedModel) -> GrammarSource:
    given = [kind for kind in _KINDS if getattr(outputs, kind) is not None]
    if len(given) != 1:
        said = " and ".join(f"'{kind}'" for kind in given) or "none"
        raise InvalidRequest(
            f"'structured_outputs' takes exactly one of {', '.join(_KINDS)}; there is {said}",
            param="structured_outputs",
        )
    param, style = f"structured_outputs.{given[0]}", _style(outputs)
    if outputs.regex is not None:
        return from_regex(outputs.regex, param)
    if outputs.choice is not None:
        return from_choice(outputs.choice, param)
    if outputs.grammar is not None:
        return from_grammar(outputs.grammar, param)
    if outputs.structural_tag is not None:
        tags = _structural_tag(outputs.structural_tag, param)
        return _of_tags(tags.structures, tags.triggers, param, model, style)
    if outputs.json is not None:
        return from_schema(_schema(outputs.json, param), param, style)
    if not outputs.json_object:
        raise InvalidRequest(f"'{param}' may only be true; leave it out", param=param)
    return from_schema({"type": "object"}, param, style)


def _style(outputs: StructuredOutputs) -> JsonStyle:
    closed = bool(outputs.disable_additional_properties)
    if outputs.disable_any_whitespace:
        return JsonStyle(None, closed)
    pattern = outputs.whitespace_pattern
    return JsonStyle(closed=closed) if pattern is None else JsonStyle(pattern, closed)


def _schema(given: str | dict[str, Any] | bool, param: str) -> dict[str, Any] | bool:
    """The schema. Some clients send it as text."""
    schema: object = _decoded(given, param) if isinstance(given, str) else given
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"'{param}' must be a JSON schema", param=param)
    return schema


def _decoded(text: str, param: str) -> object:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"'{param}' is not JSON: {error}", param=param) from None


class _Tags(msgspec.Struct):
    structures: Annotated[list[TaggedStructure], Meta(max_length=128)] | None = None
    triggers: Annotated[list[str], Meta(max_length=128)] | None = None


def _structural_tag(given: str | dict[str, Any], param: str) -> _Tags:
    value = _decoded(given, param) if isinstance(given, str) else given
    try:
        return msgspec.convert(value, _Tags)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"'{param}': {error}", param=param) from None


def _of_tags(
    structures: Sequence[TaggedStructure] | None,
    triggers: Sequence[str] | None,
    param: str,
    model: PreparedModel,
    style: JsonStyle,
) -> GrammarSource:
    if not structures or not triggers:
        missing = f"{param}.triggers" if structures else f"{param}.structures"
        raise InvalidRequest(f"'{missing}' is required", param=missing)
    texts = {*triggers, *(each.end for each in structures)}
    return from_tags(structures, triggers, param, _special(texts, model), style)


def _special(texts: set[str] | Sequence[str], model: PreparedModel) -> Mapping[str, int]:
    """The texts that are special tokens, which no other text produces."""
    ids = {text: model.tokenizer.token_to_id(text) for text in texts}
    special = model.tokenizer.special_ids
    return {text: id for text, id in ids.items() if id is not None and id in special}


# ---------------------------------------------------------------- tools


def _tools(request: ChatRequest) -> Sequence[Tool]:
    """The tools that may be called."""
    return () if request.tool_choice == "none" else request.tools or ()


def _of_tools(request: ChatRequest, model: PreparedModel) -> GrammarSource | None:
    """The grammar of all tools if one is strict: a call begins before it is known which tool it
    calls."""
    asked = request.tool_choice or "auto"
    choice = asked.function.name if isinstance(asked, NamedTool) else str(asked)
    if asked == "auto" and not any(tool.function.strict for tool in _tools(request)):
        return None
    return _limited(_calls(request, model, choice))


def _calls(request: ChatRequest, model: PreparedModel, choice: str) -> str:
    assert model.tools is not None
    special = _special(model.tools.markers, model)
    parallel = request.parallel_tool_calls is not False
    try:
        return model.tools.grammar(_tools(request), choice, parallel, special)
    except RecursionError:
        raise InvalidRequest(
            "'tools' cannot be enforced: their schemas are nested too deeply", param="tools"
        ) from None
    except ValueError as error:
        raise InvalidRequest(f"'tools' cannot be enforced: {error}", param="tools") from None


def _limited(lark: str) -> GrammarSource:
    text = msgspec.json.encode({"grammars": [{"lark_grammar": lark}]}).decode()
    if len(text) > MAX_GRAMMAR:
        raise InvalidRequest(
            f"'tools' come to a grammar of {len(text)} characters; the limit is {MAX_GRAMMAR}: "
            "send fewer or simpler ones, or leave 'strict' out",
            param="tools",
        )
    return GrammarSource("ready", text, "tools")


def _either(request: ChatRequest, model: PreparedModel, answer: GrammarSource) -> GrammarSource:
    """A grammar for either the answer or only calls."""
    if answer.kind == "grammar":
        raise InvalidRequest(
            f"'{answer.param}' cannot be combined with tools: leave one of them out, or set "
            "'tool_choice' to \"none\"",
            param=answer.param,
        )
    return any_of(_calls(request, model, "required"), answer)
