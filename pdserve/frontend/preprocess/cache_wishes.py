"""Reads for how long, and for whom, a request wants the KV of its prompt to be kept.

Worker and tiers decide what they keep; a wish costs its client nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from pdserve.ids import Seconds
    from pdserve.messages.tiers import CacheScope
    from pdserve.protocols.completion_requests import ChatRequest, CompletionRequest

__all__ = ["CacheWish", "cache_wish"]

_DAY: Final[Seconds] = 86400.0
_RETENTIONS: Final = {"24h": _DAY}
"""Values of OpenAI's `prompt_cache_retention` that ask for more than the usual."""


class CacheWish(NamedTuple):
    """What a request wants of the tiers below the device."""

    ttl: Seconds = 0.0
    """0: no wish."""
    scope: CacheScope = ""


def cache_wish(request: ChatRequest | CompletionRequest) -> CacheWish:
    """The wish of a request. Errors: `InvalidRequest` if its fields contradict each other."""
    scope: CacheScope = request.cache_scope or ""
    if scope == "never":
        if request.cache_ttl:
            raise InvalidRequest(
                "'cache_ttl' asks to keep what 'cache_scope' never keeps; leave one of the two out",
                param="cache_ttl",
            )
        return CacheWish(scope=scope)
    if request.cache_ttl is not None:
        return CacheWish(request.cache_ttl, scope)
    return CacheWish(_RETENTIONS.get(request.prompt_cache_retention or "", 0.0), scope)
