"""Writes the answer of `/v1/responses`: output items, and the events of a stream that build them.

Parts of the output open and close items: reasoning, a message, one item per call. Whole answers
take the same path without events, so both are equal. Owned by one request's answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from pdserve.errors import ContextLengthExceeded, Overloaded
from pdserve.frontend.api.adapters.common import (
    EventStreamAdapter,
    cached_tokens,
    reasoning_tokens,
)
from pdserve.frontend.api.adapters.responses_tools import OriginalTool, Toolset, custom_input
from pdserve.frontend.output.logprobs import chat_logprobs
from pdserve.protocols.responses_api import (
    CustomToolCallItem,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    ResponseFailure,
    ResponseObject,
    ResponsesTool,
    ResponsesUsage,
)
from pdserve.text.output_parts import ContentDelta, ReasoningDelta, ToolCallArguments, ToolCallStart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.errors import PdserveError
    from pdserve.frontend.output.output_processor import OutputDelta
    from pdserve.frontend.plan import RequestPlan
    from pdserve.ids import Bytes
    from pdserve.protocols.completion_responses import (
        ChatCompletion,
        ChatLogprob,
        FinishReason,
        Usage,
    )
    from pdserve.protocols.responses_api import NamespaceMember, ResponsesRequest, Status
    from pdserve.text.output_parts import OutputPart

_encode = msgspec.json.Encoder().encode

Event = tuple[str, dict[str, Any]]
"""Its type without `response.`, and its fields besides type and number."""


class ResponsesAdapter(EventStreamAdapter):
    """Writes one answer in the format of the Responses API. Events are numbered from 0 over the
    whole stream."""

    def __init__(self, request: ResponsesRequest, plan: RequestPlan, tools: Toolset) -> None:
        self._plan = plan
        sampling = plan.requests[0].sampling
        self._said = replace(
            initial_response(request, tools, plan.answer_id, plan.created),
            model=plan.model_name,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
        )
        self._called = tools.called
        self._items = OutputItems(plan.requests[0].request_id, plan.call_id, self._called)
        self._number = 0

    def repeats(self) -> Bytes:
        return len(_encode(self._said))

    def begin(self, plan: RequestPlan, usage: Usage) -> bytes:
        return self._begun()

    def parts(self, parts: Sequence[OutputPart], piece: OutputDelta) -> bytes:
        logprobs = self._logprobs(piece)
        events: list[Event] = []
        for part in parts:
            told = []
            if isinstance(part, ContentDelta):
                told, logprobs = logprobs, []
            events += self._items.add(part, told)
        self._items.note(logprobs)
        return self._events(events)

    def finish(
        self, finish_reason: FinishReason, stop_reason: int | str | None, usage: Usage
    ) -> bytes:
        answer, events = self._ended(finish_reason, usage)
        return self._events([*events, (answer.status, {"response": answer})])

    def error(self, error: PdserveError) -> bytes:
        begun = b"" if self._number else self._begun()
        events = self._items.abandon()
        return begun + self._events([*events, *_failure(self._said, self._items.output, error)])

    def whole(self, answer: ChatCompletion) -> bytes:
        choice = answer.choices[0]
        message = choice.message
        calls = message.tool_calls or []
        ids = iter([call.id for call in calls])
        items = OutputItems(self._plan.requests[0].request_id, ids.__next__, self._called)
        self._items = items
        if message.reasoning:
            items.add(ReasoningDelta(message.reasoning), [])
        if message.content:
            logprobs = choice.logprobs.content if choice.logprobs is not None else None
            items.add(ContentDelta(message.content), _said(message.content, logprobs or []))
        for index, call in enumerate(calls):
            items.add(ToolCallStart(index, call.function.name), [])
            items.add(ToolCallArguments(index, call.function.arguments), [])
        assert answer.usage is not None, "it is an answer of our own"
        return _encode(self._ended(choice.finish_reason, answer.usage)[0])

    def _begun(self) -> bytes:
        said = self._said
        return self._events([("created", {"response": said}), ("in_progress", {"response": said})])

    def _ended(self, reason: str, usage: Usage) -> tuple[ResponseObject, list[Event]]:
        """The whole answer, and the events that close what is open."""
        status: Status = "incomplete" if reason == "length" else "completed"
        events = self._items.close(status)
        answer = replace(
            self._said,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            output=self._items.output,
            usage=_usage(usage),
            incomplete_details=(
                IncompleteDetails(reason="max_output_tokens") if status == "incomplete" else None
            ),
        )
        return answer, events

    def _logprobs(self, piece: OutputDelta) -> list[ChatLogprob]:
        """Logprobs of the tokens that are not reasoning."""
        if not self._plan.logprobs:
            return []
        own = piece.logprobs[piece.reasoning_tokens :]
        return chat_logprobs(self._plan.model.tokenizer, own).content or []

    def _events(self, events: Sequence[Event]) -> bytes:
        return b"".join([self._event(name, data) for name, data in events])

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        return _written(name, number, data)


def failed_stream_events(said: ResponseObject, error: PdserveError) -> bytes:
    """All events of a stream that fails before its first token."""
    begun: list[Event] = [("created", {"response": said}), ("in_progress", {"response": said})]
    events = enumerate([*begun, *_failure(said, [], error)])
    return b"".join([_written(name, number, data) for number, (name, data) in events])


def _failure(said: ResponseObject, output: list[OutputItem], error: PdserveError) -> list[Event]:
    """The last events of a stream that fails. Codex reads the error's code."""
    code = error.code if isinstance(error, ContextLengthExceeded) else "server_error"
    if isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    failed = replace(
        said,
        status="failed",
        output=output,
        error=ResponseFailure(code=str(code), message=error.message),
    )
    told = {"code": error.code, "message": error.message, "param": error.param}
    return [("error", told), ("failed", {"response": failed})]


def _written(name: str, number: int, data: dict[str, Any]) -> bytes:
    kind = name if name == "error" else f"response.{name}"
    body = _encode({"type": kind, "sequence_number": number, **data})
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), body)


# ---------------------------------------------------------------- items


@dataclass
class _Open:
    """The item that is being written."""

    item: OutputItem
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[ChatLogprob] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """How events refer to it."""
        return {"item_id": self.item.id, "output_index": self.index}


class OutputItems:
    """Builds output items from parts."""

    def __init__(
        self, request_id: str, call_id: Callable[[], str], called: Mapping[str, OriginalTool]
    ) -> None:
        """`called`: the tool that each function stands for."""
        self.output: list[OutputItem] = []
        """Complete items."""
        self._request_id = request_id
        self._call_id = call_id
        self._called = called
        self._open: _Open | None = None

    def add(self, part: OutputPart, logprobs: list[ChatLogprob]) -> list[Event]:
        """The events for a part; `piece` has the logprobs of its tokens, if it is content."""
        match part:
            case ReasoningDelta(text):
                events = self._switch(ReasoningItem)
                return [*events, self._delta("reasoning_text", text, [])]
            case ContentDelta(text):
                events = self._switch(MessageItem)
                return [*events, self._delta("output_text", text, logprobs)]
            case ToolCallStart(_, name, id):
                return [*self._close("completed"), self._begin(self._call(name, id))]
            case ToolCallArguments(_, text):
                # A call has begun, and calls come one after the other.
                assert self._open is not None
                self._open.texts.append(text)
                if isinstance(self._open.item, CustomToolCallItem):
                    # A custom tool's input is known only when its arguments are complete.
                    return []
                data = {**self._open.place, "delta": text}
                return [("function_call_arguments.delta", data)]

    def note(self, logprobs: list[ChatLogprob]) -> None:
        """Keeps logprobs of tokens that show no text yet; they are sent when the message is
        complete."""
        if self._open is not None and isinstance(self._open.item, MessageItem):
            self._open.logprobs += logprobs

    def close(self, status: Status) -> list[Event]:
        """Closes the open item. An answer without content gets an empty message."""
        events: list[Event] = []
        if self._open is None and not self.output:
            events = self._switch(MessageItem)
        return events + self._close(status)

    def abandon(self) -> list[Event]:
        """Leaves the open item as it is."""
        return self._close("incomplete")

    def _switch(self, kind: type[ReasoningItem | MessageItem]) -> list[Event]:
        """Makes sure that an item of this kind is open."""
        if self._open is not None and isinstance(self._open.item, kind):
            return []
        events = self._close("completed")
        if kind is ReasoningItem:
            item: OutputItem = ReasoningItem(id=self._id("rs"), status="in_progress", content=[])
        else:
            item = MessageItem(id=self._id("msg"), status="in_progress", content=[])
        events.append(self._begin(item))
        assert self._open is not None
        part = _part(item, "", [])
        return [*events, ("content_part.added", {**self._open.place, "content_index": 0} | part)]

    def _begin(self, item: OutputItem) -> Event:
        self._open = _Open(item, len(self.output))
        return "output_item.added", {"output_index": len(self.output), "item": item}

    def _call(self, function: str, id: str) -> FunctionCallItem | CustomToolCallItem:
        tool = self._called.get(function) or OriginalTool(function)
        common: dict[str, Any] = {
            "status": "in_progress",
            "call_id": id or self._call_id(),
            "name": tool.name,
            "namespace": UNSET if tool.namespace is None else tool.namespace,
        }
        if tool.custom:
            return CustomToolCallItem(id=self._id("ctc"), input="", **common)
        return FunctionCallItem(id=self._id("fc"), arguments="", **common)

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._request_id}_{len(self.output)}"

    def _delta(self, kind: str, text: str, logprobs: list[ChatLogprob]) -> Event:
        assert self._open is not None
        self._open.texts.append(text)
        self._open.logprobs += logprobs
        data = {**self._open.place, "content_index": 0, "delta": text}
        return f"{kind}.delta", data | ({"logprobs": logprobs} if kind == "output_text" else {})

    def _close(self, status: Status) -> list[Event]:
        opened, self._open = self._open, None
        if opened is None:
            return []
        text = "".join(opened.texts)
        item, events = _closed(opened, text, status)
        self.output.append(item)
        done = {"output_index": opened.index, "item": item}
        return [*events, ("output_item.done", done)]


def _closed_custom(opened: _Open, text: str, status: Status) -> tuple[OutputItem, list[Event]]:
    """The complete item of a custom tool, with its input in one piece."""
    item = opened.item
    assert isinstance(item, CustomToolCallItem)
    given = custom_input(text)
    events: list[Event] = [
        ("custom_tool_call_input.delta", {**opened.place, "delta": given}),
        ("custom_tool_call_input.done", {**opened.place, "input": given}),
    ]
    return replace(item, status=status, input=given), events


def _closed(opened: _Open, text: str, status: Status) -> tuple[OutputItem, list[Event]]:
    """The item as it appears in the answer, and the events that end its content."""
    item = opened.item
    if isinstance(item, CustomToolCallItem):
        return _closed_custom(opened, text, status)
    if isinstance(item, FunctionCallItem):
        data = {**opened.place, "arguments": text, "name": item.name}
        events: list[Event] = [("function_call_arguments.done", data)]
        return replace(item, status=status, arguments=text), events
    place = {**opened.place, "content_index": 0}
    part = _part(item, text, opened.logprobs)
    if isinstance(item, ReasoningItem):
        name, data = "reasoning_text.done", {**place, "text": text}
    else:
        name, data = "output_text.done", {**place, "text": text, "logprobs": opened.logprobs}
    item = replace(item, status=status, content=[part["part"]])
    return item, [(name, data), ("content_part.done", {**place, **part})]


def _part(item: OutputItem, text: str, logprobs: list[ChatLogprob]) -> dict[str, Any]:
    """The one part of an item's content, as events carry it."""
    if isinstance(item, ReasoningItem):
        return {"part": ReasoningText(text=text)}
    return {"part": OutputText(text=text, logprobs=logprobs)}


def _said(content: str, logprobs: list[ChatLogprob]) -> list[ChatLogprob]:
    """Logprobs from the content's first token on; reasoning comes before it."""
    begins = b"".join([bytes(entry.bytes or ()) for entry in logprobs]).rfind(content.encode())
    ends = 0
    for place, entry in enumerate(logprobs):
        ends += len(entry.bytes or ())
        if ends > begins:
            return logprobs[place:]
    return []


# ---------------------------------------------------------------- initial response


def initial_response(
    request: ResponsesRequest, tools: Toolset, answer_id: str, created: int
) -> ResponseObject:
    """The answer before its first token, which repeats the request's fields."""
    reasoning, text = request.reasoning, request.text
    form = None if text is None else text.format
    return ResponseObject(
        id=answer_id,
        created_at=created,
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=request.model or "",
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": None if reasoning is None else reasoning.effort, "summary": None},
        temperature=1.0 if request.temperature is None else request.temperature,
        text={"format": {"type": "text"} if form is None else _stated(form)},
        tool_choice=_choice(request),
        tools=[_tool(tool) for tool in tools.told],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
        metadata=request.metadata or {},
    )


def _choice(request: ResponsesRequest) -> str | dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else _stated(choice)


def _tool(tool: NamespaceMember) -> dict[str, Any]:
    """A tool with all of a function's fields, which official clients expect."""
    if isinstance(tool, ResponsesTool) and tool.type == "namespace":
        return _stated(tool) | {"tools": [_tool(member) for member in tool.tools or ()]}
    always = {"parameters": None, "strict": None} if tool.type == "function" else {}
    return always | _stated(tool)


def _stated(record: msgspec.Struct) -> dict[str, Any]:
    """The fields that are not null."""
    given: dict[str, Any] = msgspec.to_builtins(record)
    return {name: value for name, value in given.items() if value is not None}


def _usage(usage: Usage) -> ResponsesUsage:
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=cached_tokens(usage)),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=reasoning_tokens(usage)),
        total_tokens=usage.total_tokens,
        pdserve=usage.pdserve,
    )
