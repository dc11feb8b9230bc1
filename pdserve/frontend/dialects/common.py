"""What the translations to a chat request have in common. Plain functions."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, TypeVar

from pdserve.errors import InvalidRequest
from pdserve.openai.fields import shorten
from pdserve.openai.schema import ContentPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pdserve.openai.responses import Usage

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


@contextlib.contextmanager
def own_names(names: Mapping[str, str]) -> Iterator[None]:
    """Words refusals of a chat request in the fields of the request it was made from.

    Args: `names` from pattern of a chat's field to what stands for it here.
    """
    try:
        yield
    except InvalidRequest as error:
        _reword(error, names)
        raise


def _reword(error: InvalidRequest, names: Mapping[str, str]) -> None:
    for pattern, own in names.items():
        error.message = re.sub(rf"(?<=['`]){pattern}(?=['`.\[])", own, error.message)
        if error.param is not None:
            error.param = re.sub(rf"^{pattern}(?=$|[.\[])", own, error.param)
    error.args = (error.message,)


def cached_tokens(usage: Usage) -> int:
    """Of the prompt, as far as it is known."""
    details = usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens


def reasoning_tokens(usage: Usage) -> int:
    """Of the output."""
    details = usage.completion_tokens_details
    return details.reasoning_tokens if details else 0
