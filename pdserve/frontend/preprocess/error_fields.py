"""Translates validation errors of a converted request back to the fields the client sent.

An adapter relies on the checks of the chat request it makes, whose errors would name fields that
the client never sent. This file knows no API: callers say which field stands for which.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["InOwnTerms", "reword_errors"]


class InOwnTerms(InvalidRequest):
    """An error about a converted request that names the client's own field already."""


@contextlib.contextmanager
def reword_errors(names: Mapping[str, str], tools: Sequence[str] = ()) -> Iterator[None]:
    """Rewrites errors about a chat request in terms of the request it was made from.

    Args: `names` maps patterns of a chat's fields to the original fields; `tools`: the original
    places of the chat's tools, if they differ.
    """
    try:
        yield
    except InOwnTerms:
        raise
    except InvalidRequest as error:
        _reword(error, names)
        if tools:
            _replace_tools(error, tools)
        raise


def _replace_tools(error: InvalidRequest, places: Sequence[str]) -> None:
    def own(match: re.Match[str]) -> str:
        # The number may be part of the client's own text and so out of range.
        at = int(match[1])
        return places[at] if at < len(places) else match[0]

    error.message = re.sub(r"(?<=['`])tools\[(\d{1,6})\]", own, error.message)
    if error.param is not None:
        error.param = re.sub(r"^tools\[(\d{1,6})\]", own, error.param)
    error.args = (error.message,)


def _reword(error: InvalidRequest, names: Mapping[str, str]) -> None:
    for pattern, own in names.items():
        error.message = re.sub(rf"(?<=['`]){pattern}(?=['`.\[])", own, error.message)
        if error.param is not None:
            error.param = re.sub(rf"^{pattern}(?=$|[.\[])", own, error.param)
    error.args = (error.message,)
