"""What the translations to chat requests and their adapters share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pdserve.errors import InvalidRequest
from pdserve.frontend.http.http_response import EVENTS
from pdserve.protocols.completion_requests import ContentPart, ImageUrl, PlacedPart
from pdserve.protocols.sse import WAITING_COMMENT
from pdserve.protocols.unsupported_fields import shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.protocols.completion_responses import Usage

T = TypeVar("T")


class EventStreamAdapter:
    """What adapters share whose streams are server-sent events."""

    stream_type = EVENTS

    def waiting(self) -> bytes:
        """What is sent while there is no token."""
        return WAITING_COMMENT


def content_of(parts: Sequence[str | ContentPart]) -> str | list[ContentPart]:
    """A message's content: a single text as it is, several texts and images as parts, of which a
    model's template makes one text."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [
        ContentPart(type="text", text=part) if isinstance(part, str) else part for part in parts
    ] or ""


def image_part(url: str, where: str) -> ContentPart:
    """An image of the client's field `where`."""
    return PlacedPart(type="image_url", image_url=ImageUrl(url=url), where=where)


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


def arguments_object(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; empty for a call that was cut off."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def cached_tokens(usage: Usage) -> int:
    """Number of cached prompt tokens; 0 if unknown."""
    details = usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens


def reasoning_tokens(usage: Usage) -> int:
    """Number of reasoning tokens of the output."""
    details = usage.completion_tokens_details
    return details.reasoning_tokens if details else 0
