"""What the translations to a chat request have in common. Plain functions."""

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
    """A message's content: one text as it is, several as parts, which a model's template joins."""
    if len(texts) > 1:
        return [ContentPart(type="text", text=text) for text in texts]
    return texts[0] if texts else ""


def required(value: T | None, where: str) -> T:
    """Errors: `InvalidRequest` for what is missing at `where`."""
    if value is None:
        raise missing(where)
    return value


def missing(where: str) -> InvalidRequest:
    """The refusal of a request without what belongs at `where`."""
    return InvalidRequest(f"'{where}' is required", param=where)


def unsupported(where: str, value: str, instead: str) -> InvalidRequest:
    """The refusal of a word at `where`; `instead` says what is understood."""
    return InvalidRequest(f"'{where}': '{shorten(value)}' is not supported; {instead}", param=where)


def cached_tokens(usage: Usage) -> int:
    """Of the prompt, as far as it is known."""
    details = usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens


def reasoning_tokens(usage: Usage) -> int:
    """Of the output."""
    details = usage.completion_tokens_details
    return details.reasoning_tokens if details else 0
