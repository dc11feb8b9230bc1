"""Defines the answers and errors of Ollama's API as typed records.

Durations are in nanoseconds. What is not known is left out, as Ollama leaves out what is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from pdserve.protocols.completion_responses import ChatLogprob

if TYPE_CHECKING:
    from pdserve.errors import PdserveError

OLLAMA_VERSION: Final = "0.13.5"
"""Release of Ollama whose API is served: clients refuse older ones, or ask them for less."""
NEVER: Final = "9999-12-31T23:59:59Z"
"""When a model is unloaded."""
NDJSON: Final = b"application/x-ndjson"

_encode = msgspec.json.Encoder().encode
DoneReason = Literal["stop", "length", "load"]


class OllamaCallMade(msgspec.Struct, kw_only=True):
    index: int
    name: str
    arguments: dict[str, Any]
    """Empty if the answer was cut off before they were complete."""


class OllamaToolUse(msgspec.Struct, kw_only=True):
    """A tool call for the client to run; its result is a message with role `tool`."""

    id: str
    function: OllamaCallMade


class OllamaReply(msgspec.Struct, kw_only=True):
    """The assistant's message, or a part of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolUse] | UnsetType = UNSET


class OllamaFigures(msgspec.Struct, kw_only=True):
    """Tokens and times of an answer that is done. Nanoseconds."""

    total_duration: int | UnsetType = UNSET
    """From the request's arrival to the last token."""
    load_duration: int | UnsetType = UNSET
    """From the arrival until the prompt is computed: preparing, routing and queues."""
    prompt_eval_count: int | UnsetType = UNSET
    """Tokens of the prompt, cached ones included."""
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    """From the first token to the last."""


class OllamaChatAnswer(OllamaFigures, kw_only=True):
    """The answer of `/api/chat`, or one line of its stream."""

    model: str
    created_at: str
    message: OllamaReply
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class OllamaGenerateAnswer(OllamaFigures, kw_only=True):
    """The answer of `/api/generate`, or one line of its stream."""

    model: str
    created_at: str
    response: str
    thinking: str | UnsetType = UNSET
    done: bool
    done_reason: DoneReason | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class OllamaVectors(OllamaFigures, kw_only=True):
    """The answer of `/api/embed`, in the order of its inputs."""

    model: str
    embeddings: list[list[float]]


class OllamaVector(msgspec.Struct, kw_only=True):
    """The answer of `/api/embeddings`."""

    embedding: list[float]


class OllamaDetails(msgspec.Struct, kw_only=True):
    """What a frontend knows of a model's weights; the rest is empty."""

    parent_model: str = ""
    """Of a LoRA adapter: its model."""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""
    """Number format of the weights."""


class OllamaModel(msgspec.Struct, kw_only=True):
    """One served model."""

    name: str
    model: str
    modified_at: str
    size: int = 0
    """Always 0: a frontend does not see the files."""
    digest: str
    """Hash of everything that decides the answers."""
    details: OllamaDetails


class OllamaModelList(msgspec.Struct, kw_only=True):
    """The answer of `GET /api/tags`."""

    models: list[OllamaModel]


class OllamaRunningModel(OllamaModel, kw_only=True):
    """One model that has a worker."""

    expires_at: str = NEVER
    size_vram: int = 0
    """Always 0, as `size`."""
    context_length: int


class OllamaRunningList(msgspec.Struct, kw_only=True):
    """The answer of `GET /api/ps`."""

    models: list[OllamaRunningModel]


class OllamaShown(msgspec.Struct, kw_only=True):
    """The answer of `POST /api/show`."""

    parameters: str
    """The model's recommended sampling, a parameter per line."""
    details: OllamaDetails
    model_info: dict[str, Any]
    """Its names begin with `general.architecture`, which is always pdserve."""
    capabilities: list[str]
    """Of `completion`, `tools`, `thinking`, `vision`, `insert` and `embedding`."""
    modified_at: str


class OllamaVersion(msgspec.Struct, kw_only=True):
    """The answer of `GET /api/version`."""

    version: str = OLLAMA_VERSION
    """Release of Ollama whose API is served."""
    pdserve: str


class OllamaErrorBody(msgspec.Struct, kw_only=True):
    """The body of every answer of `/api/*` with a status of 400 or more, and the last line of a
    stream that failed."""

    error: str


def ollama_error_body(error: PdserveError) -> bytes:
    """The error as JSON, in Ollama's shape."""
    return _encode(OllamaErrorBody(error=error.message))
