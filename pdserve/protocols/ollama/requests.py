"""Defines the request bodies of Ollama's API as typed records.

Options that only concern how Ollama runs a model are accepted without effect; those that would
change the answer and are not supported are refused by the translation
(`pdserve.frontend.api.adapters.ollama_request`), with `REFUSED_OPTIONS`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pdserve.protocols.completion_requests import (
    CacheScopeName,
    CacheTtl,
    MinP,
    Penalty,
    Priority,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    Tool,
    TopK,
    TopLogprobs,
    TopP,
    field_doc,
)
from pdserve.protocols.request_decoder import RequestDecoder
from pdserve.protocols.unsupported_fields import UnsupportedField

_Idle = Annotated[Any, field_doc("Without effect.")]
Dimensions = Annotated[int, Meta(ge=1, le=2**31 - 1)]
PredictedTokens = Annotated[int, Meta(ge=-2, le=2**31 - 1)]


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Options of an answer. Those that say how Ollama runs a model have no effect."""

    num_predict: Annotated[
        PredictedTokens | None,
        field_doc("Most output tokens, fewer if fewer fit; 0 and less: the default of a chat."),
    ] = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Annotated[Seed | None, field_doc("-1: one is drawn.")] = None
    stop: Stop | None = None
    repeat_penalty: Annotated[
        RepetitionPenalty | None, field_doc("`repetition_penalty` of a chat.")
    ] = None
    repeat_last_n: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        field_doc("0: no penalties. Otherwise penalties look at all tokens, whatever it says."),
    ] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_ctx: Annotated[
        Any, field_doc("Without effect: the context's length is the model's own.")
    ] = None
    mirostat: Annotated[Any, field_doc("Refused unless 0.")] = None
    mirostat_tau: _Idle = None
    mirostat_eta: _Idle = None
    tfs_z: Annotated[Any, field_doc("Refused unless 1.")] = None
    typical_p: Annotated[Any, field_doc("Refused unless 1.")] = None
    penalize_newline: _Idle = None
    num_keep: _Idle = None
    num_batch: _Idle = None
    num_gpu: _Idle = None
    main_gpu: _Idle = None
    num_thread: _Idle = None
    numa: _Idle = None
    low_vram: _Idle = None
    f16_kv: _Idle = None
    logits_all: _Idle = None
    vocab_only: _Idle = None
    embedding_only: _Idle = None
    use_mmap: _Idle = None
    use_mlock: _Idle = None


_OTHER_SAMPLER = "this sampler is not supported; use 'top_p', 'top_k' or 'min_p'"
REFUSED_OPTIONS: dict[str, UnsupportedField] = {
    "mirostat": UnsupportedField(_OTHER_SAMPLER, (0, 0.0)),
    "tfs_z": UnsupportedField(_OTHER_SAMPLER, (1, 1.0)),
    "typical_p": UnsupportedField(_OTHER_SAMPLER, (1, 1.0)),
}


class OllamaCalledFunction(msgspec.Struct, kw_only=True):
    """A function that was called; unlike in a chat, its arguments are an object."""

    name: str
    arguments: dict[str, Any] = {}
    index: Any = None
    """Ignored: calls are taken in their order."""
    description: Any = None
    """Ignored."""


class OllamaCalledTool(msgspec.Struct, kw_only=True):
    """A tool call of an earlier answer."""

    function: OllamaCalledFunction
    id: str | None = None
    type: str | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One turn of the conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """Images in base64, for models that see."""
    tool_calls: list[OllamaCalledTool] | None = None
    tool_name: str | None = None
    """Of a message with role `tool`: the function whose result it is."""
    tool_call_id: str | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The fields that all requests for a model share."""

    model: Annotated[
        str | None,
        field_doc("Its name or an alias, also with `:latest`; may be left out if it is the only."),
    ] = None
    options: Annotated[OllamaOptions | None, field_doc("Sampling, and the most output tokens.")] = (
        None
    )
    keep_alive: Annotated[str | float | None, field_doc("Without effect: models stay loaded.")] = (
        None
    )
    priority: Priority | None = None
    request_id: str | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    session_id: Annotated[str, Meta(max_length=256)] | None = None


class OllamaGenerationRequest(OllamaRequest, kw_only=True):
    """The fields that `/api/chat` and `/api/generate` share."""

    cache_ttl: CacheTtl | None = None
    cache_scope: CacheScopeName | None = None
    stream: Annotated[
        bool | None,
        field_doc("If true (the default), the answer is a stream of JSON lines."),
    ] = None
    format: Annotated[str | dict[str, Any] | None, field_doc('`"json"`, or a JSON schema.')] = None
    think: Annotated[
        bool | str | None,
        field_doc(
            "If true or a level (`low`, `medium`, `high`, `max`), the model reasons first; if "
            "false, not. Default: the template decides."
        ),
    ] = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    truncate: Annotated[
        bool | None, field_doc("Without effect: a prompt that does not fit is refused.")
    ] = None
    shift: Annotated[
        bool | None, field_doc("Without effect: an answer ends where the context does.")
    ] = None


class OllamaChatRequest(OllamaGenerationRequest, kw_only=True):
    """The body of `POST /api/chat`."""

    messages: Annotated[
        list[OllamaMessage] | None,
        field_doc(
            "The conversation. If the last message is the assistant's, the model continues it; "
            "without messages, the answer says that the model is loaded."
        ),
    ] = None
    tools: Annotated[
        list[Tool] | None, field_doc("Functions that the model may call, up to 1,024.")
    ] = None


class OllamaGenerateRequest(OllamaGenerationRequest, kw_only=True):
    """The body of `POST /api/generate`."""

    prompt: Annotated[
        str | None,
        field_doc("The user's message; without one, the answer says that the model is loaded."),
    ] = None
    system: Annotated[str | None, field_doc("The system's message before it.")] = None
    raw: Annotated[
        bool | None, field_doc("If true, `prompt` is the model's whole prompt, without a template.")
    ] = None
    images: Annotated[list[str] | None, field_doc("Images in base64, for models that see.")] = None
    suffix: Annotated[
        str | None, field_doc("As in completions: the text after the output; without a template.")
    ] = None


class OllamaEmbedRequest(OllamaRequest, kw_only=True):
    """The body of `POST /api/embed`."""

    input: Annotated[str | list[str], field_doc("A text or a list of texts.")]
    truncate: Annotated[
        bool | None, field_doc("If true (the default), inputs are cut to the context's length.")
    ] = None
    dimensions: Dimensions | None = None


class OllamaEmbeddingsRequest(OllamaRequest, kw_only=True):
    """The body of `POST /api/embeddings`, the older form of `/api/embed`."""

    prompt: Annotated[str | None, field_doc("One text.")] = None


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /api/show`."""

    model: str | None = None
    name: Annotated[str | None, field_doc("The older name of `model`.")] = None
    verbose: Annotated[bool | None, field_doc("Without effect.")] = None


_TEMPLATE = UnsupportedField("the model's own template is used; leave it out", ("",))
_NO_ADAPTERS = UnsupportedField("use the adapter's name as `model`", ([],))
REFUSED_BY_OLLAMA_CHAT: dict[str, UnsupportedField] = {
    "adapters": _NO_ADAPTERS,
    "max_tokens": UnsupportedField("use `options` with `num_predict`"),
    "max_completion_tokens": UnsupportedField("use `options` with `num_predict`"),
    "prompt": UnsupportedField("use `messages`, or `/api/generate`", ("",)),
    "response_format": UnsupportedField("use `format`"),
    "template": _TEMPLATE,
    "tool_choice": UnsupportedField("Ollama's API has none; use `/v1/chat/completions`", ("auto",)),
}
REFUSED_BY_OLLAMA_GENERATE: dict[str, UnsupportedField] = {
    "adapters": _NO_ADAPTERS,
    "context": UnsupportedField("use `/api/chat` with the earlier messages", ([],)),
    "height": UnsupportedField("only text is produced; leave it out", (0,)),
    "max_tokens": UnsupportedField("use `options` with `num_predict`"),
    "messages": UnsupportedField("use `/api/chat`", ([],)),
    "response_format": UnsupportedField("use `format`"),
    "steps": UnsupportedField("only text is produced; leave it out", (0,)),
    "template": _TEMPLATE,
    "tools": UnsupportedField("use `/api/chat`", ([],)),
    "width": UnsupportedField("only text is produced; leave it out", (0,)),
}
REFUSED_BY_OLLAMA_SHOW: dict[str, UnsupportedField] = {
    "options": UnsupportedField("a model is shown as it is; leave it out", ({},)),
    "system": UnsupportedField("a model is shown as it is; leave it out", ("",)),
    "template": UnsupportedField("a model is shown as it is; leave it out", ("",)),
}

OLLAMA_CHAT = RequestDecoder(OllamaChatRequest, REFUSED_BY_OLLAMA_CHAT)
OLLAMA_GENERATE = RequestDecoder(OllamaGenerateRequest, REFUSED_BY_OLLAMA_GENERATE)
OLLAMA_EMBED = RequestDecoder(OllamaEmbedRequest, {})
OLLAMA_EMBEDDINGS = RequestDecoder(OllamaEmbeddingsRequest, {})
OLLAMA_SHOW = RequestDecoder(OllamaShowRequest, REFUSED_BY_OLLAMA_SHOW)
