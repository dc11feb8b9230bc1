"""Selects the tool call and reasoning parsers for a request.

Checks the request's tools and reasoning fields against what is known of the model, and puts the
parser into the plan. Pure; the formats of model families are in `text/tool_parsers` and
`text/reasoning_parsers`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pdserve.errors import InvalidRequest
from pdserve.frontend.plan import new_call_id
from pdserve.protocols.completion_requests import NamedTool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.frontend.model_registry import PreparedModel
    from pdserve.frontend.plan import RequestPlan
    from pdserve.protocols.completion_requests import ChatRequest, Tool
    from pdserve.text.output_parts import OutputParser

MAX_TOOLS = 1024
"""Most tools of one request, for every API; OpenAI's chat completions take 128."""

__all__ = ["callable_tools", "check_reasoning", "with_output_parser"]


def callable_tools(request: ChatRequest, model: PreparedModel) -> tuple[Tool, ...]:
    """The tools that the answer may call; none with `tool_choice` "none".

    Errors: `InvalidRequest`.
    """
    tools = tuple(request.tools or ())
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"'tools' holds {len(tools)} tools; the limit is {MAX_TOOLS}: send fewer", param="tools"
        )
    _check_names(tools)
    _check_choice(request, tools)
    if not tools or request.tool_choice == "none":
        return ()
    if model.tools is None:
        raise InvalidRequest(
            f"'tools': how '{model.card.name}' writes calls is not known from its chat template; "
            "its worker can be told with --tool-parser (pdserve --help lists the formats), and "
            "with 'tool_choice' \"none\" the request is answered without calls",
            param="tools",
        )
    return tools


def check_reasoning(request: ChatRequest, model: PreparedModel) -> None:
    """Errors: `InvalidRequest` for a thinking budget where reasoning cannot be separated."""
    if request.thinking_token_budget is not None and model.reasoning is None:
        raise InvalidRequest(
            f"'thinking_token_budget': '{model.card.name}' is not known to mark its reasoning; "
            "leave the field out, or start its worker with --reasoning-parser",
            param="thinking_token_budget",
        )


def with_output_parser(
    plan: RequestPlan, request: ChatRequest, tools: tuple[Tool, ...]
) -> RequestPlan:
    """The plan with a parser, if there is anything to separate in the model's output."""
    model = plan.model
    if not tools and model.reasoning is None:
        return plan
    return replace(
        plan,
        tools=tools,
        one_call=bool(tools) and request.parallel_tool_calls is False,
        parser=partial(_parser, model, tools, plan.prompts[0].reasoning),
        keep=model.marks(bool(tools)),
        call_id=new_call_id if model.tools is None else model.tools.call_id,
        reasons=model.reasoning is not None,
        include_reasoning=request.include_reasoning is not False,
    )


def _parser(model: PreparedModel, tools: Sequence[Tool], begun: bool) -> OutputParser:
    calls: OutputParser | None = None
    starts: tuple[str, ...] = ()
    if tools and model.tools is not None:
        calls, starts = model.tools.parser(tools), model.tools.starts
    if model.reasoning is not None:
        return model.reasoning.parser(begun, calls, starts)
    # The caller makes a parser only if there are calls or reasoning to read.
    assert calls is not None
    return calls


def _check_names(tools: Sequence[Tool]) -> None:
    seen = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name.endswith("\n"):
            # The `$` of the schema's pattern also matches before a last line break.
            where = f"tools[{index}].function.name"
            raise InvalidRequest(f"'{where}' ends with a line break; leave it out", param=where)
        if name in seen:
            raise InvalidRequest(
                f"'tools' has two functions called '{name}'; give each a name of its own",
                param=f"tools[{index}].function.name",
            )
        seen.add(name)


def _check_choice(request: ChatRequest, tools: Sequence[Tool]) -> None:
    choice = request.tool_choice
    if choice is None or choice in ("auto", "none"):
        return
    if not tools:
        raise InvalidRequest(
            "'tool_choice' wants a tool to be called, but there are no 'tools'",
            param="tool_choice",
        )
    if isinstance(choice, NamedTool) and all(
        tool.function.name != choice.function.name for tool in tools
    ):
        names = ", ".join(tool.function.name for tool in tools)
        raise InvalidRequest(
            f"'tool_choice' names a function that is not among 'tools': {names}",
            param="tool_choice.function.name",
        )
