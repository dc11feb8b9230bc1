"""Translates the tools of `/v1/responses` to a chat's functions, and their calls back.

Functions stay as they are. A custom tool becomes a function with one text argument. Tools of a
namespace become functions whose names begin with the namespace's. Tools that a server would run are
left out, as on other servers that run none, unless the request requires one. Plain functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, get_args

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.frontend.api.adapters.common import required, unsupported
from pdserve.protocols.completion_requests import (
    FunctionSpec,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.protocols.responses_api import (
        CustomFormat,
        NamespaceMember,
        ResponsesRequest,
        ResponsesTool,
        ResponsesToolChoice,
    )

INPUT = "input"
"""Name of a custom tool's one argument."""
HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
)
"""Types of tools that OpenAI's platform runs; the names of their versions begin like this."""
MAX_FUNCTIONS = 1024
"""Most functions of all tools together, including those of namespaces."""
MAX_DESCRIPTIONS = 4 << 20
"""Most characters of all functions' descriptions together; a namespace's description is used for
each of its tools that has none."""
_SEPARATOR = "__"
"""Between a namespace and a tool's name, as in vLLM."""
_ANY_TEXT = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_CHOICES = "use none, auto, required, a function, a custom tool or allowed_tools"


@dataclass(frozen=True, slots=True)
class OriginalTool:
    """The tool that a call refers to."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True, slots=True)
class Toolset:
    """A request's tools as a chat has them."""

    functions: tuple[Tool, ...] = ()
    places: tuple[str, ...] = ()
    """The place of each tool in the request."""
    called: dict[str, OriginalTool] = field(default_factory=dict)
    """The original tool by the name of its function."""
    told: tuple[ResponsesTool, ...] = ()
    """The tools that the answer lists: all but those left out."""
    left_out: tuple[str, ...] = ()
    """Types of the tools left out."""
    choice: ToolChoice | NamedTool | None = None


def flat_name(namespace: str | None, name: str) -> str:
    """The name of the function that stands for a tool."""
    return name if namespace is None else f"{namespace}{_SEPARATOR}{name}"


def toolset_of(request: ResponsesRequest, *, strict: bool) -> Toolset:
    """Translates the request's tools. `strict`: refuses instead of leaving tools out.

    Errors: `InvalidRequest`.
    """
    found = _Collected(strict)
    for index, tool in enumerate(request.tools or ()):
        found.take(tool, f"tools[{index}]")
    return _chosen(found.toolset(), request.tool_choice)


def custom_input(arguments: str) -> str:
    """The input text of a custom tool, from the arguments of its function. Arguments of another
    form are taken as text, so that the client sees what the model has written."""
    try:
        given = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return arguments
    text = given.get(INPUT) if isinstance(given, dict) else given
    return text if isinstance(text, str) else arguments


class _Collected:
    """The translated tools, in order."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._functions: list[Tool] = []
        self._places: list[str] = []
        self._called: dict[str, OriginalTool] = {}
        self._told: list[ResponsesTool] = []
        self._left_out: list[str] = []
        self._described = 0
        """Characters of descriptions so far."""

    def take(self, tool: ResponsesTool, where: str) -> None:
        """Adds a tool. Errors: `InvalidRequest`."""
        if tool.type != "namespace":
            if self._member(tool, where):
                self._told.append(tool)
            return
        namespace = required(tool.name, f"{where}.name")
        for index, member in enumerate(tool.tools or ()):
            self._member(member, f"{where}.tools[{index}]", namespace, tool.description)
        self._told.append(tool)

    def toolset(self) -> Toolset:
        """Returns the result."""
        return Toolset(
            functions=tuple(self._functions),
            places=tuple(self._places),
            called=self._called,
            told=tuple(self._told),
            left_out=tuple(self._left_out),
        )

    def _member(
        self,
        tool: NamespaceMember,
        where: str,
        namespace: str | None = None,
        description: str | None = None,
    ) -> bool:
        """Adds a tool of a namespace; returns False if it cannot be called. `description`: the
        namespace's."""
        if tool.type not in ("function", "custom"):
            self._leave_out(tool.type, where)
            return False
        name = required(tool.name, f"{where}.name")
        flat = flat_name(namespace, name)
        custom = tool.type == "custom"
        self._check_size(tool, description)
        function = FunctionSpec(
            name=flat,
            description=_description(tool, description),
            parameters=_ANY_TEXT if custom else tool.parameters,
            strict=tool.strict,
        )
        self._functions.append(Tool(function=function))
        self._places.append(where)
        self._called[flat] = OriginalTool(name, namespace, custom)
        if custom and _grammar(tool.format):
            self._left_out.append("custom.format")
        return True

    def _check_size(self, tool: NamespaceMember, description: str | None) -> None:
        """Checks the size of all tools so far and this one, before anything is built from it."""
        self._described += len(tool.description or description or "") + len(_grammar(tool.format))
        if len(self._functions) == MAX_FUNCTIONS or self._described > MAX_DESCRIPTIONS:
            raise InvalidRequest(
                f"'tools' come to more than {MAX_FUNCTIONS} functions, or {MAX_DESCRIPTIONS} "
                "characters of descriptions: send fewer",
                param="tools",
            )

    def _leave_out(self, kind: str, where: str) -> None:
        if self._strict or not _is_hosted(kind):
            instead = "use functions, custom tools and namespaces of these: you run them yourself"
            raise unsupported(f"{where}.type", kind, instead)
        self._left_out.append(next(hosted for hosted in HOSTED if kind.startswith(hosted)))


def _is_hosted(kind: str) -> bool:
    return kind.startswith(HOSTED)


def _description(tool: NamespaceMember, otherwise: str | None) -> str | None:
    own = tool.description or otherwise
    grammar = _grammar(tool.format)
    if not grammar:
        return own
    return "\n\n".join(filter(None, [own, f"The input follows this grammar:\n{grammar}"]))


def _grammar(form: CustomFormat | None) -> str:
    return "" if form is None or form.type != "grammar" else form.definition or ""


# ---------------------------------------------------------------- tool choice


def _chosen(tools: Toolset, choice: str | ResponsesToolChoice | None) -> Toolset:
    """Applies `tool_choice`. Errors: `InvalidRequest`."""
    if choice is None:
        return tools
    if isinstance(choice, str):
        if choice not in get_args(ToolChoice):
            raise unsupported("tool_choice", choice, _CHOICES)
        return _wanted(tools, choice)  # type: ignore[arg-type]  # checked above
    if choice.type == "allowed_tools":
        return _allowed(tools, choice)
    _check_kind(choice.type, "tool_choice.type")
    flat = _flat(tools, _bare(tools), required(choice.name, "tool_choice.name"), "tool_choice.name")
    return replace(tools, choice=NamedTool(named=NamedFunction(name=flat)))


def _wanted(tools: Toolset, choice: ToolChoice) -> Toolset:
    if choice == "required" and tools.left_out and not tools.functions:
        raise InvalidRequest(
            "'tool_choice' wants a tool to be called, but all 'tools' are of types that a server "
            "would run: none of these is run here",
            param="tool_choice",
        )
    return replace(tools, choice=choice)


def _allowed(tools: Toolset, choice: ResponsesToolChoice) -> Toolset:
    """Removes the tools that are not allowed. The list of allowed tools may name some that are left
    out anyway."""
    allowed: set[str] = set()
    namespaces: set[str | None] = set()
    bare = _bare(tools)
    for index, entry in enumerate(required(choice.tools, "tool_choice.tools")):
        where = f"tool_choice.tools[{index}]"
        kind, name = entry.get("type"), entry.get("name")
        if not isinstance(kind, str) or not isinstance(name, str | None):
            raise InvalidRequest(f"'{where}' must have a 'type' and a 'name'", param=where)
        if kind == "namespace":
            namespaces.add(name)
        elif not _is_hosted(kind):
            _check_kind(kind, f"{where}.type")
            allowed.add(_flat(tools, bare, required(name, f"{where}.name"), f"{where}.name"))
    allowed |= {flat for flat, each in tools.called.items() if each.namespace in namespaces}
    kept = [at for at, tool in enumerate(tools.functions) if tool.function.name in allowed]
    return _wanted(
        replace(
            tools,
            functions=tuple([tools.functions[at] for at in kept]),
            places=tuple([tools.places[at] for at in kept]),
        ),
        choice.mode or "auto",
    )


def _check_kind(kind: str, where: str) -> None:
    if _is_hosted(kind):
        raise unsupported(where, kind, "tools that a server would run are not run here")
    if kind not in ("function", "custom"):
        raise unsupported(where, kind, _CHOICES)


def _bare(tools: Toolset) -> dict[str, list[str]]:
    """Functions by the names of the tools that they stand for."""
    found: dict[str, list[str]] = {}
    for flat, called in tools.called.items():
        found.setdefault(called.name, []).append(flat)
    return found


def _flat(tools: Toolset, bare: Mapping[str, list[str]], name: str, where: str) -> str:
    """The function that a name stands for: its own name, or that of a tool in exactly one
    namespace."""
    if name in tools.called:
        return name
    flats = bare.get(name, [])
    if len(flats) != 1:
        known = ", ".join(list(tools.called)[:16])
        raise InvalidRequest(f"'{where}' is not the name of one of 'tools': {known}", param=where)
    return flats[0]
