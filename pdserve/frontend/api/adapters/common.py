"""Functions shared by the translations to chat requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from pdserve.errors import InvalidRequest
from pdserve.protocols.completion_requests import ContentPart
from pdserve.protocols.unsupported_fields import shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.protocols.completion_responses import Usage

T = TypeVar("T")


def content_of(texts: Sequence[str]) -> str | list[ContentPart]:
    """A message's content: a single text as it is, several as parts, which a model's template
    joins."""
    if len(texts) > 1:
        return [ContentPart(type="text", text=text) for text in texts]
    return texts[0] if texts else ""


def required(value: T | None, where: str) -> T:
    """Returns `value`. Errors: `InvalidRequest` if it is missing at `where`."""
    if value is None:
        raise missing(where)
    return value


def missing(where: str) -> InvalidRequest:
    """The error for a request without a required field at `where`."""
    return InvalidRequest(f"'{where}' is required", param=where)


def unsupported(where: str, value: str, instead: str) -> InvalidRequest:
    """The error for an unsupported value at `where`; `instead` says what is supported."""
    return InvalidRequest(f"'{where}': '{shorten(value)}' is not supported; {instead}", param=where)


def cached_tokens(usage: Usage) -> int:
    """Number of cached prompt tokens; 0 if unknown."""
    details = usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens


def reasoning_tokens(usage: Usage) -> int:
    """Number of reasoning tokens of the output."""
    details = usage.completion_tokens_details
    return details.reasoning_tokens if details else 0
