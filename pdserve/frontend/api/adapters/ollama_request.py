"""Translates Ollama's requests: `/api/chat` to a chat, `/api/generate` to a chat or a completion.

Options get chat's names. A request without a prompt asks Ollama to load the model; here it is
answered at once. Vectors are those of `/v1/embeddings`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from msgspec.structs import replace

from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.frontend.api.adapters.common import content_of, image_part, unsupported
from pdserve.frontend.api.adapters.ollama_output import (
    OllamaAdapter,
    loaded_vectors,
    vector_body,
    vectors_body,
)
from pdserve.frontend.images.sources import is_data
from pdserve.frontend.plan import RequestPlan
from pdserve.frontend.preprocess.embeddings import plan_embeddings
from pdserve.frontend.preprocess.error_fields import reword_errors
from pdserve.frontend.preprocess.input_processor import plan_chat, plan_completion
from pdserve.frontend.preprocess.text_cost import MIN_STRUCTURED_CHARS
from pdserve.protocols.completion_requests import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FunctionCall,
    JsonSchemaFormat,
    Message,
    ReasoningEffort,
    ResponseFormat,
    ToolCall,
)
from pdserve.protocols.embeddings import EmbeddingRequest
from pdserve.protocols.ollama.requests import (
    REFUSED_OPTIONS,
    OllamaGenerateRequest,
    OllamaOptions,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pdserve.frontend.model_registry import PreparedModel
    from pdserve.frontend.preprocess.input_processor import PlanContext
    from pdserve.protocols.ollama.requests import (
        OllamaChatRequest,
        OllamaEmbeddingsRequest,
        OllamaEmbedRequest,
        OllamaGenerationRequest,
        OllamaMessage,
        OllamaRequest,
    )

_NAMES = {
    **{name: f"options.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "stop")},
    **{name: f"options.{name}" for name in ("presence_penalty", "frequency_penalty", "seed")},
    r"repetition_penalty": "options.repeat_penalty",
    r"max_(?:completion_)?tokens": "options.num_predict",
    r"response_format\.json_schema(?:\.schema)?": "format",
    r"response_format": "format",
    r"reasoning_effort": "think",
}
_GENERATE_NAMES = _NAMES | {r"messages(?:\[\d+\][\w.\[\]]*)?": "prompt"}
_EMBED_NAMES = {"truncate_prompt_tokens": "truncate"}
_FEW = 16
"""Number of plain text messages up to which the translation runs on the event loop."""
_UNLOAD = frozenset((0, 0.0, "0", "0s", "0m", "0h"))
_encode = msgspec.json.Encoder().encode


async def plan_ollama_chat(request: OllamaChatRequest, context: PlanContext) -> RequestPlan:
    """Makes the plan of an `/api/chat` request. Errors: `InvalidRequest` and its subclasses,
    `Overloaded`."""
    if not request.messages:
        return _loaded(request, context, chat=True)
    if request.tools and context.model.tools is None:
        raise InvalidRequest(
            f"'{context.model.card.name}' does not support tools: how it writes calls is not known "
            "from its chat template; leave 'tools' out, or start its worker with --tool-parser",
            param="tools",
        )
    chat = await context.pool.run(_work(request), chat_request, request, context.model)
    context = replace(context, any_output=True)
    with _own_sentence("messages"), reword_errors(_NAMES):
        plan = await plan_chat(chat, context)
    return _adapted(plan, request, context, chat=True)


async def plan_ollama_generate(request: OllamaGenerateRequest, context: PlanContext) -> RequestPlan:
    """Makes the plan of an `/api/generate` request. Errors: `InvalidRequest` and its subclasses,
    `Overloaded`."""
    if not (request.prompt or request.images or request.suffix):
        return _loaded(request, context, chat=False)
    with _own_sentence("prompt"), reword_errors(_GENERATE_NAMES):
        if request.raw or request.suffix:
            plan = await _plan_completion(request, context)
        else:
            work = MIN_STRUCTURED_CHARS if request.images else 0
            chat = await context.pool.run(work, prompt_as_chat, request, context.model)
            plan = await plan_chat(chat, replace(context, any_output=True))
    return _adapted(plan, request, context, chat=False)


async def plan_ollama_embed(request: OllamaEmbedRequest, context: PlanContext) -> RequestPlan:
    """Makes the plan of an `/api/embed` request. Errors: as `plan_embeddings`."""
    if not request.input:
        return _ready(request, context, loaded_vectors(_name(request, context), one=False))
    wanted = _embedding_request(request)
    wanted.input = request.input  # type: ignore[assignment]  # a narrower list
    wanted.dimensions = request.dimensions
    wanted.truncate_prompt_tokens = None if request.truncate is False else -1
    with reword_errors(_EMBED_NAMES):
        plan = await plan_embeddings(wanted, context)
    assert plan.vectors is not None, "it is a plan of vectors"
    # Ollama's vectors have length 1 here, whatever the model says.
    shape = replace(plan.vectors, normalize=True)
    return replace(plan, vectors=shape, write_vectors=vectors_body)


async def plan_ollama_embeddings(
    request: OllamaEmbeddingsRequest, context: PlanContext
) -> RequestPlan:
    """Makes the plan of an `/api/embeddings` request. Errors: as `plan_embeddings`."""
    if not request.prompt:
        return _ready(request, context, loaded_vectors(_name(request, context), one=True))
    wanted = _embedding_request(request)
    wanted.input, wanted.truncate_prompt_tokens = request.prompt, -1
    with reword_errors({"input": "prompt"}):
        plan = await plan_embeddings(wanted, context)
    return replace(plan, write_vectors=vector_body)


def _embedding_request(request: OllamaRequest) -> EmbeddingRequest:
    return EmbeddingRequest(
        model=request.model,
        priority=request.priority,
        cache_salt=request.cache_salt,
        session_id=request.session_id,
    )


# ---------------------------------------------------------------- without a prompt


def _loaded(request: OllamaGenerationRequest, context: PlanContext, *, chat: bool) -> RequestPlan:
    """The plan of a request that only loads the model.

    Errors: `InvalidRequest` if it is to be unloaded.
    """
    if request.keep_alive in _UNLOAD:
        raise InvalidRequest(
            "'keep_alive' of 0 without a prompt asks to unload the model, which no client can do: "
            "its operator stops the worker",
            param="keep_alive",
        )
    adapter = OllamaAdapter(_name(request, context), context, chat=chat)
    return _ready(request, context, adapter.loaded(), stream=request.stream is not False)


def _ready(
    request: OllamaRequest, context: PlanContext, answer: bytes, *, stream: bool = False
) -> RequestPlan:
    """A plan whose answer needs no tokens."""
    return RequestPlan(
        chat=False,
        model=context.model,
        model_name=_name(request, context),
        answer_id="",
        created=0,
        prompts=[],
        requests=[],
        n=1,
        stream=stream,
        ready=answer,
    )


def _name(request: OllamaRequest, context: PlanContext) -> str:
    return request.model or context.model.card.name


# ---------------------------------------------------------------- the request


def _adapted(
    plan: RequestPlan, request: OllamaGenerationRequest, context: PlanContext, *, chat: bool
) -> RequestPlan:
    adapter = OllamaAdapter(_name(request, context), context, chat=chat, plan=plan)
    return replace(plan, adapter=adapter, stream=request.stream is not False)


def _work(request: OllamaChatRequest) -> int:
    """Cost of `chat_request`."""
    messages = request.messages or ()
    plain = not request.tools and len(messages) <= _FEW
    if plain and not any(message.tool_calls or message.images for message in messages):
        return 0
    return MIN_STRUCTURED_CHARS


@contextlib.contextmanager
def _own_sentence(field: str) -> Iterator[None]:
    """Rewords the error about a prompt that is too long as Ollama's sentence, by which clients
    recognise it."""
    try:
        yield
    except ContextLengthExceeded as error:
        if (overrun := error.overrun) is not None and not overrun.output:
            over = overrun.prompt - overrun.context + 1
            error.message = (
                f"prompt too long; exceeded max context length by {over} tokens: it has "
                f"{overrun.prompt}, and the context {overrun.context}, output included; "
                f"shorten '{field}'"
            )
            error.args = (error.message,)
        raise


def chat_request(request: OllamaChatRequest, model: PreparedModel) -> ChatRequest:
    """The request as a chat. Errors: `InvalidRequest` for what a chat cannot express."""
    conversation = _OllamaConversation()
    for index, message in enumerate(request.messages or ()):
        conversation.take(message, f"messages[{index}]")
    messages = conversation.messages
    last = messages[-1]
    return ChatRequest(
        messages=messages,
        continue_final_message=(last.role == "assistant" and bool(last.content)) or None,
        tools=request.tools or None,
        **_fields(request, model),
    )


def prompt_as_chat(request: OllamaGenerateRequest, model: PreparedModel) -> ChatRequest:
    """The prompt as the user's message. Errors: `InvalidRequest`."""
    content = _content(request.prompt or "", request.images, "images")
    messages = [Message(role="user", content=content)]
    if request.system:
        messages.insert(0, Message(role="system", content=request.system))
    return ChatRequest(messages=messages, **_fields(request, model))


def _content(text: str, images: Sequence[str] | None, where: str) -> str | list[ContentPart]:
    """A text after its images, which are base64 without a type; they are never fetched."""
    if not images:
        return text
    parts: list[str | ContentPart] = [
        image_part(image if is_data(image) else f"data:;base64,{image}", f"{where}[{index}]")
        for index, image in enumerate(images)
    ]
    return content_of([*parts, text] if text else parts)


async def _plan_completion(request: OllamaGenerateRequest, context: PlanContext) -> RequestPlan:
    """Makes the plan of a prompt that no template is applied to."""
    why = "raw" if request.raw else "suffix"
    for name in ("system", "images"):
        if getattr(request, name):
            raise InvalidRequest(
                f"'{name}' is for the model's template, which '{why}' leaves out: do without it",
                param=name,
            )
    fields = _sampling(request)
    config = context.config
    if fields["max_tokens"] is None:
        # A completion has 16 tokens by default; Ollama's goes on.
        card = context.model.card
        fields["max_tokens"] = card.defaults.max_tokens or card.max_model_len
        config = dataclasses.replace(config, strict_api=False)
    context = replace(context, any_output=True, config=config)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    completion = CompletionRequest(
        prompt=request.prompt or "", suffix=request.suffix or None, logprobs=logprobs, **fields
    )
    return await plan_completion(completion, context)


def _fields(request: OllamaGenerationRequest, model: PreparedModel) -> dict[str, Any]:
    """The fields of a chat, besides its messages."""
    return {
        **_sampling(request),
        **_thinking(request, model),
        "logprobs": request.logprobs,
        "top_logprobs": request.top_logprobs if request.logprobs else None,
    }


def _sampling(request: OllamaGenerationRequest) -> dict[str, Any]:
    """The fields that chats and completions share. Errors: `InvalidRequest` for options that are
    not supported."""
    options = request.options or OllamaOptions()
    for name, refusal in REFUSED_OPTIONS.items():
        if not refusal.allows(getattr(options, name)):
            where = f"options.{name}"
            raise InvalidRequest(f"'{where}' is not supported: {refusal.remedy}", param=where)
    penalised = options.repeat_last_n != 0
    predicted = options.num_predict or 0
    return {
        "model": request.model,
        "max_tokens": predicted if predicted > 0 else None,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "seed": None if options.seed == -1 else options.seed,
        "stop": options.stop or None,
        "repetition_penalty": options.repeat_penalty if penalised else 1.0,
        "presence_penalty": options.presence_penalty if penalised else None,
        "frequency_penalty": options.frequency_penalty if penalised else None,
        "response_format": _response_format(request),
        "priority": request.priority,
        "cache_salt": request.cache_salt,
        "cache_ttl": request.cache_ttl,
        "cache_scope": request.cache_scope,
        "session_id": request.session_id,
    }


def _response_format(request: OllamaGenerationRequest) -> ResponseFormat | None:
    wanted = request.format
    if not wanted:
        return None
    if isinstance(wanted, dict):
        named = JsonSchemaFormat(name="format", schema=wanted, strict=True)
        return ResponseFormat(type="json_schema", json_schema=named)
    if wanted != "json":
        raise unsupported("format", wanted, 'use "json" or a JSON schema')
    return ResponseFormat(type="json_object")


def _thinking(request: OllamaGenerationRequest, model: PreparedModel) -> dict[str, Any]:
    """Whether the model thinks, and how much. Errors: `InvalidRequest`."""
    wanted = request.think
    if wanted is None or wanted == "":
        return {}
    if wanted is False:
        return {"enable_thinking": False, "include_reasoning": False}
    if isinstance(wanted, str) and wanted not in get_args(ReasoningEffort):
        raise unsupported("think", wanted, "use true, false, low, medium, high or max")
    if model.reasoning is None:
        raise InvalidRequest(
            f"'{model.card.name}' does not support thinking: its chat template marks no reasoning; "
            "leave 'think' out, or start its worker with --reasoning-parser",
            param="think",
        )
    effort = wanted if isinstance(wanted, str) else None
    return {"enable_thinking": effort != "none", "reasoning_effort": effort}


# ---------------------------------------------------------------- messages


@dataclass
class _OllamaConversation:
    """Builds a chat's messages. Ollama's calls need no ids, and templates may."""

    messages: list[Message] = field(default_factory=list)
    _unanswered: _Unanswered = field(default_factory=lambda: _Unanswered())
    _calls: int = 0

    def take(self, message: OllamaMessage, where: str) -> None:
        """Adds a message. Errors: `InvalidRequest` for unsupported content."""
        role = message.role.lower()
        if role not in ("system", "user", "assistant", "tool"):
            instead = "use system, user, assistant or tool"
            raise unsupported(f"{where}.role", message.role, instead)
        content = _content(message.content or "", message.images, f"{where}.images")
        calls = self._called(message) if role == "assistant" else None
        self.messages.append(
            Message(
                role=role,  # type: ignore[arg-type]  # checked above
                content=None if calls and not content else content,
                reasoning=message.thinking or None,
                reasoning_content=message.thinking or None,
                tool_calls=calls,
                name=message.tool_name if role == "tool" else None,
                tool_call_id=self._answered(message) if role == "tool" else None,
            )
        )

    def _called(self, message: OllamaMessage) -> list[ToolCall] | None:
        self._unanswered = _Unanswered()
        calls = []
        for call in message.tool_calls or ():
            called = call.function
            call_id = call.id or f"call_{self._calls}"
            self._calls += 1
            self._unanswered.add(called.name, call_id)
            function = FunctionCall(name=called.name, arguments=_encode(called.arguments).decode())
            calls.append(ToolCall(id=call_id, type="function", function=function))
        return calls or None

    def _answered(self, message: OllamaMessage) -> str | None:
        """The id of the call that a result belongs to."""
        if message.tool_call_id is not None:
            return message.tool_call_id
        return self._unanswered.take(message.tool_name)


@dataclass
class _Unanswered:
    """Calls of the latest turn without a result. Both operations take constant time, because a body
    may have tens of thousands of calls."""

    _order: deque[str] = field(default_factory=deque)
    _named: dict[str, deque[str]] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def add(self, name: str, call_id: str) -> None:
        self._order.append(call_id)
        self._named.setdefault(name, deque()).append(call_id)

    def take(self, name: str | None) -> str | None:
        """The first call of this function, or else the first of all: results come in the order of
        their calls, unless they say whose they are."""
        return self._first(self._named.get(name or "", deque())) or self._first(self._order)

    def _first(self, ids: deque[str]) -> str | None:
        while ids:
            found = ids.popleft()
            if found not in self._taken:
                self._taken.add(found)
                return found
        return None
