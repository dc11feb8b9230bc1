"""The answer of `/v1/responses`: output items, and the events that build them up in a stream.

Parts of the output open and close items: reasoning, a message, one item per call. Whole answers go
the same way, without events, so both come out alike. Owned by one request's answer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from pdserve.errors import Overloaded
from pdserve.frontend.dialects.common import cached_tokens, reasoning_tokens
from pdserve.frontend.logprobs import chat_logprobs
from pdserve.openai.responses_api import (
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
    ResponsesUsage,
)
from pdserve.text.parts import CallArguments, CallBegin, Content, Reasoning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.errors import PdserveError
    from pdserve.frontend.output import Piece
    from pdserve.frontend.plan import Plan
    from pdserve.openai.responses import ChatCompletion, ChatLogprob, FinishReason, Usage
    from pdserve.openai.responses_api import ResponsesRequest, Status
    from pdserve.text.parts import Part

_encode = msgspec.json.Encoder().encode

Event = tuple[str, dict[str, Any]]
"""Its type without `response.`, and what it carries besides type and number."""


class ResponsesDialect:
    """A `Dialect`. Events are numbered from 0 on, over the whole stream."""

    def __init__(self, request: ResponsesRequest, plan: Plan) -> None:
        self._plan = plan
        self._said = _described(request, plan)
        self._items = Items(plan.requests[0].request_id, plan.call_id)
        self._number = 0

    def begin(self, plan: Plan, usage: Usage) -> bytes:
        return self._begun()

    def parts(self, parts: Sequence[Part], piece: Piece) -> bytes:
        logprobs = self._logprobs(piece)
        events: list[Event] = []
        for part in parts:
            told = []
            if isinstance(part, Content):
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
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        events = self._items.abandon()
        failed = replace(
            self._said,
            status="failed",
            output=self._items.output,
            error=ResponseFailure(code=code, message=error.message),
        )
        told = {"code": error.code, "message": error.message, "param": error.param}
        return begun + self._events([*events, ("error", told), ("failed", {"response": failed})])

    def whole(self, answer: ChatCompletion) -> bytes:
        choice = answer.choices[0]
        message = choice.message
        calls = message.tool_calls or []
        ids = iter([call.id for call in calls])
        items = self._items = Items(self._plan.requests[0].request_id, ids.__next__)
        if message.reasoning:
            items.add(Reasoning(message.reasoning), [])
        if message.content:
            logprobs = choice.logprobs.content if choice.logprobs is not None else None
            items.add(Content(message.content), _said(message.content, logprobs or []))
        for index, call in enumerate(calls):
            items.add(CallBegin(index, call.function.name), [])
            items.add(CallArguments(index, call.function.arguments), [])
        assert answer.usage is not None, "it is an answer of our own"
        return _encode(self._ended(choice.finish_reason, answer.usage)[0])

    def _begun(self) -> bytes:
        said = self._said
        return self._events([("created", {"response": said}), ("in_progress", {"response": said})])

    def _ended(self, reason: str, usage: Usage) -> tuple[ResponseObject, list[Event]]:
        """The whole answer, and the events of what was still open."""
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

    def _logprobs(self, piece: Piece) -> list[ChatLogprob]:
        """Of the tokens that are not reasoning."""
        if not self._plan.logprobs:
            return []
        own = piece.logprobs[piece.reasoning_tokens :]
        return chat_logprobs(self._plan.model.tokenizer, own).content or []

    def _events(self, events: Sequence[Event]) -> bytes:
        return b"".join([self._event(name, data) for name, data in events])

    def _event(self, name: str, data: dict[str, Any]) -> bytes:
        kind = name if name == "error" else f"response.{name}"
        number, self._number = self._number, self._number + 1
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
        """How events name it."""
        return {"item_id": self.item.id, "output_index": self.index}


class Items:
    """Output items as parts come."""

    def __init__(self, request_id: str, call_id: Callable[[], str]) -> None:
        self.output: list[OutputItem] = []
        """Those that are complete."""
        self._request_id = request_id
        self._call_id = call_id
        self._open: _Open | None = None

    def add(self, part: Part, logprobs: list[ChatLogprob]) -> list[Event]:
        """The events that tell of a part; `logprobs` of its tokens, if it is content."""
        match part:
            case Reasoning(text):
                events = self._switch(ReasoningItem)
                return [*events, self._delta("reasoning_text", text, [])]
            case Content(text):
                events = self._switch(MessageItem)
                return [*events, self._delta("output_text", text, logprobs)]
            case CallBegin(_, name):
                return [*self._close("completed"), self._begin(self._call(name))]
            case CallArguments(_, text):
                assert self._open is not None  # a call has begun, and calls come one by one
                self._open.texts.append(text)
                data = {**self._open.place, "delta": text}
                return [("function_call_arguments.delta", data)]

    def note(self, logprobs: list[ChatLogprob]) -> None:
        """Of tokens that show nothing: they are told when the message is whole."""
        if self._open is not None and isinstance(self._open.item, MessageItem):
            self._open.logprobs += logprobs

    def close(self, status: Status) -> list[Event]:
        """Nothing follows. An answer without anything in it is an empty message."""
        events: list[Event] = []
        if self._open is None and not self.output:
            events = self._switch(MessageItem)
        return events + self._close(status)

    def abandon(self) -> list[Event]:
        """What was begun stays as it is."""
        return self._close("incomplete")

    def _switch(self, kind: type[ReasoningItem | MessageItem]) -> list[Event]:
        """An item of this kind is open afterwards."""
        if self._open is not None and isinstance(self._open.item, kind):
            return []
        events = self._close("completed")
        if kind is ReasoningItem:
            item: OutputItem = ReasoningItem(id=self._id("rs"), status="in_progress", content=[])
        else:
            item = MessageItem(id=self._id("msg"), status="in_progress", content=[])
        events.append(self._begin(item))
        assert self._open is not None  # just begun
        part = _part(item, "", [])
        return [*events, ("content_part.added", {**self._open.place, "content_index": 0} | part)]

    def _begin(self, item: OutputItem) -> Event:
        self._open = _Open(item, len(self.output))
        return "output_item.added", {"output_index": len(self.output), "item": item}

    def _call(self, name: str) -> FunctionCallItem:
        return FunctionCallItem(
            id=self._id("fc"),
            status="in_progress",
            call_id=self._call_id(),
            name=name,
            arguments="",
        )

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._request_id}_{len(self.output)}"

    def _delta(self, kind: str, text: str, logprobs: list[ChatLogprob]) -> Event:
        assert self._open is not None  # its kind has been switched to
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


def _closed(opened: _Open, text: str, status: Status) -> tuple[OutputItem, list[Event]]:
    """The item as it stands in the answer, and the events that end what is in it."""
    item = opened.item
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
    """Those of the tokens from the content's first one on; what the model thought is before it."""
    begins = b"".join([bytes(entry.bytes or ()) for entry in logprobs]).rfind(content.encode())
    ends = 0
    for place, entry in enumerate(logprobs):
        ends += len(entry.bytes or ())
        if ends > begins:
            return logprobs[place:]
    return []


# ---------------------------------------------------------------- what is known beforehand


def _described(request: ResponsesRequest, plan: Plan) -> ResponseObject:
    """The answer before its first token: mostly the request's own words."""
    reasoning, text = request.reasoning, request.text
    sampling = plan.requests[0].sampling
    form = None if text is None else text.format
    return ResponseObject(
        id=plan.answer_id,
        created_at=plan.created,
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        model=plan.model_name,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning={"effort": None if reasoning is None else reasoning.effort, "summary": None},
        temperature=sampling.temperature,
        text={"format": {"type": "text"} if form is None else _stated(form)},
        tool_choice=_choice(request),
        tools=[_tool(tool) for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        user=request.user,
        metadata=request.metadata or {},
    )


def _choice(request: ResponsesRequest) -> str | dict[str, Any]:
    choice = request.tool_choice
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else _stated(choice)


def _tool(tool: msgspec.Struct) -> dict[str, Any]:
    """Official clients expect all of its fields."""
    return {"parameters": None, "strict": None} | _stated(tool)


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
